package org.djlmoe.examples.bench;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;

/** What this process holds at a moment; looking leaves the kernel's high-water mark alone. */
final class ProcessStatus {

    private static final Path STATUS = Path.of("/proc/self/status");

    private ProcessStatus() {}

    /** Returns RssAnon + RssShmem in bytes, or 0 where the system does not tell. */
    static long held() {
        if (!Files.isReadable(STATUS)) {
            return 0;
        }
        try {
            return Files.readAllLines(STATUS, StandardCharsets.ISO_8859_1).stream()
                    .filter(line -> line.startsWith("RssAnon:") || line.startsWith("RssShmem:"))
                    .mapToLong(line -> 1024 * Long.parseLong(line.replaceAll("[^0-9]", "")))
                    .sum();
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
    }
}
