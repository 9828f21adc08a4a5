package org.djlmoe.kernel;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.zip.CRC32;
import java.util.zip.ZipEntry;
import java.util.zip.ZipOutputStream;

/**
 * Writes a TorchScript archive without parameters in memory: four stored zip entries, of which one
 * is the code.
 *
 * <p>The format is that of {@code torch.jit.save}: a pickle of the (empty) module object, the code,
 * an empty tuple of constants, and the format version.
 */
final class ScriptArchive {

    private static final String HEAD =
            "class K(Module):\n"
                    + "  __parameters__ = []\n"
                    + "  __buffers__ = []\n"
                    + "  training : bool\n"
                    + "  def forward(self: __torch__.K, x: Tensor) -> Tensor:\n"
                    + "    return x\n";

    private ScriptArchive() {}

    static byte[] of(String functions) {
        StringBuilder code = new StringBuilder(HEAD);
        for (String line : functions.split("\n")) {
            if (line.isBlank() || line.strip().startsWith("#")) {
                continue; // the parser of serialized code takes no comment between functions
            }
            int comment = line.indexOf("  #");
            code.append("  ").append(comment < 0 ? line : line.substring(0, comment)).append('\n');
        }
        String source =
                code.toString()
                        .replace("(self,", "(self: __torch__.K,")
                        .replace("(self)", "(self: __torch__.K)");
        ByteArrayOutputStream bytes = new ByteArrayOutputStream();
        try (ZipOutputStream zip = new ZipOutputStream(bytes)) {
            put(zip, "k/data.pkl", emptyModule());
            put(zip, "k/code/__torch__.py", source.getBytes(StandardCharsets.UTF_8));
            put(zip, "k/constants.pkl", new byte[] {(byte) 0x80, 2, ')', '.'});
            put(zip, "k/version", new byte[] {'3', '\n'});
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        return bytes.toByteArray();
    }

    /**
     * The object {@code __torch__.K()} with the attribute {@code training = True}, pickle protocol
     * 2.
     */
    private static byte[] emptyModule() {
        ByteArrayOutputStream pickle = new ByteArrayOutputStream();
        pickle.writeBytes(new byte[] {(byte) 0x80, 2});
        pickle.writeBytes("c__torch__\nK\n".getBytes(StandardCharsets.US_ASCII));
        pickle.writeBytes(new byte[] {')', (byte) 0x81, '}', '(', 'X', 8, 0, 0, 0});
        pickle.writeBytes("training".getBytes(StandardCharsets.US_ASCII));
        pickle.writeBytes(new byte[] {(byte) 0x88, 'u', 'b', '.'});
        return pickle.toByteArray();
    }

    private static void put(ZipOutputStream zip, String name, byte[] data) throws IOException {
        CRC32 crc = new CRC32();
        crc.update(data);
        ZipEntry entry = new ZipEntry(name);
        entry.setMethod(ZipEntry.STORED);
        entry.setSize(data.length);
        entry.setCrc(crc.getValue());
        zip.putNextEntry(entry);
        zip.write(data);
        zip.closeEntry();
    }
}
