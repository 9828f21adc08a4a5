package org.djlmoe.reference;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;

/** What this process occupies, without files and shared memory. */
public final class ProcessMemory {

    private static final Path MAPS = Path.of("/proc/self/smaps");
    private static final long FOUR_GIB = 1L << 32;

    private ProcessMemory() {}

    /** Whether the operating system tells. */
    public static boolean isKnown() {
        return Files.isReadable(MAPS);
    }

    /**
     * Anonymous resident bytes outside the Java heap, which grows as it likes: the JVM puts a heap
     * of a few GiB below the address of 4 GiB, and nothing else is there.
     */
    public static long nativeBytes() {
        long kilobytes = 0;
        boolean counts = false;
        try {
            for (String line : Files.readAllLines(MAPS, StandardCharsets.ISO_8859_1)) {
                if (line.matches("[0-9a-f]+-[0-9a-f]+ .*")) {
                    String start = line.substring(0, line.indexOf('-'));
                    counts = Long.parseUnsignedLong(start, 16) >= FOUR_GIB;
                } else if (counts && line.startsWith("Anonymous:")) {
                    kilobytes += Long.parseLong(line.replaceAll("[^0-9]", ""));
                }
            }
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        return kilobytes * 1024;
    }
}
