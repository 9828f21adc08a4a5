package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.tier.HostTier;
import org.djlmoe.tier.Tier;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The rule and its options, with gradients given by hand. */
class OffloadStreamAdamWTest {

    private static OffloadStreamAdamW.Builder builder() {
        return OffloadStreamAdamW.builder().setLearningRateTracker(Tracker.fixed(0.01f));
    }

    /** Weights by path and one optimizer; gradients come per step. */
    private static final class Bench implements AutoCloseable {

        final NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        final Map<String, NDArray> weights = new LinkedHashMap<>();
        final OffloadStreamAdamW optimizer;

        Bench(OffloadStreamAdamW optimizer) {
            this.optimizer = optimizer;
        }

        Bench with(String path, Shape shape, float value) {
            weights.put(path, manager.full(shape, value, DataType.FLOAT32));
            return this;
        }

        void step(Map<String, float[]> gradients) {
            List<Slot> slots = new ArrayList<>();
            gradients.forEach(
                    (path, g) -> {
                        NDArray weight = weights.get(path);
                        slots.add(new Slot(path, path, weight, gradient(g, weight.getShape())));
                    });
            optimizer.step(slots);
            for (Slot slot : slots) {
                assertEquals(0f, slot.gradient().abs().sum().getFloat(), "gradient set to zero");
                slot.gradient().close();
            }
        }

        NDArray gradient(float[] values, Shape shape) {
            return values.length == 1
                    ? manager.full(shape, values[0], DataType.FLOAT32)
                    : manager.create(values, shape);
        }

        float[] weight(String path) {
            return weights.get(path).toFloatArray();
        }

        @Override
        public void close() {
            optimizer.close();
            manager.close();
        }
    }

    @Property(tries = 30)
    void step_randomShapes_equalsThePlainRule(
            @ForAll Random random,
            @ForAll @IntRange(min = 1, max = 5) int parameters,
            @ForAll @IntRange(min = 1, max = 40) int bucket,
            @ForAll boolean fused,
            @ForAll boolean clip) {
        double decay = 0.1;
        OffloadStreamAdamW.Builder builder =
                builder().optWeightDecay(decay).optBucketElements(bucket).optEpsilon(1e-6);
        if (clip) {
            builder.optClipNorm(0.7);
        }
        try (Bench bench =
                new Bench(builder.build(fused ? AdamWKernels.fused() : AdamWKernels.plain()))) {
            Map<String, PlainAdamW> plain = new LinkedHashMap<>();
            for (int p = 0; p < parameters; p++) {
                long[] axes = new long[1 + random.nextInt(3)];
                for (int i = 0; i < axes.length; i++) {
                    axes[i] = 1 + random.nextInt(5);
                }
                Shape shape = new Shape(axes);
                float[] start = new float[(int) shape.size()];
                for (int i = 0; i < start.length; i++) {
                    start[i] = (float) random.nextGaussian();
                }
                bench.weights.put("p" + p, bench.manager.create(start, shape));
                plain.put("p" + p, new PlainAdamW(start));
            }
            for (int step = 0; step < 7; step++) {
                Map<String, float[]> gradients = new LinkedHashMap<>();
                double squares = 0;
                for (String path : plain.keySet()) {
                    if (random.nextInt(4) > 0) {
                        float[] g = new float[plain.get(path).weight.length];
                        for (int i = 0; i < g.length; i++) {
                            g[i] = (float) random.nextGaussian();
                            squares += (double) g[i] * g[i];
                        }
                        gradients.put(path, g);
                    }
                }
                double scale = clip ? Math.min(1, 0.7 / (Math.sqrt(squares) + 1e-6)) : 1;
                gradients.forEach(
                        (path, g) ->
                                plain.get(path)
                                        .step(
                                                g,
                                                scale,
                                                0.01f,
                                                0.9,
                                                0.999,
                                                1e-6,
                                                bench.weights.get(path).getShape().dimension() > 1
                                                        ? decay
                                                        : 0));
                bench.step(gradients);
            }
            plain.forEach(
                    (path, expected) -> {
                        float[] actual = bench.weight(path);
                        for (int i = 0; i < actual.length; i++) {
                            // relative to the weight plus the length of a step
                            assertEquals(
                                    expected.weight[i],
                                    actual[i],
                                    2e-6 * (Math.abs(expected.weight[i]) + 0.1),
                                    path);
                        }
                    });
        }
    }

