package org.djlmoe.offload;

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
        String text =
                MeasuredJvm.run(
                        folder,
                        List.of(),
                        Map.of(),
                        OffloadMemoryRun.class,
                        List.of(folder.toString()));
        return Arrays.stream(text.split(" +")).mapToDouble(Double::parseDouble).toArray();
    }
}
