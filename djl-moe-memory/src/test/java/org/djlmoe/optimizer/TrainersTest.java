package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.metric.Metrics;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Activation;
import ai.djl.nn.Block;
import ai.djl.nn.ParallelBlock;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.AdamW;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Consumer;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.ParameterPaths;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** The optimizer under DJL's trainer and under ours. */
class TrainersTest {

    private static final int ROWS = 8;
    private static final int WIDTH = 6;

    @TempDir static Path folder;

    private static Block network() {
        return new SequentialBlock()
                .add(Linear.builder().setUnits(10).build())
                .add(Activation::tanh)
                .add(Linear.builder().setUnits(3).build());
    }

    private static OffloadStreamAdamW.Builder builder() {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(Tracker.fixed(0.01f))
                .optWeightDecay(0.1);
    }

    /** A model with its trainer, and the same random data every time. */
    private static final class Run implements AutoCloseable {

        final Model model;
        final Trainer trainer;
        final NDArray x;
        final NDArray y;

        Run(Block block, Optimizer optimizer, boolean bounded) {
            this(Model.newInstance("run", "PyTorch"), block, optimizer, bounded);
        }

        Run(Model model, Block block, Optimizer optimizer, boolean bounded) {
            this.model = model;
            Engine.getEngine("PyTorch").setRandomSeed(3);
            model.setBlock(block);
            DefaultTrainingConfig config =
                    new DefaultTrainingConfig(Loss.l2Loss())
                            .optOptimizer(optimizer)
                            .optDevices(new Device[] {Device.cpu()});
            trainer = bounded ? new BoundedTrainer(model, config) : model.newTrainer(config);
            trainer.initialize(new Shape(ROWS, WIDTH));
            x = trainer.getManager().randomNormal(new Shape(ROWS, WIDTH));
            y = trainer.getManager().randomNormal(new Shape(ROWS, 3));
        }

        void backward(NDArray input) {
            try (GradientCollector collector = trainer.newGradientCollector();
                    NDManager batch = trainer.getManager().newSubManager()) {
                NDArray in = input.duplicate();
                in.attach(batch);
                NDList out = trainer.forward(new NDList(in));
                out.attach(batch);
                NDArray labels = y.duplicate();
                labels.attach(batch);
                NDArray loss = trainer.getLoss().evaluate(new NDList(labels), out);
                loss.attach(batch);
                collector.backward(loss);
            }
        }

        void train(int steps) {
            for (int step = 0; step < steps; step++) {
                backward(x);
                trainer.step();
            }
        }

        Map<String, float[]> weights() {
            Map<String, float[]> all = new LinkedHashMap<>();
            ParameterPaths.of(model.getBlock())
                    .forEach((path, p) -> all.put(path, p.getArray().toFloatArray()));
            return all;
        }

        void eachGradient(Consumer<float[]> check) {
            for (Parameter parameter : ParameterPaths.of(model.getBlock()).values()) {
                try (NDArray gradient = parameter.getArray().getGradient()) {
                    check.accept(gradient.toFloatArray());
                }
            }
        }

        @Override
        public void close() {
            trainer.close();
            model.close();
        }
    }

    private static Map<String, float[]> trained(
            Block block, OffloadStreamAdamW.Builder builder, boolean bounded) {
        try (OffloadStreamAdamW optimizer = builder.build();
                Run run = new Run(block, optimizer, bounded)) {
            run.train(10);
            run.eachGradient(g -> assertArrayEquals(new float[g.length], g));
            return run.weights();
        }
    }

    private static void assertSame(Map<String, float[]> a, Map<String, float[]> b, float delta) {
        assertEquals(a.keySet(), b.keySet());
        a.forEach((path, w) -> assertArrayEquals(w, b.get(path), delta, path));
    }

    @Test
    void step_bothTrainers_sameWeightsToTheBit() {
        Map<String, float[]> stock = trained(network(), builder(), false);
        Map<String, float[]> bounded = trained(network(), builder(), true);
        Map<String, float[]> slabs = trained(network(), builder().optBucketElements(7), true);

        assertSame(stock, bounded, 0);
        assertSame(stock, slabs, 1e-7f);
    }

