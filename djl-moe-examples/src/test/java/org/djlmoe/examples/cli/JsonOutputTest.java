package org.djlmoe.examples.cli;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.PrintWriter;
import java.io.Writer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

class JsonOutputTest {
    private static final PrintWriter UNUSED = new PrintWriter(Writer.nullWriter());

    @TempDir private Path directory;

    record Figures(String name, double loss, Double ratio, float rate, List<Double> losses) {}

    @Test
    void write_numbersThatJsonLacks_becomeNull() throws IOException {
        Path file = directory.resolve("a.json");
        JsonOutput.write(
                new Figures(
                        "a<b", Double.NaN, null, Float.POSITIVE_INFINITY, List.of(1.5, Double.NaN)),
                file.toString(),
                UNUSED);

        assertEquals(
                """
                {
                  "name": "a<b",
                  "loss": null,
                  "ratio": null,
                  "rate": null,
                  "losses": [
                    1.5,
                    null
                  ]
                }
                """,
                Files.readString(file));
    }

    @Test
    void write_fileExists_isReplacedAndNothingElseIsLeft() throws IOException {
        Path file = directory.resolve("a.json");
        Files.writeString(file, "old and much longer than the new content");
        JsonOutput.write(List.of(), file.toString(), UNUSED);

        assertEquals("[]\n", Files.readString(file));
        try (Stream<Path> files = Files.list(directory)) {
            assertEquals(List.of(file), files.toList());
        }
    }

    /** What renames over the name would take a device's place too, /dev/null among them. */
    @Test
    void write_fileIsALink_writesWhereItLeadsAndLeavesTheLink() throws IOException {
        Path file = Files.writeString(directory.resolve("a.json"), "old");
        Path link = Files.createSymbolicLink(directory.resolve("link"), file);
        JsonOutput.write(List.of(), link.toString(), UNUSED);

        assertEquals("[]\n", Files.readString(file));
        assertTrue(Files.isSymbolicLink(link));
    }

    @Test
    @EnabledOnOs({OS.LINUX, OS.MAC})
    void write_fileIsAPipe_writesIntoItAndLeavesThePipe() throws Exception {
        Path pipe = directory.resolve("pipe");
        assertEquals(0, new ProcessBuilder("mkfifo", pipe.toString()).start().waitFor());
        Path copy = directory.resolve("copy");
        Process reader =
                new ProcessBuilder("cat", pipe.toString()).redirectOutput(copy.toFile()).start();
        try {
            JsonOutput.write(List.of(), pipe.toString(), UNUSED);
            assertFalse(Files.isRegularFile(pipe));
            assertTrue(reader.waitFor(1, TimeUnit.MINUTES));
            assertEquals("[]\n", Files.readString(copy));
        } finally {
            reader.destroy();
        }
    }

    @Test
    void write_parentIsAFile_isTheUsersMistake() throws IOException {
        Path file = Files.writeString(directory.resolve("a"), "");
        UserError e =
                assertThrows(
                        UserError.class,
                        () ->
                                JsonOutput.write(
                                        List.of(), file.resolve("b.json").toString(), UNUSED));
        assertTrue(e.getMessage().startsWith("--json: cannot make the directory"), e.getMessage());
    }

    @Test
    void write_impossibleName_isTheUsersMistake() {
        assertThrows(UserError.class, () -> JsonOutput.write(List.of(), "a\u0000b", UNUSED));
    }
}
