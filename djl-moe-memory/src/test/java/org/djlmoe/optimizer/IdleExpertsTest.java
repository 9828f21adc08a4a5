package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.optimizer.StateTiersTest.Way;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** Experts without tokens, which only the routing can tell. */
class IdleExpertsTest {

    private final Map<String, long[]> load = new HashMap<>();

    private OffloadStreamAdamW.Builder builder(IdleExperts policy) {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(Tracker.fixed(0.01f))
                .optWeightDecay(0.1)
                .optIdleExperts(policy, () -> Map.copyOf(load));
    }

    private static OffloadStreamAdamW.Builder plain() {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(Tracker.fixed(0.01f))
                .optWeightDecay(0.1);
    }

    /** A stacked parameter is what its experts would be as parameters of their own. */
    @Property(tries = 30)
    void step_stacked_equalsOneParameterAnExpert(
            @ForAll long seed,
            @ForAll Way way,
            @ForAll @IntRange(min = 1, max = 5) int experts,
            @ForAll @IntRange(min = 1, max = 40) int bucket) {
        Random random = new Random(seed);
        int rows = 1 + random.nextInt(4);
        int columns = 1 + random.nextInt(4);
        int size = rows * columns;
        Path folder = Path.of("target");
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW stacked =
                        way.apply(builder(IdleExperts.SKIP), folder)
                                .optBucketElements(bucket)
                                .build();
                OffloadStreamAdamW separate = plain().build()) {
            NDArray all = manager.zeros(new Shape(experts, rows, columns));
            List<NDArray> each = new ArrayList<>();
            for (int e = 0; e < experts; e++) {
                each.add(manager.zeros(new Shape(rows, columns)));
            }
            long[] counts = new long[experts];
            for (int step = 0; step < 6; step++) {
                long[] tokens = new long[experts];
                float[] g = new float[experts * size];
                List<Slot> slots = new ArrayList<>();
                for (int e = 0; e < experts; e++) {
                    tokens[e] = random.nextInt(3);
                    if (tokens[e] > 0) {
                        counts[e]++;
                        float[] own = new float[size];
                        for (int i = 0; i < size; i++) {
                            own[i] = (float) random.nextGaussian();
                            g[e * size + i] = own[i];
                        }
                        slots.add(
                                new Slot(
                                        "e" + e,
                                        "e" + e,
                                        each.get(e),
                                        manager.create(own, new Shape(rows, columns))));
                    }
                }
                load.put("x", tokens);
                stacked.step(List.of(new Slot("x", "x", all, manager.create(g, all.getShape()))));
                separate.step(slots);
            }
            assertArrayEquals(counts, stacked.state().steps("x"));
            float[] together = all.toFloatArray();
            float[] m = stacked.state().expAvg(manager, "x").toFloatArray();
            for (int e = 0; e < experts; e++) {
                float[] expected = each.get(e).toFloatArray();
                for (int i = 0; i < size; i++) {
                    assertEquals(expected[i], together[e * size + i], 1e-7f);
                }
                if (counts[e] > 0) {
                    assertArrayEquals(
                            separate.state().expAvg(manager, "e" + e).toFloatArray(),
                            Arrays.copyOfRange(m, e * size, (e + 1) * size),
                            1e-7f);
                }
            }
        }
    }

    private static void step(
            OffloadStreamAdamW optimizer, NDManager manager, NDArray w, float[] g) {
        NDArray gradient = manager.create(g, w.getShape());
        optimizer.step(List.of(new Slot("x", "x", w, gradient)));
        assertArrayEquals(new float[g.length], gradient.toFloatArray(), "gradient set to zero");
    }

    @Test
    void step_idleSkipped_nothingOfTheExpertChanges() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder(IdleExperts.SKIP).build()) {
            NDArray w = manager.ones(new Shape(3, 2));
            load.put("x", new long[] {4, 0, 1});
            step(optimizer, manager, w, new float[] {1, 1, 7, 7, 1, 1});
            float[] after = w.toFloatArray();
            assertEquals(1 - 0.001f - 0.01f, after[0], 1e-6f);
            assertArrayEquals(new float[] {1, 1}, Arrays.copyOfRange(after, 2, 4));
            assertArrayEquals(new long[] {1, 0, 1}, optimizer.state().steps("x"));
            // its first update is corrected as a first one
            load.put("x", new long[] {0, 9, 0});
            step(optimizer, manager, w, new float[] {0, 0, 5, 5, 0, 0});
            assertEquals(1 - 0.001f - 0.01f, w.toFloatArray()[2], 1e-6f);
            assertEquals(after[0], w.toFloatArray()[0]);
        }
    }

    @Test
    void step_idleDecayed_onlyTheWeightShrinks() {
        for (Way way : new Way[] {Way.MEMORY, Way.STAGED}) {
            try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                    OffloadStreamAdamW optimizer =
                            way.apply(builder(IdleExperts.DECAY), Path.of("target")).build()) {
                NDArray w = manager.ones(new Shape(2, 2));
                load.put("x", new long[] {1, 1});
                step(optimizer, manager, w, new float[] {1, 1, 1, 1});
                float before = w.toFloatArray()[3];
                float[] m = optimizer.state().expAvg(manager, "x").toFloatArray();
                load.put("x", new long[] {1, 0});
                step(optimizer, manager, w, new float[] {1, 1, 0, 0});
                assertEquals(before * (1 - 0.001f), w.toFloatArray()[3], 1e-7f);
                assertEquals(m[3], optimizer.state().expAvg(manager, "x").toFloatArray()[3], 0f);
                assertArrayEquals(new long[] {2, 1}, optimizer.state().steps("x"));
            }
        }
    }

    /** Zeros alone do not make an expert idle, and by default nothing else does. */
    @Test
    void step_zeroGradientOfAnExpertWithTokens_isUpdated() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW told = builder(IdleExperts.SKIP).build();
                OffloadStreamAdamW untold = plain().build()) {
            for (OffloadStreamAdamW optimizer : List.of(told, untold)) {
                NDArray w = manager.ones(new Shape(2, 2));
                load.put("x", new long[] {1, 1});
                step(optimizer, manager, w, new float[] {1, 1, 0, 0});
                assertEquals(1 - 0.001f, w.toFloatArray()[3], 1e-7f);
                assertEquals(1, optimizer.state().step("x"));
            }
        }
    }

    @Test
    void step_countedTogetherSoFar_eachExpertGoesOnFromThere() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder(IdleExperts.SKIP).build()) {
            optimizer.state().define("x", new Shape(2, 2), 5);
            NDArray w = manager.ones(new Shape(2, 2));
            load.put("x", new long[] {1, 0});
            step(optimizer, manager, w, new float[] {1, 1, 0, 0});
            assertArrayEquals(new long[] {6, 5}, optimizer.state().steps("x"));
            assertEquals(6, optimizer.state().step("x"));
            optimizer.state().define("y", new Shape(3, 1), new long[] {1, 2, 3}, false);
            assertArrayEquals(new long[] {1, 2, 3}, optimizer.state().steps("y"));
            assertThrows(
                    IllegalArgumentException.class,
                    () -> optimizer.state().define("z", new Shape(3, 1), new long[] {1, 2}, false));
        }
    }

    @Test
    void step_loadOfAnotherShape_isRefusedAndChangesNothing() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder(IdleExperts.SKIP).build()) {
            NDArray w = manager.ones(new Shape(2, 2));
            load.put("x", new long[] {1, 0, 3});
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () -> step(optimizer, manager, w, new float[] {1, 1, 1, 1}));
            assertTrue(e.getMessage().contains("x"), e.getMessage());
            assertArrayEquals(new float[] {1, 1, 1, 1}, w.toFloatArray());
            assertTrue(optimizer.state().paths().isEmpty());
        }
    }

    /** A step that is left out or refused has used up its tokens all the same. */
    @ParameterizedTest
    @EnumSource(names = {"SKIP", "RAISE"})
    void step_notFinite_takesItsLoad(NonFinitePolicy policy) {
        int[] taken = {0};
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        plain().optNonFinite(policy)
                                .optIdleExperts(
                                        IdleExperts.SKIP,
                                        () -> {
                                            taken[0]++;
                                            return Map.of();
                                        })
                                .build()) {
            NDArray w = manager.ones(new Shape(2, 2));
            Executable bad = () -> step(optimizer, manager, w, new float[] {1, 1, Float.NaN, 1});
            if (policy == NonFinitePolicy.RAISE) {
                assertThrows(ArithmeticException.class, bad);
            } else {
                assertDoesNotThrow(bad);
            }
            assertEquals(1, taken[0]);
            step(optimizer, manager, w, new float[] {1, 1, 1, 1});
            assertEquals(2, taken[0]);
        }
    }

    /** Its tokens are those of the step that comes in its place: they are handed out once. */
    @Test
    void step_refusedThenRight_isTheStepThatWasRefused() {
        double[] rate = {-1};
        List<Integer> asked = new ArrayList<>();
        List<Map<String, long[]>> loads = new ArrayList<>();
        loads.add(Map.of("x", new long[] {1, 0}));
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        OffloadStreamAdamW.builder()
                                .setLearningRateTracker(
                                        (path, number) -> {
                                            asked.add(number);
                                            return (float) rate[0];
                                        })
                                .optIdleExperts(IdleExperts.SKIP, () -> loads.remove(0))
                                .build()) {
            NDArray w = manager.ones(new Shape(2, 1));
            NDArray g = manager.ones(new Shape(2, 1));
            List<Slot> slots = List.of(new Slot("x", "x", w, g));
            assertThrows(IllegalArgumentException.class, () -> optimizer.step(slots));
            rate[0] = 0.01;
            optimizer.step(slots);

            assertEquals(List.of(1, 1), asked);
            assertEquals(1, optimizer.updates());
            assertArrayEquals(new long[] {1, 0}, optimizer.state().steps("x"));
            assertEquals(1f, w.toFloatArray()[1]);
        }
    }
}
