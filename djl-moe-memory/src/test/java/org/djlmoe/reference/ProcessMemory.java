package org.djlmoe.reference;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;

/** What this process occupies, without files and shared memory. */
public final class ProcessMemory {

    private static final Path STATUS = Path.of("/proc/self/status");

    private ProcessMemory() {}

    /** Whether the operating system tells. */
    public static boolean isKnown() {
        return Files.isReadable(STATUS);
    }

    /** RssAnon in bytes. */
    public static long anonymousBytes() {
        try {
            for (String line : Files.readAllLines(STATUS)) {
                if (line.startsWith("RssAnon:")) {
                    return Long.parseLong(line.replaceAll("[^0-9]", "")) * 1024;
                }
            }
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        throw new IllegalStateException("No RssAnon in " + STATUS);
    }
}
