package org.djlmoe.autograd;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Activation;
import ai.djl.nn.Block;
import ai.djl.nn.LambdaBlock;
import ai.djl.nn.ParallelBlock;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.nn.norm.BatchNorm;
import ai.djl.nn.norm.Dropout;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.EasyTrain;
import ai.djl.training.Trainer;
import ai.djl.training.dataset.ArrayDataset;
import ai.djl.training.listener.EvaluatorTrainingListener;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.listener.TrainingListenerAdapter;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import ai.djl.util.Pair;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.UnaryOperator;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** An ordinary DJL program under {@code EasyTrain.fit}, with the stock trainer and with ours. */
class DropInTest {

    private static final int BATCH = 16;
    private static final int WIDTH = 12;

    /** Losses, batch by batch, then parameters and the gradients of the first batch. */
    private record Run(List<Float> losses, Map<String, float[]> first, Map<String, float[]> last) {}

    private enum Kind {
        CHAIN,
        RESIDUAL_OUTSIDE,
        RESIDUAL_OVER_TWO,
        BATCH_NORM
    }

    private static Block network(Kind kind, UnaryOperator<Block> wrap) {
        SequentialBlock net = new SequentialBlock().add(linear(WIDTH));
        switch (kind) {
            case CHAIN:
                return net.add(wrap.apply(feedForward()))
                        .add(wrap.apply(feedForward()))
                        .add(linear(5));
            case RESIDUAL_OUTSIDE:
                return net.add(residual(wrap.apply(feedForward())))
                        .add(residual(wrap.apply(feedForward())))
                        .add(linear(5));
            case RESIDUAL_OVER_TWO:
                return net.add(
                                residual(
                                        new SequentialBlock()
                                                .add(wrap.apply(feedForward()))
                                                .add(Activation::tanh)
                                                .add(residual(wrap.apply(feedForward())))))
                        .add(linear(5));
            default:
                return net.add(
                                wrap.apply(
                                        new SequentialBlock()
                                                .add(linear(WIDTH))
                                                .add(BatchNorm.builder().build())))
                        .add(linear(5));
        }
    }

    private static Block linear(int units) {
        return Linear.builder().setUnits(units).build();
    }

    private static Block feedForward() {
        return new SequentialBlock().add(linear(24)).add(Activation::tanh).add(linear(WIDTH));
    }

    private static Block residual(Block inner) {
        return new ParallelBlock(
                branches ->
                        new NDList(
                                branches.get(0)
                                        .singletonOrThrow()
                                        .add(branches.get(1).singletonOrThrow())),
                List.of(inner, new LambdaBlock(x -> x)));
    }

