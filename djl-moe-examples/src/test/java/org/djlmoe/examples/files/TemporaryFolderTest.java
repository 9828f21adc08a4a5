package org.djlmoe.examples.files;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

class TemporaryFolderTest {

    @TempDir private Path parent;

    /** Makes a folder with a file and waits to be ended. */
    static final class Waiting {
        public static void main(String[] args) throws Exception {
            TemporaryFolder folder = TemporaryFolder.create(Path.of(args[0]), "waiting");
            Files.writeString(folder.path().resolve("file"), "x");
            System.out.println(folder.path());
            Thread.sleep(TimeUnit.MINUTES.toMillis(5));
        }
    }

    @Test
    void close_filesAndFoldersInIt_allGone() throws IOException {
        try (TemporaryFolder folder = TemporaryFolder.create(parent, "a")) {
            Path inner = Files.createDirectory(folder.path().resolve("inner"));
            Files.writeString(inner.resolve("file"), "x");
            assertEquals(parent, folder.path().getParent());
        }
        assertEmpty();
    }

    @Test
    void close_folderIsGoneAlready_noError() throws IOException {
        try (TemporaryFolder folder = TemporaryFolder.create(parent, "a")) {
            Files.delete(folder.path());
        }
        assertEmpty();
    }

    @Test
    @EnabledOnOs({OS.LINUX, OS.MAC})
    void processToldToEnd_beforeItIsClosed_allGone() throws Exception {
        Process process =
                new ProcessBuilder(
                                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                                "-cp",
                                System.getProperty("java.class.path"),
                                Waiting.class.getName(),
                                parent.toString())
                        .redirectError(ProcessBuilder.Redirect.INHERIT)
                        .start();
        try (BufferedReader out =
                new BufferedReader(new InputStreamReader(process.getInputStream()))) {
            Path folder = Path.of(out.readLine());
            assertTrue(Files.exists(folder.resolve("file")));
            process.destroy();
            assertTrue(process.waitFor(1, TimeUnit.MINUTES));
            assertFalse(Files.exists(folder));
        } finally {
            process.destroyForcibly();
        }
    }

    private void assertEmpty() throws IOException {
        try (Stream<Path> files = Files.list(parent)) {
            assertEquals(List.of(), files.toList());
        }
    }
}
