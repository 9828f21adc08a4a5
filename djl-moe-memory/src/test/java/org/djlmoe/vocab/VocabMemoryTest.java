package org.djlmoe.vocab;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import org.djlmoe.testing.MeasuredJvm;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

/**
 * The memory of a loss in a process of its own: what an allocator does is decided when a process
 * starts.
 */
@EnabledOnOs(OS.LINUX)
class VocabMemoryTest {

    /** Numbers, labels, weights and losses of tokens; a row of hidden states has 2048 bytes. */
    private static final double BYTES_A_TOKEN = 100;

    @TempDir Path folder;

    /**
     * A second array of the size of the hidden states, for a moment, is the fault this pins down.
     */
    @Test
    void backward_moreTokens_sameWorkingMemory() throws Exception {
        double[] working = working();
        assertEquals(4, working.length);
        double tokens = VocabMemoryRun.MANY - VocabMemoryRun.FEW;
        double mean = (working[1] - working[0]) / tokens;
        assertTrue(mean < BYTES_A_TOKEN, "mean: " + mean + " bytes a token");
        double none = (working[3] - working[2]) / tokens;
        assertTrue(none < BYTES_A_TOKEN, "none: " + none + " bytes a token");
    }

    private double[] working() throws Exception {
        String text =
                MeasuredJvm.run(
                        folder,
                        List.of(),
                        // Threads that wait for a busy machine's other core spin for minutes.
                        Map.of("OMP_NUM_THREADS", "1"),
                        VocabMemoryRun.class,
                        List.of());
        return Arrays.stream(text.split(" +")).mapToDouble(Double::parseDouble).toArray();
    }
}