    private static Run train(Block block, boolean bounded) {
        Engine.getEngine("PyTorch").setRandomSeed(7);
        List<Float> losses = new ArrayList<>();
        Map<String, float[]> first = new LinkedHashMap<>();
        TrainingListener record =
                new TrainingListenerAdapter() {
                    @Override
                    public void onTrainingBatch(Trainer trainer, BatchData batch) {
                        losses.add(
                                trainer.getLoss()
                                        .getAccumulator(EvaluatorTrainingListener.TRAIN_ALL));
                        if (first.isEmpty()) {
                            first.putAll(gradients(trainer.getModel().getBlock()));
                        }
                    }
                };
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.softmaxCrossEntropyLoss())
                        .optOptimizer(
                                Optimizer.adam()
                                        .optLearningRateTracker(Tracker.fixed(0.01f))
                                        .build())
                        .optDevices(new Device[] {Device.cpu()})
                        .addTrainingListeners(new EvaluatorTrainingListener(), record);
        try (Model model = Model.newInstance("drop-in", "PyTorch")) {
            model.setBlock(block);
            try (Trainer trainer =
                    bounded ? new BoundedTrainer(model, config) : model.newTrainer(config)) {
                trainer.initialize(new Shape(BATCH, 9));
                NDManager manager = trainer.getManager();
                NDArray x = manager.randomNormal(new Shape(4 * BATCH, 9));
                NDArray y = manager.arange(4 * BATCH).mod(5).toType(x.getDataType(), false);
                ArrayDataset data =
                        new ArrayDataset.Builder()
                                .setData(x)
                                .optLabels(y)
                                .setSampling(BATCH, false)
                                .build();
                EasyTrain.fit(trainer, 3, data, null);
                Map<String, float[]> last = new LinkedHashMap<>();
                for (Pair<String, Parameter> p : block.getParameters()) {
                    last.put(p.getKey(), p.getValue().getArray().toFloatArray());
                }
                return new Run(losses, first, last);
            } catch (Exception e) {
                throw new AssertionError(e);
            }
        }
    }

    private static Map<String, float[]> gradients(Block block) {
        Map<String, float[]> all = new LinkedHashMap<>();
        for (Pair<String, Parameter> p : block.getParameters()) {
            if (p.getValue().requiresGradient()) {
                try (NDArray gradient = p.getValue().getArray().getGradient()) {
                    all.put(p.getKey(), gradient.toFloatArray());
                }
            }
        }
        return all;
    }

    @ParameterizedTest
    @org.junit.jupiter.params.provider.EnumSource(Kind.class)
    void fit_checkpointedBlocks_lossesGradientsAndStatisticsEqualTheStockTrainer(Kind kind) {
        Run stock = train(network(kind, b -> b), false);
        Run ours = train(network(kind, Checkpointed::new), true);

        assertEquals(12, stock.losses.size());
        for (int i = 0; i < 12; i++) {
            assertEquals(stock.losses.get(i), ours.losses.get(i), 2e-6f * stock.losses.get(i));
        }
        assertSame(stock.first, ours.first, 1e-6f);
        // also the running mean and variance, which a second forward must not move again
        assertSame(stock.last, ours.last, 1e-4f);
    }

    /** In the block's order: a wrapper changes only its own part of a name. */
    private static void assertSame(Map<String, float[]> a, Map<String, float[]> b, float delta) {
        assertEquals(a.size(), b.size());
        var other = b.entrySet().iterator();
        a.forEach((name, x) -> assertArrayEquals(x, other.next().getValue(), delta, name));
    }

    @Test
    void fit_nestedCheckpoints_gradientsEqualTheStockTrainer() {
        Run stock =
                train(
                        new SequentialBlock()
                                .add(linear(WIDTH))
                                .add(feedForward())
                                .add(feedForward())
                                .add(linear(5)),
                        false);
        Block nested =
                new Checkpointed(
                        new SequentialBlock()
                                .add(new Checkpointed(feedForward()))
                                .add(new Checkpointed(feedForward())));
        Run ours = train(new SequentialBlock().add(linear(WIDTH)).add(nested).add(linear(5)), true);

        assertSame(stock.first, ours.first, 1e-6f);
    }

    @ParameterizedTest
    @ValueSource(longs = {1, 2})
    void fit_dropoutInACheckpointedBlock_repeatsExactly(long seed) {
        assertDropoutRepeats(seed, dropout(0.5f), new LambdaBlock(x -> x));
    }

    @ParameterizedTest
    @ValueSource(longs = {1, 2})
    void fit_dropoutInNestedCheckpointedBlocks_repeatsExactly(long seed) {
        assertDropoutRepeats(
                seed, new Checkpointed(dropout(0.5f)), new Checkpointed(dropout(0.3f)));
    }

    private static Block dropout(float rate) {
        return Dropout.builder().optRate(rate).build();
    }

    /**
     * y = dropout(x w): with the loss sum(y), dL/dw is the sum of the kept inputs, scaled, and so
     * sum(y) = w dL/dw if backward drops what forward dropped.
     */
    private static void assertDropoutRepeats(long seed, Block first, Block second) {
        try (Model model = Model.newInstance("dropout", "PyTorch")) {
            Block block =
                    new Checkpointed(
                            new SequentialBlock()
                                    .add(Linear.builder().setUnits(1).optBias(false).build())
                                    .add(first)
                                    .add(second));
            model.setBlock(block);
            DefaultTrainingConfig config =
                    new DefaultTrainingConfig(Loss.l2Loss())
                            .optDevices(new Device[] {Device.cpu()});
            try (BoundedTrainer trainer = new BoundedTrainer(model, config, seed)) {
                trainer.initialize(new Shape(64, 1));
                NDArray x = trainer.getManager().randomUniform(1, 2, new Shape(64, 1));
                float sum;
                try (var collector = trainer.newGradientCollector()) {
                    NDArray total = trainer.forward(new NDList(x)).singletonOrThrow().sum();
                    collector.backward(total);
                    sum = total.getFloat();
                }
                NDArray w = block.getParameters().get(0).getValue().getArray();
                assertEquals(sum, w.getFloat() * w.getGradient().getFloat(), 1e-4f);
                assertTrue(Math.abs(sum) > 1e-3f);
            }
        }
    }

    @Test
    void afterStep_changeAskedForByAListener_happensOnceAfterTheNextStep() {
        try (Model model = Model.newInstance("later", "PyTorch")) {
            model.setBlock(linear(1));
            DefaultTrainingConfig config =
                    new DefaultTrainingConfig(Loss.l2Loss())
                            .optDevices(new Device[] {Device.cpu()});
            try (BoundedTrainer trainer = new BoundedTrainer(model, config)) {
                trainer.initialize(new Shape(1, 1));
                List<String> done = new ArrayList<>();
                trainer.afterStep(() -> done.add("change"));
                assertEquals(List.of(), done);
                trainer.step();
                trainer.step();
                assertEquals(List.of("change"), done);
            }
        }
    }
}
