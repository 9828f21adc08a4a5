package org.djlmoe.moe;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.dirtyMemory;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.jni.JniUtils;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import ai.djl.util.Pair;
import java.util.ArrayList;
import java.util.EnumMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.reference.NaiveMoe;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** The layer as a block in somebody's model. */
class MoeBlockTest {

    private static final int HIDDEN = 6;
    private static final int EXPERTS = 4;
    private static final int SHARED = 7;
    private static final Shape BATCH = new Shape(2, 5, HIDDEN);
    private static final double BOUND = 1e-5;

    private Model model;

    @BeforeEach
    void open() {
        model = Model.newInstance("moe", "PyTorch");
    }

    @AfterEach
    void close() {
        model.close();
    }

    private static MoeBlock.Builder builder() {
        return MoeBlock.builder()
                .setHiddenSize(HIDDEN)
                .setIntermediateSize(5)
                .setNumExperts(EXPERTS)
                .setTopK(2)
                .optNorm(1e-5)
                .optResidual(true)
                .optInitializerRange(0.5);
    }

    private Trainer trainer(Block block, boolean bounded) {
        model.setBlock(block);
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.l2Loss())
                        .optOptimizer(
                                Optimizer.adam()
                                        .optLearningRateTracker(Tracker.fixed(0.01f))
                                        .build())
                        .optDevices(new Device[] {Device.cpu()});
        Trainer trainer = bounded ? new BoundedTrainer(model, config) : model.newTrainer(config);
        trainer.initialize(BATCH);
        return trainer;
    }

    private static Map<Weights, Parameter> parameters(MoeBlock block) {
        List<Parameter> all = new ArrayList<>();
        all.add(block.norm());
        all.add(block.router().weight());
        all.addAll(block.experts().weights());
        all.addAll(block.sharedWeights());
        Map<Weights, Parameter> named = new EnumMap<>(Weights.class);
        for (Weights w : Weights.values()) {
            if (all.get(w.ordinal()) != null) {
                named.put(w, all.get(w.ordinal()));
            }
        }
        return named;
    }

    /** The gradient, or null if none was ever made. */
    private static float[] gradient(Parameter parameter) {
        try (NDArray gradient = JniUtils.getGradient((PtNDArray) parameter.getArray())) {
            return gradient == null ? null : gradient.toFloatArray();
        }
    }

    private static NaiveMoe.Result reference(MoeBlock block, double[] x, double[] dy) {
        return reference(block, NaiveMoe.Losses.NONE, x, dy);
    }

    private static NaiveMoe.Result reference(
            MoeBlock block, NaiveMoe.Losses losses, double[] x, double[] dy) {
        Map<Weights, double[]> weights = new EnumMap<>(Weights.class);
        parameters(block)
                .forEach(
                        (w, p) -> {
                            float[] floats = p.getArray().toFloatArray();
                            double[] numbers = new double[floats.length];
                            java.util.Arrays.setAll(numbers, i -> floats[i]);
                            weights.put(w, numbers);
                        });
        LoraExperts adapters = block.experts().adapters();
        NaiveMoe.Settings settings =
                new NaiveMoe.Settings(
                        HIDDEN,
                        5,
                        EXPERTS,
                        2,
                        adapters == null ? 0 : adapters.rank(),
                        1e-5,
                        adapters == null ? 0 : adapters.scale(),
                        true,
                        true,
                        block.sharedExperts() == null ? 0 : SHARED);
        return NaiveMoe.run(settings, weights, NaiveMoe.topK(2), losses, x, dy);
    }

    /** One forward and backward of sum(dy * y); returns y. */
    private static float[] differentiate(Trainer trainer, NDArray x, NDArray dy) {
        try (GradientCollector collector = trainer.newGradientCollector()) {
            NDArray y = trainer.forward(new NDList(x)).singletonOrThrow();
            collector.backward(y.mul(dy).sum());
            return y.toFloatArray();
        }
    }

    private static void fillWithNoise(Parameter parameter, long seed) {
        NDArray array = parameter.getArray();
        double[] noise = random(new Random(seed), (int) array.size(), 0.5);
        try (NDArray values = array(array.getManager(), noise, array.getShape().getShape())) {
            values.copyTo(array);
        }
    }

    @ParameterizedTest
    @CsvSource({"true, 1", "true, 2", "true, 3", "true, 4096", "false, 4096"})
    void forwardAndBackward_batchOfSequences_equalTheReference(boolean bounded, int chunkTokens) {
        MoeBlock block = builder().optChunkTokens(chunkTokens).build();
        try (Trainer trainer = trainer(block, bounded)) {
            NDManager manager = trainer.getManager();
            Random random = new Random(3);
            double[] input = random(random, 60, 1);
            double[] upstream = random(random, 60, 1);
            NDArray x = array(manager, input, 2, 5, HIDDEN);
            x.setRequiresGradient(true);
            NDArray dy = array(manager, upstream, 2, 5, HIDDEN);
            NaiveMoe.Result expected = reference(block, input, upstream);
            dirtyMemory(manager);
            assertClose(expected.y(), differentiate(trainer, x, dy), BOUND, "y");
            assertClose(expected.dx(), x.getGradient(), BOUND, "dx");
            parameters(block)
                    .forEach(
                            (w, p) ->
                                    assertClose(
                                            expected.gradients().get(w),
                                            gradient(p),
                                            BOUND,
                                            w.toString()));
        }
    }

    @Test
    void mergeAdapters_noiseInThem_sameOutputWithoutThem() {
        MoeBlock block = builder().build();
        try (Trainer trainer = trainer(block, true)) {
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, random(new Random(3), 60, 1), 2, 5, HIDDEN);
            float[] base = trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray();
            LoraExperts adapters = block.experts().attachAdapters(3, 6);
            adapters.initialize(manager, DataType.FLOAT32, new Shape(-1, HIDDEN));
            adapters.weights().forEach(p -> fillWithNoise(p, p.getName().hashCode()));
            float[] adapted = trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray();
            block.experts().mergeAdapters();
            assertNull(block.experts().adapters());
            float[] merged = trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray();
            assertClose(adapted, merged, BOUND, "merged");
            assertFalse(java.util.Arrays.equals(base, merged));
            assertThrows(IllegalStateException.class, () -> block.experts().mergeAdapters());
        }
    }

    @Test
    void train_threeStepsBetweenOtherLayers_parametersOfTheStockTrainer() {
        Map<String, float[]> stock = train(false);
        Map<String, float[]> ours = train(true);
        assertEquals(stock.keySet(), ours.keySet());
        stock.forEach((name, values) -> assertClose(values, ours.get(name), 1e-4, name));
    }

    private Map<String, float[]> train(boolean bounded) {
        Engine.getEngine("PyTorch").setRandomSeed(5);
        model.close();
        model = Model.newInstance("moe", "PyTorch");
        Block block =
                new SequentialBlock()
                        .add(Linear.builder().setUnits(HIDDEN).build())
                        .add(builder().optChunkTokens(4).build())
                        .add(builder().optChunkTokens(3).optResidual(false).build())
                        .add(Linear.builder().setUnits(2).build());
        Map<String, float[]> before = new LinkedHashMap<>();
        Map<String, float[]> after = new LinkedHashMap<>();
        try (Trainer trainer = trainer(block, bounded)) {
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, random(new Random(7), 60, 1), 2, 5, HIDDEN);
            for (Pair<String, Parameter> p : block.getParameters()) {
                before.put(p.getKey(), p.getValue().getArray().toFloatArray());
            }
            for (int step = 0; step < 3; step++) {
                dirtyMemory(manager);
                try (GradientCollector collector = trainer.newGradientCollector()) {
                    NDArray y = trainer.forward(new NDList(x)).singletonOrThrow();
                    collector.backward(y.sub(1).square().mean());
                }
                trainer.step();
            }
            for (Pair<String, Parameter> p : block.getParameters()) {
                after.put(p.getKey(), p.getValue().getArray().toFloatArray());
            }
        }
        // Every parameter takes part: routers and experts too.
        after.forEach(
                (name, values) ->
                        assertFalse(java.util.Arrays.equals(before.get(name), values), name));
        return after;
    }

    @Test
    void attachAdapters_afterTrainingBeganAndBaseFrozen_onlyAdaptersHaveGradientsAndMove() {
        MoeBlock block = builder().optChunkTokens(4).build();
        try (Trainer trainer = trainer(block, true)) {
            NDManager manager = trainer.getManager();
            double[] input = random(new Random(3), 60, 1);
            double[] upstream = random(new Random(4), 60, 1);
            NDArray x = array(manager, input, 2, 5, HIDDEN);
            NDArray dy = array(manager, upstream, 2, 5, HIDDEN);
            float[] plain = trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray();

            block.freezeParameters(true);
            LoraExperts adapters = block.experts().attachAdapters(3, 6);
            adapters.initialize(manager, DataType.FLOAT32, new Shape(-1, HIDDEN));
            // B is zero: a fresh adapter changes nothing.
            assertArrayEquals(
                    plain, trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray());
            adapters.weights().forEach(p -> fillWithNoise(p, p.getName().hashCode()));

            NaiveMoe.Result expected = reference(block, input, upstream);
            assertClose(expected.y(), differentiate(trainer, x, dy), BOUND, "y");
            Map<String, float[]> before = new LinkedHashMap<>();
            parameters(block)
                    .forEach(
                            (w, p) -> {
                                before.put(p.getName(), p.getArray().toFloatArray());
                                if (w.name().endsWith("_A") || w.name().endsWith("_B")) {
                                    double[] g = expected.gradients().get(w);
                                    assertClose(g, gradient(p), BOUND, w.toString());
                                } else {
                                    assertNull(gradient(p), w.toString());
                                }
                            });
            trainer.step();
            for (Parameter p : parameters(block).values()) {
                boolean same =
                        java.util.Arrays.equals(
                                before.get(p.getName()), p.getArray().toFloatArray());
                assertEquals(!p.getName().contains("lora"), same, p.getName());
            }
        }
    }

    @Test
    void detachAdapters_afterAStep_baseModelAgainAndTrainingGoesOn() {
        MoeBlock block = builder().build();
        try (Trainer trainer = trainer(block, true)) {
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, random(new Random(3), 60, 1), 2, 5, HIDDEN);
            NDArray dy = array(manager, random(new Random(4), 60, 1), 2, 5, HIDDEN);
            int parameters = block.getParameters().size();
            float[] plain = trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray();
            block.freezeParameters(true);
            for (int round = 0; round < 2; round++) {
                LoraExperts adapters = block.experts().attachAdapters(2, 4);
                adapters.initialize(manager, DataType.FLOAT32, new Shape(-1, HIDDEN));
                assertEquals(parameters + 4, block.getParameters().size());
                assertThrows(
                        IllegalStateException.class, () -> block.experts().attachAdapters(2, 4));
                adapters.weights().forEach(p -> fillWithNoise(p, 1));
                differentiate(trainer, x, dy);
                trainer.step();
                block.experts().detachAdapters();
                assertEquals(parameters, block.getParameters().size());
                assertArrayEquals(
                        plain, trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray());
            }
            block.freezeParameters(false);
            differentiate(trainer, x, dy);
            trainer.step();
            float[] trained = trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray();
            assertFalse(java.util.Arrays.equals(plain, trained));
        }
    }

    @Test
    void backward_frozenRouterAndInputWithoutGradient_expertsGetTheirs() {
        MoeBlock block = builder().optChunkTokens(3).build();
        try (Trainer trainer = trainer(block, true)) {
            double[] input = random(new Random(3), 60, 1);
            double[] upstream = random(new Random(4), 60, 1);
            block.router().freezeParameters(true);
            NDManager manager = trainer.getManager();
            differentiate(
                    trainer,
                    array(manager, input, 2, 5, HIDDEN),
                    array(manager, upstream, 2, 5, HIDDEN));
            NaiveMoe.Result expected = reference(block, input, upstream);
            assertNull(gradient(block.router().weight()));
            Map<Weights, Parameter> trained = parameters(block);
            trained.remove(Weights.ROUTER);
            trained.forEach(
                    (w, p) -> assertClose(expected.gradients().get(w), gradient(p), BOUND, "" + w));
        }
    }

    @Test
    void evaluate_betweenForwardAndBackward_disturbsNothing() {
        MoeBlock block = builder().optChunkTokens(3).build();
        try (Trainer trainer = trainer(block, true)) {
            double[] input = random(new Random(3), 60, 1);
            double[] upstream = random(new Random(4), 60, 1);
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, input, 2, 5, HIDDEN);
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray y = trainer.forward(new NDList(x)).singletonOrThrow();
                trainer.evaluate(new NDList(x.mul(-3))).close();
                collector.backward(y.mul(array(manager, upstream, 2, 5, HIDDEN)).sum());
            }
            NaiveMoe.Result expected = reference(block, input, upstream);
            parameters(block)
                    .forEach(
                            (w, p) ->
                                    assertClose(
                                            expected.gradients().get(w),
                                            gradient(p),
                                            BOUND,
                                            "" + w));
        }
    }

    @Test
    void backward_twoMicroBatches_gradientsAddUp() {
        MoeBlock block = builder().optChunkTokens(2).build();
        try (Trainer trainer = trainer(block, true)) {
            double[] input = random(new Random(3), 60, 1);
            double[] upstream = random(new Random(4), 60, 1);
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, input, 2, 5, HIDDEN);
            NDArray dy = array(manager, upstream, 2, 5, HIDDEN);
            for (int half = 0; half < 2; half++) {
                String slice = half + ":" + (half + 1);
                differentiate(trainer, x.get(slice), dy.get(slice));
            }
            NaiveMoe.Result expected = reference(block, input, upstream);
            parameters(block)
                    .forEach(
                            (w, p) ->
                                    assertClose(
                                            expected.gradients().get(w),
                                            gradient(p),
                                            BOUND,
                                            "" + w));
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void forwardAndBackward_noTokens_emptyOutputAndZeroGradients(boolean bounded) {
        MoeBlock block = builder().build();
        try (Trainer trainer = trainer(block, bounded)) {
            NDArray x = trainer.getManager().create(new Shape(0, 5, HIDDEN));
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray y = trainer.forward(new NDList(x)).singletonOrThrow();
                assertEquals(new Shape(0, 5, HIDDEN), y.getShape());
                collector.backward(y.sum());
            }
            for (Parameter p : parameters(block).values()) {
                float[] gradient = gradient(p);
                if (gradient != null) {
                    assertArrayEquals(new float[gradient.length], gradient, p.getName());
                }
            }
        }
    }

    @Test
    void forward_observer_seesEachTokenOnceAForwardPassAndNotInBackward() {
        MoeBlock block = builder().optChunkTokens(3).build();
        List<Shape> seen = new ArrayList<>();
        block.router().setObserver(ids -> seen.add(ids.getShape()));
        try (Trainer trainer = trainer(block, true)) {
            NDArray x = trainer.getManager().ones(BATCH);
            differentiate(trainer, x, x);
            assertEquals(List.of(new Shape(10, 2)), seen);
        }
    }

    @Test
    void forward_eightThreadsInInference_sameResults() throws Exception {
        MoeBlock block = builder().optChunkTokens(3).build();
        try (Trainer trainer = trainer(block, true)) {
            NDArray x = array(trainer.getManager(), random(new Random(3), 60, 1), 2, 5, HIDDEN);
            float[] expected = trainer.evaluate(new NDList(x)).singletonOrThrow().toFloatArray();
            ExecutorService threads = Executors.newFixedThreadPool(8);
            try {
                List<Future<?>> done = new ArrayList<>();
                for (int t = 0; t < 8; t++) {
                    done.add(
                            threads.submit(
                                    () -> {
                                        for (int i = 0; i < 20; i++) {
                                            infer(block, x, expected);
                                        }
                                    }));
                }
                for (Future<?> future : done) {
                    future.get();
                }
            } finally {
                threads.shutdownNow();
            }
        }
    }

    private static void infer(MoeBlock block, NDArray x, float[] expected) {
        try (NDManager manager = x.getManager().newSubManager()) {
            NDArray own = x.duplicate();
            own.attach(manager);
            NDArray y =
                    block.forward(
                                    new ai.djl.training.ParameterStore(manager, false),
                                    new NDList(own),
                                    false)
                            .singletonOrThrow();
            assertArrayEquals(expected, y.toFloatArray(), 1e-6f);
        }
    }

    @Test
    void forward_wrongWidth_clearError() {
        MoeBlock block = builder().build();
        try (Trainer trainer = trainer(block, true)) {
            NDArray x = trainer.getManager().ones(new Shape(2, 7));
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class, () -> trainer.evaluate(new NDList(x)));
            assertTrue(e.getMessage().contains("last axis of 6"), e.getMessage());
        }
    }

    @Test
    void build_missingOrSenselessSizes_clearErrors() {
        IllegalArgumentException missing =
                assertThrows(IllegalArgumentException.class, () -> MoeBlock.builder().build());
        assertTrue(missing.getMessage().contains("hiddenSize"), missing.getMessage());
        IllegalArgumentException topK =
                assertThrows(IllegalArgumentException.class, () -> builder().setTopK(5).build());
        assertTrue(topK.getMessage().contains("topK is 5"), topK.getMessage());
        assertThrows(IllegalArgumentException.class, () -> builder().optChunkTokens(0).build());
        assertThrows(IllegalArgumentException.class, () -> builder().optMaxChunks(0).build());
    }

    @Test
    void chunks_tokens_cappedAndAtLeastOne() {
        MoeBlock block = builder().optChunkTokens(100).optMaxChunks(4).build();
        assertEquals(1, block.chunks(0));
        assertEquals(1, block.chunks(100));
        assertEquals(2, block.chunks(101));
        assertEquals(4, block.chunks(1_000_000));
    }
}