    @Test
    void step_twoParametersOfOnes_bothMoveByTheLearningRateEveryStep() {
        try (Bench bench =
                new Bench(builder().optWeightDecay(0).build())
                        .with("a", new Shape(2, 2), 1)
                        .with("b", new Shape(3), 1)) {
            for (int step = 1; step <= 2; step++) {
                bench.step(Map.of("a", new float[] {1}, "b", new float[] {1}));
                for (String path : List.of("a", "b")) {
                    for (float w : bench.weight(path)) {
                        assertEquals(1 - 0.01f * step, w, 1e-6f);
                    }
                }
            }
        }
    }

    @Test
    void step_manyParameters_countsOncePerStepAndFromOne() {
        List<Integer> asked = new ArrayList<>();
        Tracker tracker =
                n -> {
                    asked.add(n);
                    return 0.01f;
                };
        try (Bench bench =
                new Bench(OffloadStreamAdamW.builder().setLearningRateTracker(tracker).build())
                        .with("a", new Shape(2), 1)
                        .with("b", new Shape(2), 1)
                        .with("c", new Shape(2), 1)) {
            Map<String, float[]> all = new LinkedHashMap<>();
            bench.weights.keySet().forEach(path -> all.put(path, new float[] {1}));
            bench.step(all);
            assertEquals(List.of(1, 1, 1), asked);
            assertEquals(1, bench.optimizer.state().step("c"));
            bench.step(all);
            assertEquals(List.of(1, 1, 1, 2, 2, 2), asked);
            assertEquals(2, bench.optimizer.updates());
        }
    }

    /** A count in bfloat16 stays at 256. */
    @Test
    void step_threeHundredTimes_countIsExact() {
        try (Bench bench =
                new Bench(builder().optWeightDecay(0).build()).with("a", new Shape(2), 1)) {
            PlainAdamW plain = new PlainAdamW(new float[] {1, 1});
            for (int step = 0; step < 300; step++) {
                float g = step % 3 - 0.9f;
                bench.step(Map.of("a", new float[] {g}));
                plain.step(new float[] {g, g}, 1, 0.01f, 0.9, 0.999, 1e-8, 0);
            }
            assertEquals(300, bench.optimizer.state().step("a"));
            assertEquals(plain.weight[0], bench.weight("a")[0], 2e-6);
        }
    }

    @Test
    void step_zeroGradient_decaysMatricesAndLeavesVectors() {
        try (Bench bench =
                new Bench(builder().optWeightDecay(0.1).build())
                        .with("matrix", new Shape(2, 2), 2)
                        .with("bias", new Shape(2), 2)
                        .with("scalar", new Shape(), 2)) {
            bench.step(
                    Map.of(
                            "matrix", new float[] {0},
                            "bias", new float[] {0},
                            "scalar", new float[] {0}));
            assertEquals(2 * (1 - 0.01f * 0.1f), bench.weight("matrix")[3], 1e-7f);
            assertEquals(2f, bench.weight("bias")[0], 0f);
            assertEquals(2f, bench.weight("scalar")[0], 0f);
        }
    }

