package org.djlmoe.examples.files;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.Comparator;
import java.util.List;
import java.util.stream.Stream;

/**
 * A folder for files that nobody needs afterwards. It goes with everything in it when it is closed,
 * and also when the process is told to end before (Ctrl-C); not when it is killed.
 */
public final class TemporaryFolder implements AutoCloseable {

    private final Path path;
    private final Thread hook;

    private TemporaryFolder(Path path) {
        this.path = path;
        hook = new Thread(() -> deleteQuietly(path), "delete " + path.getFileName());
        Runtime.getRuntime().addShutdownHook(hook);
    }

    /**
     * Makes a folder among the system's temporary files.
     *
     * @param prefix how its name begins
     * @return the folder
     * @throws IOException if it cannot be made
     */
    public static TemporaryFolder create(String prefix) throws IOException {
        return new TemporaryFolder(Files.createTempDirectory(prefix));
    }

    /**
     * Makes a folder below another.
     *
     * @param parent the other, which is there
     * @param prefix how its name begins
     * @return the folder
     * @throws IOException if it cannot be made
     */
    public static TemporaryFolder create(Path parent, String prefix) throws IOException {
        return new TemporaryFolder(Files.createTempDirectory(parent, prefix));
    }

    /**
     * Returns where it is.
     *
     * @return the path
     */
    public Path path() {
        return path;
    }

    @Override
    public void close() throws IOException {
        delete(path);
        try {
            Runtime.getRuntime().removeShutdownHook(hook);
        } catch (IllegalStateException e) {
            // The process is ending: the hook finds nothing to do.
        }
    }

    /** What still writes while the process ends may add a file after the list was made. */
    private static void deleteQuietly(Path folder) {
        for (int attempt = 0; attempt < 3 && Files.exists(folder); attempt++) {
            try {
                delete(folder);
            } catch (IOException | UncheckedIOException e) {
                // Tried again; there is nobody left to be told.
            }
        }
    }

    private static void delete(Path folder) throws IOException {
        List<Path> files;
        try (Stream<Path> all = Files.walk(folder)) {
            files = all.sorted(Comparator.reverseOrder()).toList();
        } catch (NoSuchFileException e) {
            return;
        }
        for (Path file : files) {
            Files.deleteIfExists(file);
        }
    }
}
