package org.djlmoe.plan;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

/**
 * A plan beside a real run, in a process of its own: what an allocator does is decided when a
 * process starts.
 */
@EnabledOnOs(OS.LINUX)
class PlanAgainstRunTest {

    @TempDir Path folder;

    /**
     * All tokens go to the same two experts, so that the plan's worst case happens. A missing array
     * of [N, H] in every layer, or one of the experts', would exceed the tolerance.
     */
    @Test
    void peak_everyTokenToTheSameExperts_isAsPlanned() throws Exception {
        double ratio = plannedOverMeasured("256,2,8,512,258", "4,1024", "skew", "kv=2", "steps=2");
        assertTrue(ratio > 0.85 && ratio < 1.25, "planned / measured " + ratio);
    }

    /** Experts in F32 would exceed the tolerance, and so would the product of an adapter. */
    @Test
    void peak_adaptersOverHalfExperts_isAsPlanned() throws Exception {
        double ratio =
                plannedOverMeasured(
                        "512,2,8,1024,258", "2,512", "lora=8", "half", "kv=2", "steps=2");
        assertTrue(ratio > 0.85 && ratio < 1.25, "planned / measured " + ratio);
    }

    /** The scratch is as wide as the shared experts, and no array is as long as the batch. */
    @Test
    void peak_wideSharedExperts_isAsPlanned() throws Exception {
        double ratio =
                plannedOverMeasured("256,2,8,256,258", "4,1024", "shared=2048", "kv=2", "steps=2");
        assertTrue(ratio > 0.85 && ratio < 1.25, "planned / measured " + ratio);
    }

    /** What runs along for the mask is most of the peak. */
    @Test
    void peak_denseMask_isAsPlanned() throws Exception {
        double ratio =
                plannedOverMeasured("64,1,128,32,258", "16,1024", "mask=120", "kv=1", "steps=4");
        assertTrue(ratio > 0.85 && ratio < 1.25, "planned / measured " + ratio);
    }

    private double plannedOverMeasured(String... arguments) throws Exception {
        List<String> command =
                new ArrayList<>(
                        List.of(
                                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                                // All of the heap is touched at once, so none of it counts as
                                // growth.
                                "-Xms64m",
                                "-Xmx64m",
                                "-XX:+UseSerialGC",
                                "-XX:+AlwaysPreTouch",
                                "-cp",
                                System.getProperty("java.class.path"),
                                CalibrationRun.class.getName()));
        command.addAll(List.of(arguments));
        ProcessBuilder builder = new ProcessBuilder(command);
        builder.environment().put("MALLOC_MMAP_THRESHOLD_", "1048576");
        builder.environment().put("MALLOC_ARENA_MAX", "1");
        // Threads that wait for a busy machine's other core spin for minutes.
        builder.environment().put("OMP_NUM_THREADS", "1");
        builder.environment().remove("MALLOC_TRIM_THRESHOLD_");
        Path out = folder.resolve("out.txt");
        Path err = folder.resolve("err.txt");
        builder.redirectOutput(out.toFile());
        builder.redirectError(err.toFile());
        Process process = builder.start();
        try {
            boolean ended = process.waitFor(5, TimeUnit.MINUTES);
            String text = Files.readString(out, StandardCharsets.UTF_8);
            assertTrue(ended && process.exitValue() == 0, () -> text + read(err));
            String line = text.strip();
            return Double.parseDouble(line.substring(line.lastIndexOf(' ') + 1));
        } finally {
            process.destroyForcibly();
        }
    }

    private static String read(Path file) {
        try {
            return Files.readString(file, StandardCharsets.UTF_8);
        } catch (IOException e) {
            return e.toString();
        }
    }
}