    @Test
    void step_groups_firstMatchCountsAndAGroupMayBeEmpty() {
        try (Bench bench =
                new Bench(
                                builder()
                                        .optWeightDecay(0.1)
                                        .optGroup(path -> path.startsWith("nobody"), 5, 5)
                                        .optDecayGroup(path -> path.endsWith("bias"), 0.5)
                                        .optDecayGroup(path -> path.startsWith("head"), 0)
                                        .optLearningRateGroup(path -> path.startsWith("head"), 0.5)
                                        .build())
                        .with("head.bias", new Shape(2), 1)
                        .with("head.weight", new Shape(2, 2), 1)
                        .with("body.weight", new Shape(2, 2), 1)) {
            bench.step(
                    Map.of(
                            "head.bias", new float[] {1},
                            "head.weight", new float[] {1},
                            "body.weight", new float[] {1}));
            assertEquals(1 - 0.005 * 0.5 - 0.005, bench.weight("head.bias")[0], 1e-7);
            assertEquals(1 - 0.005, bench.weight("head.weight")[0], 1e-7);
            assertEquals(1 - 0.01 * 0.1 - 0.01, bench.weight("body.weight")[0], 1e-7);
        }
    }

    @Test
    void step_clipValue_clipsOnBothSides() {
        try (Bench bench =
                new Bench(builder().optClipValue(1).build()).with("a", new Shape(3), 1)) {
            bench.step(Map.of("a", new float[] {-5, 5, 0.5f}));
            assertArrayEquals(
                    new float[] {-0.1f, 0.1f, 0.05f},
                    bench.optimizer.state().expAvg(bench.manager, "a").toFloatArray(),
                    1e-7f);
        }
    }

    @Test
    void step_rescaledByAPowerOfTwo_isExact() {
        OffloadStreamAdamW.Builder half = builder().optWeightDecay(0.1);
        try (Bench one =
                        new Bench(builder().optWeightDecay(0.1).build())
                                .with("a", new Shape(10, 6), 1);
                Bench two =
                        new Bench(half.setRescaleGrad(0.5f).build())
                                .with("a", new Shape(10, 6), 1)) {
            Random random = new Random(5);
            for (int step = 0; step < 3; step++) {
                float[] g = new float[60];
                float[] twice = new float[60];
                for (int i = 0; i < 60; i++) {
                    g[i] = (float) random.nextGaussian();
                    twice[i] = 2 * g[i];
                }
                one.step(Map.of("a", g));
                two.step(Map.of("a", twice));
            }
            assertArrayEquals(one.weight("a"), two.weight("a"));
        }
    }

    @Test
    void step_rescaledAndClippedTwice_valuesComeBeforeTheNorm() {
        OffloadStreamAdamW.Builder builder = builder().optClipValue(3).optClipNorm(2.5);
        try (Bench bench =
                new Bench(builder.setRescaleGrad(0.5f).build()).with("a", new Shape(2), 1)) {
            bench.step(Map.of("a", new float[] {-100, 8})); // (-50, 4), then (-3, 3), norm 4.243
            double norm = Math.sqrt(18);
            assertEquals(norm, bench.optimizer.globalNorm(), 1e-6);
            float clipped = (float) (0.1 * 3 * 2.5 / (norm + 1e-6));
            assertArrayEquals(
                    new float[] {-clipped, clipped},
                    bench.optimizer.state().expAvg(bench.manager, "a").toFloatArray(),
                    1e-6f);
        }
    }

    /** Squares of such gradients don't fit in 32 bits. */
    @ParameterizedTest
    @ValueSource(floats = {1e30f, 1e-30f})
    void step_extremeGradients_normIsRightAndStepIsNotSkipped(float g) {
        try (Bench bench =
                new Bench(builder().optClipNorm(1).optNonFinite(NonFinitePolicy.SKIP).build())
                        .with("a", new Shape(200_000), 1)) {
            bench.step(Map.of("a", new float[] {g}));
            double norm = g * Math.sqrt(200_000);
            assertEquals(norm, bench.optimizer.globalNorm(), 1e-9 * norm);
            assertEquals(0, bench.optimizer.skippedSteps());
        }
    }

