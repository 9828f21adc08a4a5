package org.djlmoe.examples.bench;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Map;
import org.djlmoe.examples.bench.ChildJvm.Allocator;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class SoakTest {

    @TempDir private Path temporary;

    @Test
    void dropIn_steps50To300_holdNoMoreArraysOrMemory() throws IOException {
        Map<String, Integer> shape =
                Map.of(
                        "vocab",
                        500,
                        "hidden",
                        32,
                        "layers",
                        2,
                        "heads",
                        4,
                        "batch",
                        4,
                        "sequence",
                        32,
                        "seed",
                        1);
        Case ours = new Case(DropInWorkload.OURS, SoakWorkload.class, null);
        try (ChildJvm child = ChildJvm.start(ours, shape, Allocator.EXACT, temporary)) {
            child.run();
            Map<String, Double> after50 = child.figures();
            for (int i = 0; i < 5; i++) {
                child.run();
            }
            Map<String, Double> after300 = child.figures();

            assertTrue(after50.get("arrays") > 20, after50::toString);
            assertEquals(after50.get("arrays"), after300.get("arrays"));
            double grown = (after300.get("held") - after50.get("held")) / (1 << 20);
            assertTrue(grown <= 8, () -> grown + " MiB more");
        }
    }
}
