package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import org.djlmoe.testing.MeasuredJvm;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The memory of a process of its own, whose allocator returns what is freed. */
@EnabledOnOs(OS.LINUX)
class OptimizerMemoryTest {

    private static final long MB = 1 << 20;

    @TempDir Path folder;

    /** State that fell out of memory, and buffers made anew each step, are what this pins down. */
    @ParameterizedTest
    @ValueSource(strings = {"memory", "files", "staged", "staged-files"})
    void step_twoHundredTimes_memoryIsBoundedAndFlat(String way) throws Exception {
        long[] figures = run(way);
        assertEquals(4, figures.length);
        double staging = 2.0 * OptimizerMemoryRun.BUCKET * 16;
        double state = way.endsWith("files") ? 0 : 8.0 * OptimizerMemoryRun.ELEMENTS;
        assertTrue(figures[0] <= state + 1.05 * staging, way + ": state " + figures[0]);
        assertTrue(figures[1] <= 8 * MB, way + ": growth " + figures[1]);
        assertEquals(figures[2], figures[3], "staging buffers");
        assertTrue(figures[2] <= staging, "staging " + figures[2]);
        assertEquals(way.startsWith("staged"), figures[2] > 0);
    }

    /** Elsewhere a resumed run needed twice the memory, or a copy of the state for a moment. */
    @Test
    void load_anyOptimizer_peaksAtTheStateAndOneBucket() throws Exception {
        long[] figures = run(StateLoadMemoryRun.class);
        assertEquals(3, figures.length);
        double bucket = 8.0 * OptimizerMemoryRun.BUCKET;
        for (long figure : figures) {
            assertTrue(figure <= bucket, Arrays.toString(figures) + " beyond the state");
        }
    }

    private long[] run(String way) throws Exception {
        return run(OptimizerMemoryRun.class, way);
    }

    private long[] run(Class<?> main, String... options) throws Exception {
        List<String> arguments = new ArrayList<>(List.of(options));
        arguments.add(folder.toString());
        String text =
                MeasuredJvm.run(
                        folder, List.of("-XX:TieredStopAtLevel=1"), Map.of(), main, arguments);
        return Arrays.stream(text.split(" +")).mapToLong(Long::parseLong).toArray();
    }
}
