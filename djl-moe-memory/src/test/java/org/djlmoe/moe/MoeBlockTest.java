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
import ai.djl.metric.Metric;
import ai.djl.metric.Metrics;
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
import ai.djl.training.ParameterStore;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.training.tracker.Tracker;
import ai.djl.util.Pair;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.Checkpointed;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.reference.NaiveMoe;
import org.djlmoe.routing.RoutingStatistics;
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
        return trainer(block, bounded, BATCH);
    }

    private Trainer trainer(Block block, boolean bounded, Shape shape) {
        return MoeLayers.trainer(model, block, bounded, shape);
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
        return NaiveMoe.run(settings, MoeLayers.numbers(block), NaiveMoe.topK(2), losses, x, dy);
    }

    /** One forward and backward of sum(dy * y); returns y. */
    private static float[] differentiate(Trainer trainer, NDArray x, NDArray dy) {
        try (GradientCollector collector = trainer.newGradientCollector()) {
            NDArray y = trainer.forward(new NDList(x)).singletonOrThrow();
            collector.backward(y.mul(dy).sum());
            return y.toFloatArray();
        }
    }

    /** All experts alike. Another test of this thread may have left gradient mode on. */
    private static void levelRouter(MoeBlock block) {
        try (GradMode off = GradMode.off()) {
            block.router().weight().getArray().muli(0);
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
            MoeLayers.parameters(block)
                    .forEach(
                            (w, p) ->
                                    assertClose(
                                            expected.gradients().get(w),
                                            gradient(p),
                                            BOUND,
                                            w.toString()));
        }
    }

    /** Coefficients under either trainer, chunked or not, with padding or without. */
    @ParameterizedTest
    @CsvSource({
        "true, 3, false, false",
        "true, 4096, true, true",
        "true, 3, true, false",
        "false, 4096, false, false",
        "false, 4096, true, true"
    })
    void backward_lossCoefficients_gradientsOfTheReference(
            boolean bounded, int chunkTokens, boolean masked, boolean shared) {
        MoeBlock block =
                builder()
                        .optChunkTokens(chunkTokens)
                        .optBalanceCoefficient(0.7)
                        .optZCoefficient(0.3)
                        .optSharedExperts(shared ? SHARED : 0, true)
                        .build();
        try (Trainer trainer = trainer(block, bounded)) {
            NDManager manager = trainer.getManager();
            double[] input = random(new Random(3), 60, 1);
            double[] upstream = random(new Random(4), 60, 1);
            NDArray x = array(manager, input, 2, 5, HIDDEN);
            x.setRequiresGradient(true);
            NDList inputs = new NDList(x);
            boolean[] counted = null;
            if (masked) {
                counted =
                        new boolean[] {
                            true, true, true, false, false, true, true, true, true, false
                        };
                inputs.add(manager.create(counted, new Shape(2, 5)));
            }
            dirtyMemory(manager);
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray y = trainer.forward(inputs).singletonOrThrow();
                collector.backward(y.mul(array(manager, upstream, 2, 5, HIDDEN)).sum());
            }
            NaiveMoe.Losses losses = new NaiveMoe.Losses(0.7, 0.3, counted);
            NaiveMoe.Result expected = reference(block, losses, input, upstream);
            assertGradients(expected, block, x);
            RoutingStatistics statistics = block.statistics().orElseThrow();
            assertEquals(expected.balanceLoss(), statistics.balanceLoss(), 1e-5);
            assertEquals(expected.zLoss(), statistics.zLoss(), 1e-5);
            assertEquals(masked ? 7 : 10, statistics.tokens());
            assertEquals(masked ? 14 : 20, Arrays.stream(statistics.routes()).sum());
        }
    }

    private static void assertGradients(NaiveMoe.Result expected, MoeBlock block, NDArray x) {
        assertClose(expected.dx(), x.getGradient(), BOUND, "dx");
        MoeLayers.parameters(block)
                .forEach(
                        (w, p) -> {
                            float[] gradient = gradient(p);
                            assertClose(
                                    expected.gradients().get(w),
                                    gradient == null
                                            ? new float[(int) p.getShape().size()]
                                            : gradient,
                                    BOUND,
                                    "" + w);
                        });
    }

    @ParameterizedTest
    @CsvSource({"true, true", "true, false", "false, true", "false, false"})
    void forward_lossOutputs_aLossOfOnesOwnGetsTheirTrueGradients(boolean bounded, boolean withY) {
        MoeBlock block = builder().optChunkTokens(4).optLossOutputs(true).build();
        try (Trainer trainer = trainer(block, bounded)) {
            NDManager manager = trainer.getManager();
            double[] input = random(new Random(3), 60, 1);
            double[] upstream = withY ? random(new Random(4), 60, 1) : new double[60];
            NDArray x = array(manager, input, 2, 5, HIDDEN);
            x.setRequiresGradient(true);
            NaiveMoe.Losses losses = new NaiveMoe.Losses(0.7, 0.3, null);
            NaiveMoe.Result expected = reference(block, losses, input, upstream);
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDList out = trainer.forward(new NDList(x));
                assertEquals(3, out.size());
                assertArrayEquals(block.getOutputShapes(new Shape[] {BATCH}), out.getShapes());
                assertEquals(expected.balanceLoss(), out.get(1).getFloat(), 1e-5);
                assertEquals(expected.zLoss(), out.get(2).getFloat(), 1e-5);
                NDArray objective = out.get(1).mul(0.7).add(out.get(2).mul(0.3));
                if (withY) {
                    NDArray dy = array(manager, upstream, 2, 5, HIDDEN);
                    objective = objective.add(out.get(0).mul(dy).sum());
                }
                collector.backward(objective);
            }
            assertGradients(expected, block, x);
            assertEquals(3, trainer.evaluate(new NDList(x)).size());
        }
    }

    /** The square root of a variance would have an infinite slope here. */
    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void backward_perfectlyBalancedLoad_finiteGradients(boolean bounded) {
        MoeBlock block = builder().setTopK(4).optBalanceCoefficient(1).optZCoefficient(1).build();
        try (Trainer trainer = trainer(block, bounded)) {
            levelRouter(block);
            NDArray x = array(trainer.getManager(), random(new Random(3), 60, 1), 2, 5, HIDDEN);
            differentiate(trainer, x, x.onesLike());
            for (Parameter p : MoeLayers.parameters(block).values()) {
                for (float g : gradient(p)) {
                    assertTrue(Float.isFinite(g), p.getName());
                }
            }
            RoutingStatistics s = block.statistics().orElseThrow();
            assertArrayEquals(new long[] {10, 10, 10, 10}, s.routes());
            assertEquals(4, s.balanceLoss(), 1e-6);
            assertEquals(1, s.maxOverMean());
            assertEquals(Math.log(4), s.entropy(), 1e-9);
        }
    }

    @Test
    void checkpointed_coefficientsAndBalancing_countOnce() {
        float[] direct = routerGradientAndBias(false);
        float[] wrapped = routerGradientAndBias(true);
        assertClose(direct, wrapped, BOUND, "gradient of the router, bias");
    }

    private float[] routerGradientAndBias(boolean wrapped) {
        Engine.getEngine("PyTorch").setRandomSeed(5);
        model.close();
        model = Model.newInstance("moe", "PyTorch");
        MoeBlock block = builder().optBalanceCoefficient(2).optBiasUpdateRate(0.25).build();
        try (Trainer trainer = trainer(wrapped ? new Checkpointed(block) : block, true)) {
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, random(new Random(3), 60, 1), 2, 5, HIDDEN);
            differentiate(trainer, x, array(manager, random(new Random(4), 60, 1), 2, 5, HIDDEN));
            float[] gradient = gradient(block.router().weight());
            long[] routes = block.statistics().orElseThrow().routes();
            trainer.step();
            float[] result = Arrays.copyOf(gradient, gradient.length + EXPERTS);
            float[] bias = block.router().balanceBias().getArray().toFloatArray();
            for (int e = 0; e < EXPERTS; e++) {
                assertEquals(0.25f * Long.signum(20 - EXPERTS * routes[e]), bias[e]);
                result[gradient.length + e] = bias[e];
            }
            // Nothing has been routed since.
            trainer.step();
            assertArrayEquals(bias, block.router().balanceBias().getArray().toFloatArray());
            return result;
        }
    }

    @Test
    void setCoefficients_senselessOrBesideLossOutputs_clearErrors() {
        MoeBlock block = builder().build();
        for (double bad : new double[] {-1, Double.NaN, Double.POSITIVE_INFINITY}) {
            assertThrows(IllegalArgumentException.class, () -> block.setBalanceCoefficient(bad));
            assertThrows(IllegalArgumentException.class, () -> block.setZCoefficient(bad));
            assertThrows(
                    IllegalArgumentException.class, () -> builder().optBiasUpdateRate(bad).build());
        }
        IllegalArgumentException twice =
                assertThrows(
                        IllegalArgumentException.class,
                        () -> builder().optLossOutputs(true).optBalanceCoefficient(0.1).build());
        assertTrue(twice.getMessage().contains("twice"), twice.getMessage());
        assertThrows(
                IllegalArgumentException.class, () -> builder().optSharedExperts(-1, true).build());
    }

    @Test
    void forward_maskOfAnotherShape_clearError() {
        MoeBlock block = builder().build();
        try (Trainer trainer = trainer(block, true)) {
            NDManager manager = trainer.getManager();
            NDList inputs = new NDList(manager.ones(BATCH), manager.ones(new Shape(5, 2)));
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, () -> trainer.evaluate(inputs));
            assertTrue(e.getMessage().contains("mask [...]"), e.getMessage());
        }
    }

    /** Logits 8 and 8.001 are one number in FLOAT16; the router must not see them so. */
    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void forward_halfInputs_routerComputesInSinglePrecision(boolean bounded) {
        MoeBlock block =
                MoeBlock.builder()
                        .setHiddenSize(2)
                        .setIntermediateSize(3)
                        .setNumExperts(4)
                        .setTopK(1)
                        .optInitializerRange(0.5)
                        .build();
        List<long[]> seen = new ArrayList<>();
        block.router().setObserver(ids -> seen.add(ids.toLongArray()));
        try (Trainer trainer = trainer(block, bounded, new Shape(1, 2))) {
            NDManager manager = trainer.getManager();
            array(manager, new double[] {7, 0, 8, 0, 8.001, 0, 8.0005, 0}, 4, 2)
                    .copyTo(block.router().weight().getArray());
            NDArray wide = array(manager, new double[] {1, 0}, 1, 2);
            NDArray half = wide.toType(DataType.FLOAT16, true);
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray y = trainer.forward(new NDList(half)).singletonOrThrow();
                assertEquals(DataType.FLOAT16, y.getDataType());
                NDArray single = trainer.forward(new NDList(wide)).singletonOrThrow();
                assertClose(
                        single.toFloatArray(),
                        y.toType(DataType.FLOAT32, true).toFloatArray(),
                        1e-3,
                        "y");
                collector.backward(y.sum());
            }
            assertArrayEquals(new long[] {2}, seen.get(0));
            assertTrue(
                    java.util.stream.IntStream.range(0, 8)
                            .anyMatch(i -> gradient(block.router().weight())[i] != 0));
            NDArray doubles = manager.ones(new Shape(1, 2), DataType.FLOAT64);
            assertThrows(
                    IllegalArgumentException.class, () -> trainer.evaluate(new NDList(doubles)));
        }
    }

    /** k = 1: the combine weight is the probability, a number a token, and the router learns. */
    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void forward_oneExpertAToken_notRenormalizedByDefault(boolean bounded) {
        MoeBlock block = builder().setTopK(1).optResidual(false).build();
        assertFalse(block.router().renormalizes());
        assertTrue(builder().build().router().renormalizes());
        try (Trainer trainer = trainer(block, bounded)) {
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, random(new Random(3), 60, 1), 2, 5, HIDDEN);
            differentiate(trainer, x, array(manager, random(new Random(4), 60, 1), 2, 5, HIDDEN));
            float norm = 0;
            for (float g : gradient(block.router().weight())) {
                norm += Math.abs(g);
            }
            assertTrue(norm > 1e-3, "the router's gradient is " + norm);
            assertEquals(10, Arrays.stream(block.statistics().orElseThrow().routes()).sum());
        }
    }

    /** No capacity: however skewed the router, every token keeps its k experts. */
    @Test
    void forward_allTokensOnTheSameExperts_nothingIsDropped() {
        MoeBlock block = builder().optChunkTokens(2).build();
        try (Trainer trainer = trainer(block, true)) {
            levelRouter(block);
            NDArray x = array(trainer.getManager(), random(new Random(3), 60, 1), 2, 5, HIDDEN);
            differentiate(trainer, x, x.onesLike());
            RoutingStatistics s = block.statistics().orElseThrow();
            assertArrayEquals(new long[] {10, 10, 0, 0}, s.routes());
            assertEquals(2, s.maxOverMean());
            assertEquals(2, s.idleExperts());
            float[] gradient = gradient(block.experts().down());
            for (int i = gradient.length / 2; i < gradient.length; i++) {
                assertEquals(0, gradient[i], "an expert without tokens");
            }
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void train_allOptionsOn_everyParameterMovesAndBothTrainersAgree(boolean gated) {
        Map<String, float[]> stock = trainAll(false, gated);
        Map<String, float[]> ours = trainAll(true, gated);
        assertEquals(stock.keySet(), ours.keySet());
        stock.forEach((name, values) -> assertClose(values, ours.get(name), 1e-4, name));
        assertEquals(gated ? 8 : 7, stock.size());
    }

    private Map<String, float[]> trainAll(boolean bounded, boolean gated) {
        Engine.getEngine("PyTorch").setRandomSeed(5);
        model.close();
        model = Model.newInstance("moe", "PyTorch");
        MoeBlock block =
                builder()
                        .optChunkTokens(4)
                        .optBalanceCoefficient(0.1)
                        .optZCoefficient(0.01)
                        .optBiasUpdateRate(0.01)
                        .optSharedExperts(SHARED, gated)
                        .build();
        Map<String, float[]> after = new LinkedHashMap<>();
        try (Trainer trainer = trainer(block, bounded)) {
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, random(new Random(7), 60, 1), 2, 5, HIDDEN);
            Map<String, float[]> before = new LinkedHashMap<>();
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
                if (!bounded) {
                    block.afterStep();
                }
            }
            for (Pair<String, Parameter> p : block.getParameters()) {
                float[] values = p.getValue().getArray().toFloatArray();
                assertFalse(Arrays.equals(before.get(p.getKey()), values), p.getKey());
                after.put(p.getKey(), values);
            }
        }
        return after;
    }

    /** Experts in a group of their own, one that no token reaches, a parameter without gradient. */
    @Test
    void train_offloadedOptimizerWithGroups_expertsMoveAndTheBiasIsNotItsBusiness() {
        MoeBlock block =
                builder()
                        .optBiasUpdateRate(0.125)
                        .optBalanceCoefficient(0.1)
                        .optSharedExperts(SHARED, true)
                        .build();
        model.setBlock(block);
        try (OffloadStreamAdamW optimizer =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(Tracker.fixed(0.01f))
                        .optWeightDecay(0.1)
                        .optLearningRateGroup(path -> path.contains("experts"), 0.5)
                        .optClipNorm(1)
                        .optBlock(block)
                        .build()) {
            DefaultTrainingConfig config =
                    new DefaultTrainingConfig(Loss.l2Loss())
                            .optOptimizer(optimizer)
                            .optDevices(new Device[] {Device.cpu()});
            try (Trainer trainer = new BoundedTrainer(model, config)) {
                trainer.initialize(BATCH);
                levelRouter(block);
                Map<String, float[]> before = new LinkedHashMap<>();
                block.getParameters()
                        .forEach(
                                p ->
                                        before.put(
                                                p.getKey(),
                                                p.getValue().getArray().toFloatArray()));
                NDArray x = array(trainer.getManager(), random(new Random(3), 60, 1), 2, 5, HIDDEN);
                differentiate(trainer, x, x.mul(2));
                trainer.step();
                for (Pair<String, Parameter> p : block.getParameters()) {
                    float[] now = p.getValue().getArray().toFloatArray();
                    assertFalse(Arrays.equals(before.get(p.getKey()), now), p.getKey());
                }
                // Exactly one step of the rate: neither decayed nor scaled.
                assertArrayEquals(
                        new float[] {-0.125f, -0.125f, 0.125f, 0.125f},
                        block.router().balanceBias().getArray().toFloatArray());
            }
        }
    }

    @Test
    void saveParameters_balancingBiasAndSharedExperts_comeBack() throws Exception {
        MoeBlock block = builder().optBiasUpdateRate(0.5).optSharedExperts(SHARED, true).build();
        try (Trainer trainer = trainer(block, true)) {
            NDManager manager = trainer.getManager();
            NDArray x = array(manager, random(new Random(3), 60, 1), 2, 5, HIDDEN);
            differentiate(trainer, x, x.onesLike());
            trainer.step();
            float[] y = trainer.evaluate(new NDList(x)).head().toFloatArray();
            ByteArrayOutputStream bytes = new ByteArrayOutputStream();
            block.saveParameters(new DataOutputStream(bytes));
            MoeBlock other =
                    builder().optBiasUpdateRate(0.5).optSharedExperts(SHARED, true).build();
            other.loadParameters(
                    manager, new DataInputStream(new ByteArrayInputStream(bytes.toByteArray())));
            assertArrayEquals(
                    block.router().balanceBias().getArray().toFloatArray(),
                    other.router().balanceBias().getArray().toFloatArray());
            try (GradMode off = GradMode.off()) {
                ParameterStore store = new ParameterStore(manager, false);
                NDArray again = other.forward(store, new NDList(x), false).head();
                assertArrayEquals(y, again.toFloatArray());
            }
            // What thaws everything does not make the bias a weight.
            other.freezeParameters(false);
            other.forward(new ParameterStore(manager, false), new NDList(x), true);
            assertFalse(other.router().balanceBias().requiresGradient());
            assertTrue(other.router().weight().requiresGradient());
        }
    }

    @Test
    void routingMetrics_twoBatchesAndAnEpoch_valuesOfTheStatistics() {
        MoeBlock block = builder().build();
        model.setBlock(new SequentialBlock().add(new Checkpointed(block)));
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.l2Loss())
                        .optDevices(new Device[] {Device.cpu()})
                        .addTrainingListeners(new RoutingMetrics());
        try (Trainer trainer = new BoundedTrainer(model, config)) {
            trainer.initialize(BATCH);
            trainer.notifyListeners(l -> l.onTrainingBatch(trainer, null)); // no metrics, no harm
            Metrics metrics = new Metrics();
            trainer.setMetrics(metrics);
            trainer.notifyListeners(l -> l.onTrainingBatch(trainer, null)); // nothing routed yet
            assertEquals(0, ours(metrics));
            NDArray x = array(trainer.getManager(), random(new Random(3), 60, 1), 2, 5, HIDDEN);
            for (int i = 0; i < 2; i++) {
                differentiate(trainer, x, x.onesLike());
                trainer.notifyListeners(l -> l.onTrainingBatch(trainer, null));
            }
            RoutingStatistics s = block.statistics().orElseThrow();
            assertEquals(2, metrics.getMetric("moe-0-balance-loss").size());
            assertEquals(s.balanceLoss(), latest(metrics, "moe-0-balance-loss"));
            assertEquals(s.zLoss(), latest(metrics, "moe-0-z-loss"));
            assertEquals(s.maxOverMean(), latest(metrics, "moe-0-max-over-mean"));
            assertEquals(s.entropy(), latest(metrics, "moe-0-entropy"));
            assertEquals(s.idleExperts(), latest(metrics, "moe-0-idle-experts"));
            assertEquals(5, ours(metrics));
            trainer.notifyListeners(l -> l.onEpoch(trainer));
            trainer.notifyListeners(l -> l.onEpoch(trainer));
            for (int e = 0; e < EXPERTS; e++) {
                List<Metric> routes = metrics.getMetric("moe-0-expert-" + e + "-routes");
                assertEquals(2 * s.routes()[e], routes.get(0).getValue());
                assertEquals(0.0, routes.get(1).getValue());
            }
        }
    }

    private static long ours(Metrics metrics) {
        return metrics.getMetricNames().stream().filter(n -> n.startsWith("moe-")).count();
    }

    private static double latest(Metrics metrics, String name) {
        return metrics.latestMetric(name).getValue();
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
            assertFalse(Arrays.equals(base, merged));
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
        after.forEach((name, values) -> assertFalse(Arrays.equals(before.get(name), values), name));
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
            MoeLayers.parameters(block)
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
            for (Parameter p : MoeLayers.parameters(block).values()) {
                boolean same = Arrays.equals(before.get(p.getName()), p.getArray().toFloatArray());
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
            assertFalse(Arrays.equals(plain, trained));
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
            Map<Weights, Parameter> trained = MoeLayers.parameters(block);
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
            MoeLayers.parameters(block)
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
            MoeLayers.parameters(block)
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
        MoeBlock block =
                builder()
                        .optBalanceCoefficient(1)
                        .optZCoefficient(1)
                        .optBiasUpdateRate(0.1)
                        .optSharedExperts(SHARED, true)
                        .build();
        try (Trainer trainer = trainer(block, bounded)) {
            NDArray x = trainer.getManager().create(new Shape(0, 5, HIDDEN));
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray y = trainer.forward(new NDList(x)).singletonOrThrow();
                assertEquals(new Shape(0, 5, HIDDEN), y.getShape());
                collector.backward(y.sum());
            }
            for (Parameter p : MoeLayers.parameters(block).values()) {
                float[] gradient = gradient(p);
                if (gradient != null) {
                    assertArrayEquals(new float[gradient.length], gradient, p.getName());
                }
            }
            assertEquals(0, block.statistics().orElseThrow().balanceLoss());
            block.afterStep();
            assertArrayEquals(
                    new float[EXPERTS], block.router().balanceBias().getArray().toFloatArray());
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
                    block.forward(new ParameterStore(manager, false), new NDList(own), false)
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
