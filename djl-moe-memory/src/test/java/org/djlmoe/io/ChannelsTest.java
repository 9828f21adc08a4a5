package org.djlmoe.io;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;
import java.util.stream.Stream;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

class ChannelsTest {

    @TempDir private Path folder;

    @Test
    void writeFully_fullDisk_namesFileReasonAndRemedy() throws IOException {
        Path full = Path.of("/dev/full");
        Assumptions.assumeTrue(Files.exists(full));
        Path file = folder.resolve("model.safetensors");
        // Opened for writing alone: nothing here could replace the device.
        try (FileChannel channel = FileChannel.open(full, StandardOpenOption.WRITE)) {
            IOException direct =
                    assertThrows(
                            IOException.class,
                            () -> Channels.writeFully(file, channel, ByteBuffer.allocate(8)));
            assertSaysWhatToDo(direct.getMessage(), file, "No space left on device");
            OutputStream out = Channels.newOutputStream(file, channel);
            IOException streamed = assertThrows(IOException.class, () -> out.write(1));
            assertSaysWhatToDo(streamed.getMessage(), file, "No space left on device");
        }
    }

    @Test
    void failure_errorThatNamesATemporaryFile_namesTheFinalOne() {
        Path file = folder.resolve("model.safetensors");
        IOException failure =
                Channels.failure(
                        file, new FileSystemException(".model.tmp", null, "No inode left"));
        assertSaysWhatToDo(failure.getMessage(), file, "No inode left");
    }

    /** The process's limit on the size of a file stands in for the disk. */
    @Test
    @EnabledOnOs(OS.LINUX)
    void writers_roomEndsHalfWay_nameTheFileAndLeaveNothing() throws Exception {
        Process process =
                new ProcessBuilder(
                                "sh",
                                "-c",
                                "ulimit -f 64; exec \"$@\"",
                                "sh",
                                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                                "-XX:-UsePerfData",
                                "-cp",
                                System.getProperty("java.class.path"),
                                FullDiskRun.class.getName(),
                                folder.toString())
                        .redirectErrorStream(true)
                        .start();
        String text = new String(process.getInputStream().readAllBytes(), StandardCharsets.UTF_8);
        assertEquals(0, process.waitFor(), text);
        List<String> lines = text.lines().toList();
        List<String> names = List.of("text", "one.safetensors", "model.safetensors");
        assertEquals(names.size(), lines.size(), text);
        for (int i = 0; i < names.size(); i++) {
            assertSaysWhatToDo(lines.get(i), folder.resolve(names.get(i)), "File too large");
        }
        try (Stream<Path> left = Files.list(folder)) {
            assertEquals(List.of(), left.toList());
        }
    }

    private static void assertSaysWhatToDo(String message, Path file, String reason) {
        assertTrue(message.startsWith("Cannot write " + file + ": " + reason + "."), message);
        assertTrue(message.endsWith("free some, or write to another folder"), message);
    }
}
