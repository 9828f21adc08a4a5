package org.djlmoe.io;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Stream;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class AtomicFilesTest {

    @TempDir private Path folder;

    @Test
    void writeString_link_targetIsReplacedAndTheLinkStays() throws IOException {
        Path target = Files.writeString(folder.resolve("target"), "old");
        Path link = Files.createSymbolicLink(folder.resolve("link"), target);

        AtomicFiles.writeString(link, "new");

        assertTrue(Files.isSymbolicLink(link));
        assertEquals("new", Files.readString(target));
    }

    @Test
    void writeString_device_isWrittenToAndStaysADevice() throws IOException {
        Path device = Path.of("/dev/null");
        Assumptions.assumeTrue(Files.exists(device));
        Path link = Files.createSymbolicLink(folder.resolve("nothing"), device);

        AtomicFiles.writeString(link, "text");

        assertFalse(Files.isRegularFile(device));
        assertTrue(Files.isSymbolicLink(link));
    }

    @Test
    void write_failure_oldFileStaysAndNothingElseIsLeft() throws IOException {
        Path file = Files.writeString(folder.resolve("file"), "old");

        assertThrows(
                IOException.class,
                () ->
                        AtomicFiles.write(
                                file,
                                out -> {
                                    out.write(1);
                                    throw new IOException("full");
                                }));

        assertEquals("old", Files.readString(file));
        try (Stream<Path> files = Files.list(folder)) {
            assertEquals(1, files.count());
        }
    }
}