    @ParameterizedTest
    @ValueSource(floats = {Float.NaN, Float.POSITIVE_INFINITY, Float.NEGATIVE_INFINITY})
    void step_nonFiniteGradientSkip_leavesEverythingAndCounts(float bad) {
        try (Bench bench =
                new Bench(
                                builder()
                                        .optClipValue(1)
                                        .optNonFinite(NonFinitePolicy.SKIP)
                                        .optTier(new HostTier())
                                        .build())
                        .with("a", new Shape(2, 2), 1)
                        .with("b", new Shape(2), 1)) {
            bench.step(Map.of("a", new float[] {1}, "b", new float[] {1}));
            float[] a = bench.weight("a");
            float[] m = bench.optimizer.state().expAvg(bench.manager, "a").toFloatArray();

            bench.step(Map.of("a", new float[] {1}, "b", new float[] {1, bad}));

            assertArrayEquals(a, bench.weight("a"));
            assertArrayEquals(m, bench.optimizer.state().expAvg(bench.manager, "a").toFloatArray());
            assertEquals(1, bench.optimizer.state().step("a"));
            assertEquals(1, bench.optimizer.skippedSteps());
            assertEquals(1, bench.optimizer.updates());

            bench.step(Map.of("a", new float[] {1}, "b", new float[] {1}));
            assertEquals(2, bench.optimizer.updates());
            assertEquals(0.98f, bench.weight("b")[1], 1e-6f);
        }
    }

    @Test
    void step_nonFiniteGradientRaise_namesTheParameterAndChangesNothing() {
        try (Bench bench =
                new Bench(builder().optNonFinite(NonFinitePolicy.RAISE).build())
                        .with("good", new Shape(2), 1)
                        .with("bad", new Shape(2), 1)) {
            Map<String, float[]> gradients = new LinkedHashMap<>();
            gradients.put("good", new float[] {1});
            gradients.put("bad", new float[] {1, Float.NaN});
            ArithmeticException e =
                    assertThrows(ArithmeticException.class, () -> bench.step(gradients));
            assertTrue(e.getMessage().contains("bad"), e.getMessage());
            assertArrayEquals(new float[] {1, 1}, bench.weight("good"));
            assertTrue(bench.optimizer.state().paths().isEmpty());
        }
    }

    @Test
    void state_savedAndRestored_nextStepsAreTheSameToTheBit() {
        Shape shape = new Shape(3, 7);
        try (Bench one = new Bench(builder().optBucketElements(4).build()).with("a", shape, 1);
                Bench two = new Bench(builder().optBucketElements(9).build())) {
            one.with("b", new Shape(5), 2);
            for (int step = 1; step <= 5; step++) {
                one.step(Map.of("a", new float[] {step}));
                one.step(Map.of("a", new float[] {-1}, "b", new float[] {step - 2.5f}));
            }
            AdamWState from = one.optimizer.state();
            AdamWState to = two.optimizer.state();
            for (String path : from.paths()) {
                to.define(path, from.shape(path), from.step(path));
                long size = from.shape(path).size();
                for (long start = 0; start < size; start += 2) { // in runs of two elements
                    Shape run = new Shape(Math.min(2, size - start));
                    NDArray m = two.manager.zeros(run);
                    NDArray v = two.manager.zeros(run);
                    from.read(path, start, m, v);
                    to.write(path, start, m, v);
                }
                two.weights.put(path, one.weights.get(path).duplicate());
            }
            assertEquals(10, to.step("a"));
            assertEquals(5, to.step("b"));
            for (int step = 0; step < 3; step++) {
                Map<String, float[]> gradients =
                        Map.of("a", new float[] {0.3f * step}, "b", new float[] {0.1f});
                one.step(gradients);
                two.step(gradients);
            }
            for (String path : from.paths()) {
                assertArrayEquals(one.weight(path), two.weight(path));
                assertArrayEquals(
                        from.expAvgSq(one.manager, path).toFloatArray(),
                        to.expAvgSq(two.manager, path).toFloatArray());
                assertNotEquals(0f, one.weight(path)[0]);
            }
        }
    }