    /**
     * Files and staging buffers change nothing, in slabs and with whatever a trainer hands over.
     */
    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void step_stateElsewhere_sameWeightsToTheBit(boolean bounded) {
        Map<String, float[]> memory = trained(network(), builder().optBucketElements(7), bounded);
        for (OffloadStreamAdamW.Builder other :
                List.of(
                        builder().optFileTier(folder),
                        builder().optStaged(true),
                        builder().optFileTier(folder).optStaged(true))) {
            assertSame(memory, trained(network(), other.optBucketElements(7), bounded), 0);
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void metricsListener_stepsAndBatches_oneFigureAStep(boolean bounded) {
        try (OffloadStreamAdamW optimizer = builder().optStaged(true).build();
                Run run = new Run(network(), optimizer, bounded)) {
            Metrics metrics = new Metrics();
            run.trainer.setMetrics(metrics);
            TrainingListener listener = optimizer.metricsListener();
            listener.onTrainingBatch(run.trainer, null);
            run.train(1);
            listener.onTrainingBatch(run.trainer, null);
            run.train(1);
            listener.onEpoch(run.trainer);
            listener.onEpoch(run.trainer);
            for (String name :
                    List.of(
                            "optimizer-fetch",
                            "optimizer-update",
                            "optimizer-write-back",
                            "optimizer-stall")) {
                assertEquals(2, metrics.getMetric(name).size(), name);
            }
            assertTrue(metrics.latestMetric("optimizer-update").getValue().doubleValue() > 0);
            assertTrue(metrics.latestMetric("optimizer-fetch").getValue().doubleValue() > 0);
            assertEquals(
                    "Milliseconds", metrics.latestMetric("optimizer-stall").getUnit().getValue());
        }
    }

    @Test
    void step_clippedByNorm_bothTrainersAgreeWhenTheBlockIsKnown() {
        Block block = network();
        Map<String, float[]> stock =
                trained(block, builder().optClipNorm(0.05).optBlock(block), false);
        Map<String, float[]> bounded = trained(network(), builder().optClipNorm(0.05), true);
        Block filed = network();
        OffloadStreamAdamW.Builder files =
                builder().optClipNorm(0.05).optBlock(filed).optFileTier(folder);
        assertSame(stock, trained(filed, files, false), 0);
        assertSame(stock, trained(network(), files, true), 0);
        Map<String, float[]> free = trained(network(), builder(), true);

        assertSame(stock, bounded, 0);
        // Adam hardly sees a constant factor; the steps differ because the factor changes
        float[] clipped = bounded.values().iterator().next();
        float[] unclipped = free.values().iterator().next();
        assertTrue(Math.abs(clipped[0] - unclipped[0]) > 1e-6f);
    }

    @Test
    void step_modelThatGetsItsBlockLater_pathsAreTheBlocks() {
        Model model = Model.newInstance("later", "PyTorch");
        try (OffloadStreamAdamW optimizer = builder().optClipNorm(1).optModel(model).build();
                Run run = new Run(model, network(), optimizer, false)) {
            run.train(2);
            assertEquals(run.weights().keySet(), optimizer.state().paths());
        }
    }

    @Test
    void step_allGradientsOrPathsNeededWithoutTheBlock_isRefusedWithTheFix() {
        for (OffloadStreamAdamW.Builder builder :
                List.of(
                        builder().optClipNorm(1),
                        builder().optNonFinite(NonFinitePolicy.SKIP),
                        builder().optNonFinite(NonFinitePolicy.RAISE),
                        builder().optIdleExperts(IdleExperts.SKIP, Map::of))) {
            try (OffloadStreamAdamW optimizer = builder.build();
                    Run run = new Run(network(), optimizer, false)) {
                run.backward(run.x);
                Map<String, float[]> before = run.weights();
                IllegalStateException e =
                        assertThrows(IllegalStateException.class, run.trainer::step);
                assertTrue(e.getMessage().contains("optBlock"), e.getMessage());
                assertSame(before, run.weights(), 0);
            }
        }
    }

    @ParameterizedTest
    @CsvSource({"false, false", "true, false", "false, true", "true, true"})
    void step_nanInTheBatch_isSkippedAsAWholeAndTrainingGoesOn(boolean bounded, boolean files) {
        Block block = network();
        OffloadStreamAdamW.Builder builder =
                builder().optNonFinite(NonFinitePolicy.SKIP).optBlock(block);
        if (files) {
            builder.optFileTier(folder);
        }
        try (OffloadStreamAdamW optimizer = builder.build();
                Run run = new Run(block, optimizer, bounded)) {
            run.train(2);
            Map<String, float[]> before = run.weights();
            run.backward(run.x.mul(Float.NaN));
            run.trainer.step();
            assertSame(before, run.weights(), 0);
            assertEquals(1, optimizer.skippedSteps());
            run.eachGradient(g -> assertArrayEquals(new float[g.length], g));
            run.train(1);
            assertEquals(3, optimizer.updates());
            run.weights()
                    .forEach(
                            (path, w) -> {
                                assertFalse(Float.isNaN(w[0]), path);
                                assertTrue(w[0] != before.get(path)[0], path);
                                assertEquals(3, optimizer.state().step(path));
                            });
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void step_twoMicroBatches_gradientsAddUp(boolean bounded) {
        try (OffloadStreamAdamW twice = builder().setRescaleGrad(0.5f).build();
                OffloadStreamAdamW once = builder().build();
                Run two = new Run(network(), twice, bounded);
                Run one = new Run(network(), once, bounded)) {
            for (int step = 0; step < 3; step++) {
                two.backward(two.x);
                two.backward(two.x);
                two.trainer.step();
                one.train(1);
            }
            assertSame(one.weights(), two.weights(), 0);
            // Adam's steps hardly depend on the size of the gradients, but its state does.
            assertEquals(state(once), state(twice));
        }
    }

    private static List<Float> state(OffloadStreamAdamW optimizer) {
        List<Float> all = new ArrayList<>();
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            AdamWState state = optimizer.state();
            List<String> paths = new ArrayList<>(state.paths());
            // By DJL's trainer without a block: ids, which say nothing but their order.
            paths.sort(Comparator.comparing(String::length).thenComparing(path -> path));
            for (String path : paths) {
                for (float m : state.expAvg(manager, path).toFloatArray()) {
                    all.add(m);
                }
            }
        }
        return all;
    }

    /** DJL's trainer makes up zeros for it, and DJL's AdamW then decays it. */
    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void step_parameterWithoutGradient_isLeftAlone(boolean bounded) {
        Block used = Linear.builder().setUnits(3).build();
        Block idle = Linear.builder().setUnits(2).build();
        // The idle block runs, so that DJL's trainer knows it, but the result leaves it out.
        Block block = new ParallelBlock(branches -> branches.get(0), List.of(used, idle));
        try (OffloadStreamAdamW optimizer = builder().optBlock(block).build();
                Run run = new Run(block, optimizer, bounded)) {
            float[] before = idle.getParameters().get("weight").getArray().toFloatArray();
            run.train(3);
            assertArrayEquals(before, idle.getParameters().get("weight").getArray().toFloatArray());
            assertEquals(2, optimizer.state().paths().size());
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void load_modelGivenWithTheFile_stepsGoOnFromIt(boolean bounded) throws IOException {
        Path file = folder.resolve("given" + bounded);
        try (OffloadStreamAdamW first = builder().build();
                Run whole = new Run(network(), builder().build(), true);
                Run before = new Run(network(), first, true);
                OffloadStreamAdamW optimizer = builder().build();
                Run after = new Run(network(), optimizer, bounded)) {
            whole.train(5);
            before.train(3);
            first.save(file);
            Map<String, Parameter> from = ParameterPaths.of(before.model.getBlock());
            ParameterPaths.of(after.model.getBlock())
                    .forEach((path, p) -> from.get(path).getArray().copyTo(p.getArray()));

            assertTrue(optimizer.load(file, after.model.getBlock()).isComplete());
            after.train(2);

            assertSame(whole.weights(), after.weights(), 0);
            assertEquals(5, optimizer.updates());
        }
    }

    /** The block that came with the last file counts, not that of the first. */
    @Test
    void load_twiceForTwoModels_theSecondIsTrained() throws IOException {
        Path file = folder.resolve("twice");
        try (OffloadStreamAdamW first = builder().build();
                Run before = new Run(network(), first, true);
                OffloadStreamAdamW optimizer = builder().build();
                Run after = new Run(network(), optimizer, false)) {
            before.train(3);
            first.save(file);

            optimizer.load(file, before.model.getBlock());
            optimizer.load(file, after.model.getBlock());
            after.train(2);

            assertEquals(5, optimizer.updates());
        }
    }

    /** A step that DJL's trainer begins in vain is no step. */
    @Test
    void step_refusedUnderDjlsTrainer_isNotCounted() {
        double[] rate = {-1};
        OffloadStreamAdamW.Builder refusing =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker((path, number) -> (float) rate[0]);
        Block block = network();
        try (OffloadStreamAdamW optimizer = refusing.optBlock(block).build();
                Run run = new Run(block, optimizer, false)) {
            run.backward(run.x);
            assertThrows(IllegalArgumentException.class, run.trainer::step);
            assertEquals(0, optimizer.updates());
            rate[0] = 0.01;
            run.trainer.step();
            assertEquals(1, optimizer.updates());
        }
    }

    @Test
    void step_parameterOutsideTheGivenBlock_isRefused() {
        Block part = Linear.builder().setUnits(10).build();
        Block whole =
                new SequentialBlock()
                        .add(part)
                        .add(Activation::tanh)
                        .add(Linear.builder().setUnits(3).build());
        try (Run run = new Run(whole, builder().optBlock(part).build(), false)) {
            run.backward(run.x);
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, run.trainer::step);
            assertTrue(e.getMessage().contains("optModel(model)"), e.getMessage());
        }
    }

    @Test
    void step_sharedParameter_isUpdatedOnce() {
        Linear shared = Linear.builder().setUnits(WIDTH).build();
        SequentialBlock block =
                new SequentialBlock()
                        .add(shared)
                        .add(Activation::tanh)
                        .add(shared)
                        .add(Linear.builder().setUnits(3).build());
        try (OffloadStreamAdamW optimizer = builder().build();
                Run run = new Run(block, optimizer, true)) {
            run.train(3);
            assertEquals(4, optimizer.state().paths().size());
            optimizer
                    .state()
                    .paths()
                    .forEach(path -> assertEquals(3, optimizer.state().step(path)));
        }
    }

    @Test
    void step_frozenAndThawed_keepsItsStateAndItsOwnCount() {
        for (boolean bounded : new boolean[] {false, true}) {
            Block block = network();
            try (OffloadStreamAdamW optimizer = builder().optBlock(block).build();
                    Run run = new Run(block, optimizer, bounded)) {
                Block first = block.getChildren().get(0).getValue();
                String path = ParameterPaths.of(block).keySet().iterator().next();
                run.train(2);
                first.freezeParameters(true);
                run.train(3);
                assertEquals(2, optimizer.state().step(path));
                first.freezeParameters(false);
                run.train(1);
                assertEquals(3, optimizer.state().step(path));
                assertEquals(6, optimizer.updates());
            }
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void step_learningRateTracker_isAskedAsByDjlsOwn(boolean withBlock) {
        List<List<Integer>> asked = new ArrayList<>();
        for (int kind = 0; kind < 3; kind++) {
            List<Integer> numbers = new ArrayList<>();
            Tracker tracker =
                    n -> {
                        numbers.add(n);
                        return 0.01f;
                    };
            Block block = network();
            OffloadStreamAdamW.Builder ours =
                    OffloadStreamAdamW.builder().setLearningRateTracker(tracker);
            if (withBlock) {
                ours.optBlock(block);
            }
            Optimizer optimizer =
                    kind == 0
                            ? AdamW.builder().optLearningRateTracker(tracker).build()
                            : ours.build();
            try (Run run = new Run(block, optimizer, kind == 2)) {
                run.train(3);
            }
            asked.add(numbers);
        }
        assertEquals(List.of(1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), asked.get(0));
        assertEquals(asked.get(0), asked.get(1));
        assertEquals(asked.get(0), asked.get(2));
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void step_twoHundredTimes_leavesNoArraysAndNoMemory(boolean bounded) throws IOException {
        Block block =
                new SequentialBlock()
                        .add(Linear.builder().setUnits(512).build())
                        .add(Linear.builder().setUnits(512).build())
                        .add(Linear.builder().setUnits(3).build());
        try (OffloadStreamAdamW optimizer =
                        builder()
                                .optClipNorm(1)
                                .optNonFinite(NonFinitePolicy.SKIP)
                                .optBucketElements(1 << 17)
                                .optBlock(block)
                                .build();
                Run run = new Run(block, optimizer, bounded)) {
            run.train(20);
            int inModel = run.model.getNDManager().getManagedArrays().size();
            int inTrainer = run.trainer.getManager().getManagedArrays().size();
            long before = anonymousMemory();
            for (int i = 0; i < 200; i++) {
                run.train(1);
            }
            assertEquals(inModel, run.model.getNDManager().getManagedArrays().size());
            assertEquals(inTrainer, run.trainer.getManager().getManagedArrays().size());
            // One leaked copy of the gradients a step would be 200 MB.
            long grown = anonymousMemory() - before;
            assertTrue(grown < 100L << 20, grown + " bytes");
        }
    }

    private static long anonymousMemory() throws IOException {
        for (String line : Files.readAllLines(Path.of("/proc/self/status"))) {
            if (line.startsWith("RssAnon:")) {
                return Long.parseLong(line.replaceAll("[^0-9]", "")) << 10;
            }
        }
        throw new IOException("No RssAnon in /proc/self/status");
    }
}
