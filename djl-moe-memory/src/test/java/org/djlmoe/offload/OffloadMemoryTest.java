package org.djlmoe.offload;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

/** The memory of a process of its own, whose allocator returns what is freed. */
@EnabledOnOs(OS.LINUX)
class OffloadMemoryTest {

    @TempDir Path folder;

    /** cpu checkpointing on and memory unchanged is the fault this pins down. */
    @Test
    void endOfForward_fileTier_boundariesAreGone() throws Exception {
        double[] grown = grown();
        assertEquals(4, grown.length);
        // two boundaries a layer, and the ends
        assertTrue(grown[0] > 16, "decoder, without: " + grown[0] + " boundaries");
        assertTrue(grown[1] <= 3.5, "decoder, with: " + grown[1] + " boundaries");
        assertTrue(grown[2] > 15, "chain in lists, without: " + grown[2] + " boundaries");
        assertTrue(grown[3] <= 3.5, "chain in lists, with: " + grown[3] + " boundaries");
    }

    private double[] grown() throws Exception {
        ProcessBuilder builder =
                new ProcessBuilder(
                        List.of(
                                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                                "-Xms64m",
                                "-Xmx64m",
                                "-XX:+UseSerialGC",
                                "-XX:+AlwaysPreTouch",
                                "-cp",
                                System.getProperty("java.class.path"),
                                OffloadMemoryRun.class.getName(),
                                folder.toString()));
        builder.environment().put("MALLOC_MMAP_THRESHOLD_", "1048576");
        builder.environment().put("MALLOC_ARENA_MAX", "1");
        builder.environment().remove("MALLOC_TRIM_THRESHOLD_");
        Path out = folder.resolve("out.txt");
        Path err = folder.resolve("err.txt");
        builder.redirectOutput(out.toFile());
        builder.redirectError(err.toFile());
        Process process = builder.start();
        try {
            boolean ended = process.waitFor(5, TimeUnit.MINUTES);
            String text = Files.readString(out, StandardCharsets.UTF_8);
            String errors = Files.readString(err, StandardCharsets.UTF_8);
            assertTrue(ended && process.exitValue() == 0, text + errors);
            return Arrays.stream(text.strip().split(" +"))
                    .mapToDouble(Double::parseDouble)
                    .toArray();
        } finally {
            process.destroyForcibly();
        }
    }
}