    @Test
    void state_ofAnotherShape_isRefused() {
        try (Bench bench = new Bench(builder().build()).with("a", new Shape(4), 1)) {
            bench.optimizer.state().define("a", new Shape(2, 2), 3);
            assertThrows(
                    IllegalStateException.class, () -> bench.step(Map.of("a", new float[] {1})));
        }
    }

    @Test
    void state_unknownPathOrRange_isRefused() {
        try (Bench bench = new Bench(builder().build()).with("a", new Shape(4), 1)) {
            AdamWState state = bench.optimizer.state();
            assertThrows(IllegalArgumentException.class, () -> state.step("a"));
            state.define("a", new Shape(4), 1);
            NDArray two = bench.manager.zeros(new Shape(2));
            assertThrows(IllegalArgumentException.class, () -> state.read("a", 3, two, two));
            assertThrows(IllegalArgumentException.class, () -> state.define("a", new Shape(4), -1));
        }
    }

    @Test
    void tier_afterSteps_holdsEightBytesAnElementAndNeverMore() {
        Tier tier = new HostTier();
        try (Bench bench =
                new Bench(builder().optBucketElements(10).optTier(tier).build())
                        .with("a", new Shape(33), 1)
                        .with("b", new Shape(0), 1)) {
            for (int step = 0; step < 5; step++) {
                bench.step(Map.of("a", new float[] {1}, "b", new float[] {}));
                assertEquals(33 * 8, tier.bytes());
            }
        }
        tier.close();
        assertEquals(0, tier.bytes());
    }

    /** It is updated run by run, 2^21 elements at most, and its gradient cleared alike. */
    @Test
    void step_longParameter_everyElementIsUpdatedOnceAndItsGradientCleared() {
        int n = 2 * (1 << 21) + 77;
        float[] g = new float[n];
        for (int i = 0; i < n; i++) {
            g[i] = i % 7 == 0 ? -1 : 1;
        }
        try (Bench bench = new Bench(builder().build()).with("w", new Shape(n), 1)) {
            bench.step(Map.of("w", g));
            bench.step(Map.of("w", g));

            float[] after = bench.weight("w");
            for (int i = 0; i < n; i++) {
                assertEquals(1 - 0.02f * g[i], after[i], 1e-6f);
            }
        }
    }

    @Test
    void step_gradientThatIsNoSingleRun_isUsedAndCleared() {
        try (Bench bench =
                new Bench(builder().optBucketElements(2).build()).with("w", new Shape(3, 2), 1)) {
            NDArray weight = bench.weights.get("w");
            NDArray rows = bench.manager.create(new float[] {1, -1, 1, -1, 1, -1}, new Shape(2, 3));
            NDArray gradient = rows.transpose();

            bench.optimizer.step(List.of(new Slot("w", "w", weight, gradient)));

            float down = 1 - 0.01f * 0.01f - 0.01f;
            float up = 1 - 0.01f * 0.01f + 0.01f;
            assertArrayEquals(new float[] {down, up, up, down, down, up}, bench.weight("w"), 1e-6f);
            assertArrayEquals(new float[6], rows.toFloatArray());
        }
    }

    /** Their norm is beyond 32 bits, and so is what they are divided by. */
    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void step_hugeButFiniteGradients_areClipped(boolean fused) {
        AdamWKernels kernels = fused ? AdamWKernels.fused() : AdamWKernels.plain();
        OffloadStreamAdamW optimizer =
                builder().optClipNorm(0.1).optNonFinite(NonFinitePolicy.SKIP).build(kernels);
        try (Bench bench = new Bench(optimizer).with("w", new Shape(100), 1)) {
            bench.step(Map.of("w", new float[] {1e38f}));

            assertEquals(0, bench.optimizer.skippedSteps());
            assertEquals(1e39, bench.optimizer.globalNorm(), 1e33);
            assertEquals(0.99f, bench.weight("w")[42], 1e-6f);
            try (NDArray mean = bench.optimizer.state().expAvg(bench.manager, "w")) {
                assertEquals(0.1f * 0.01f, mean.getFloat(42), 1e-8f);
            }
        }
    }

    @Test
    void step_weightThatIsNoSingleRun_isRefusedWithARemedyThatHelps() {
        try (Bench bench = new Bench(builder().build()).with("a", new Shape(2), 1)) {
            NDArray turned = bench.manager.ones(new Shape(3, 2)).transpose();
            bench.weights.put("b", turned);
            Map<String, float[]> gradients = new LinkedHashMap<>();
            gradients.put("a", new float[] {1});
            gradients.put("b", new float[] {1});
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, () -> bench.step(gradients));
            assertTrue(e.getMessage().startsWith("b "), e.getMessage());
            assertTrue(e.getMessage().contains("reshape(-1).reshape("), e.getMessage());
            assertEquals(1, bench.weight("a")[0]);
            assertEquals(0, bench.optimizer.updates());

            bench.weights.put("b", turned.reshape(-1).reshape(turned.getShape()));
            bench.step(gradients);
            assertEquals(0.99f, bench.weight("a")[0], 1e-6f);
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void step_negativeScaleAndLargeGradient_climbs(boolean fused) {
        AdamWKernels kernels = fused ? AdamWKernels.fused() : AdamWKernels.plain();
        try (Bench bench =
                new Bench(builder().setRescaleGrad(-1).build(kernels)).with("w", new Shape(2), 1)) {
            bench.step(Map.of("w", new float[] {1e10f}));
            assertEquals(1.01f, bench.weight("w")[0], 1e-5f);
        }
    }

    @Test
    void step_refusedModel_theCorrectedOneIsTaken() {
        try (Bench bench = new Bench(builder().build()).with("w", new Shape(2), 1)) {
            NDArray wrong = bench.manager.ones(new Shape(2)).toType(DataType.FLOAT64, true);
            List<Slot> slots = List.of(new Slot("other", "w", wrong, wrong.duplicate()));
            assertThrows(IllegalArgumentException.class, () -> bench.optimizer.step(slots));
            bench.step(Map.of("w", new float[] {1}));
            assertEquals(0.99f, bench.weight("w")[0], 1e-6f);
        }
    }

    @Test
    void step_parameterOfAnotherModel_isRefused() {
        try (Bench bench = new Bench(builder().build()).with("w", new Shape(2), 1)) {
            bench.step(Map.of("w", new float[] {1}));
            NDArray other = bench.manager.ones(new Shape(2));
            List<Slot> slots =
                    List.of(
                            new Slot(
                                    "other",
                                    "w",
                                    other,
                                    bench.gradient(new float[] {1}, new Shape(2))));
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> bench.optimizer.step(slots));
            assertTrue(e.getMessage().contains("build a new optimizer"), e.getMessage());
            assertArrayEquals(new float[] {1, 1}, other.toFloatArray());
        }
    }

    @Test
    void builder_nullsAndNegatives_areRefusedAtOnce() {
        List<Executable> calls =
                List.of(
                        () -> builder().optBlock(null),
                        () -> builder().optModel(null),
                        () -> builder().optNonFinite(null),
                        () -> builder().optTier(null),
                        () -> builder().optFileTier(null),
                        () -> builder().optIdleExperts(null, Map::of),
                        () -> builder().optIdleExperts(IdleExperts.SKIP, null),
                        () -> builder().optDecayGroup(null, 0.1),
                        () -> builder().optLearningRateGroup(null, 0.1),
                        () -> builder().optBeginNumUpdate(-1),
                        () -> builder().optBucketElements(0));
        calls.forEach(call -> assertThrows(IllegalArgumentException.class, call));
    }

    @ParameterizedTest
    @ValueSource(floats = {-1, Float.NaN, Float.POSITIVE_INFINITY})
    void step_impossibleLearningRate_isRefusedAndChangesNothing(float rate) {
        OffloadStreamAdamW.Builder builder =
                OffloadStreamAdamW.builder().setLearningRateTracker(Tracker.fixed(rate));
        try (Bench bench = new Bench(builder.build()).with("w", new Shape(2), 1)) {
            Map<String, float[]> gradients = Map.of("w", new float[] {1});
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, () -> bench.step(gradients));
            assertTrue(e.getMessage().contains("learning rate of w"), e.getMessage());
            assertArrayEquals(new float[] {1, 1}, bench.weight("w"));
            assertEquals(0, bench.optimizer.updates());
        }
    }

    @Test
    void step_noGradients_countsNothing() {
        try (Bench bench = new Bench(builder().build())) {
            bench.step(Map.of());
            assertEquals(0, bench.optimizer.updates());
        }
    }

    @Test
    void step_otherTypesOrShapes_areRefusedByName() {
        try (Bench bench = new Bench(builder().build()).with("w", new Shape(4), 1)) {
            NDArray weight = bench.weights.get("w");
            NDArray half = weight.toType(DataType.FLOAT16, true);
            NDArray wide = weight.toType(DataType.FLOAT64, true);
            NDArray square = weight.reshape(2, 2);
            for (Slot slot :
                    List.of(
                            new Slot("1", "the.path", wide, weight),
                            new Slot("1", "the.path", half, wide),
                            new Slot("1", "the.path", weight, half),
                            new Slot("1", "the.path", weight, square),
                            new Slot("1", "the.path", square.transpose(), square))) {
                IllegalArgumentException e =
                        assertThrows(
                                IllegalArgumentException.class,
                                () -> bench.optimizer.step(List.of(slot)));
                assertTrue(e.getMessage().contains("the.path"), e.getMessage());
            }
            Slot good = new Slot("1", "the.path", weight, weight.duplicate());
            assertThrows(
                    IllegalArgumentException.class,
                    () -> bench.optimizer.step(List.of(good, good)));
            assertFalse(bench.optimizer.state().paths().contains("the.path"));
            assertEquals(0, bench.optimizer.updates());
        }
    }

    @Test
    void build_groupsAddedLater_areThoseOfTheNextOptimizer() {
        OffloadStreamAdamW.Builder builder = builder().optWeightDecay(0);
        try (Bench first = new Bench(builder.build()).with("w", new Shape(2, 2), 1);
                Bench second =
                        new Bench(builder.optLearningRateGroup(path -> true, 0).build())
                                .with("w", new Shape(2, 2), 1)) {
            first.step(Map.of("w", new float[] {1}));
            second.step(Map.of("w", new float[] {1}));
            assertEquals(0.99f, first.weight("w")[0], 1e-6f);
            assertEquals(1f, second.weight("w")[0]);
        }
    }

    @Test
    void build_badNumbers_areRefused() {
        assertThrows(IllegalArgumentException.class, () -> OffloadStreamAdamW.builder().build());
        assertThrows(IllegalArgumentException.class, () -> builder().optBeta1(1).build());
        assertThrows(IllegalArgumentException.class, () -> builder().optBeta2(-0.1).build());
        assertThrows(IllegalArgumentException.class, () -> builder().optEpsilon(-1).build());
        assertThrows(
                IllegalArgumentException.class, () -> builder().optWeightDecay(Double.NaN).build());
        assertThrows(IllegalArgumentException.class, () -> builder().optClipNorm(0));
        assertThrows(IllegalArgumentException.class, () -> builder().optClipValue(-1));
        assertThrows(IllegalArgumentException.class, () -> builder().setRescaleGrad(0));
        assertThrows(IllegalArgumentException.class, () -> builder().optBucketElements(0).build());
        assertThrows(IllegalArgumentException.class, () -> builder().optDecayGroup(p -> true, -1));
    }
}
