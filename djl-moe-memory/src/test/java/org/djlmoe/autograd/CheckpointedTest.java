package org.djlmoe.autograd;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Activation;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.nn.norm.Dropout;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.loss.Loss;
import java.util.Arrays;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Known failures of activation checkpointing elsewhere. */
class CheckpointedTest {

    private static final int BATCH = 256;

    private Model model;

    @BeforeEach
    void open() {
        model = Model.newInstance("checkpointed", "PyTorch");
    }

    @AfterEach
    void close() {
        model.close();
    }

    private BoundedTrainer trainer(Block block, long seed, Shape shape) {
        model.setBlock(block);
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.l2Loss()).optDevices(new Device[] {Device.cpu()});
        BoundedTrainer trainer = new BoundedTrainer(model, config, seed);
        trainer.initialize(shape);
        return trainer;
    }

    private static Block scale() {
        return Linear.builder().setUnits(1).optBias(false).build();
    }

    private static Block dropout() {
        return Dropout.builder().optRate(0.5f).build();
    }

    /**
     * Every block is y = dropout(x w), so the loss sum(y) is linear in every w: w dL/dw = L for
     * each of them, but only if its masks in backward are those of forward.
     */
    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void backward_severalDropoutsInSeveralBlocks_eachRepeatsItsOwnMask(boolean evaluateBetween) {
        Block block =
                new SequentialBlock()
                        .add(
                                new Checkpointed(
                                        new SequentialBlock()
                                                .add(scale())
                                                .add(dropout())
                                                .add(scale())
                                                .add(dropout())))
                        .add(dropout())
                        .add(new Checkpointed(new SequentialBlock().add(scale()).add(dropout())));
        try (BoundedTrainer trainer = trainer(block, 9, new Shape(BATCH, 1))) {
            NDArray x = trainer.getManager().randomUniform(1, 2, new Shape(BATCH, 1));
            float loss;
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray total = trainer.forward(new NDList(x)).singletonOrThrow().sum();
                if (evaluateBetween) {
                    // draws random numbers of its own, and runs the same blocks
                    trainer.evaluate(new NDList(x)).close();
                    trainer.getManager().randomNormal(new Shape(7)).close();
                }
                collector.backward(total);
                loss = total.getFloat();
            }
            assertTrue(Math.abs(loss) > 1e-6, "" + loss);
            assertEquals(3, block.getParameters().size());
            for (Parameter w : block.getParameters().values()) {
                float product = w.getArray().getFloat() * w.getArray().getGradient().getFloat();
                assertEquals(loss, product, 1e-4 * Math.abs(loss), w.getName());
            }
        }
    }

    @Test
    void forward_twoStepsAndTwoBlocks_differentMasks() {
        Block first = new Checkpointed(dropout());
        Block second = new Checkpointed(dropout());
        try (BoundedTrainer trainer =
                trainer(
                        new SequentialBlock()
                                .add(Linear.builder().setUnits(BATCH).build())
                                .add(first)
                                .add(second),
                        1,
                        new Shape(1, 1))) {
            NDManager manager = trainer.getManager();
            float[][] masks = new float[3][];
            for (int step = 0; step < 2; step++) {
                try (GradientCollector collector = trainer.newGradientCollector()) {
                    NDArray ones = manager.ones(new Shape(1, BATCH));
                    masks[step] = apply(first, manager, ones);
                    masks[2] = apply(second, manager, ones);
                }
            }
            assertFalse(Arrays.equals(masks[0], masks[1]), "the same mask in both steps");
            assertFalse(Arrays.equals(masks[1], masks[2]), "the same mask in both blocks");
        }
    }

    private static float[] apply(Block block, NDManager manager, NDArray x) {
        return block.forward(
                        new ai.djl.training.ParameterStore(manager, false), new NDList(x), true)
                .singletonOrThrow()
                .toFloatArray();
    }

    @Test
    void backward_frozenLayerBelow_checkpointedLayersAboveTrain() {
        Block frozen = Linear.builder().setUnits(3).build();
        Block trained = new SequentialBlock().add(linear()).add(Activation::tanh).add(linear());
        Block block = new SequentialBlock().add(frozen).add(new Checkpointed(trained));
        try (BoundedTrainer trainer = trainer(block, 1, new Shape(4, 2))) {
            frozen.freezeParameters(true);
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray x = trainer.getManager().randomNormal(new Shape(4, 2));
                collector.backward(trainer.forward(new NDList(x)).singletonOrThrow().sum());
            }
            for (Parameter p : trained.getParameters().values()) {
                assertTrue(p.getArray().getGradient().abs().sum().getFloat() > 0, p.getName());
            }
            assertEquals(4, trained.getParameters().size());
        }
    }

    @Test
    void backward_twoBlocksOnOneInput_gradientsOfBoth() {
        Block left = linear();
        Block right = linear();
        Block bottom = linear();
        Block block =
                new SequentialBlock()
                        .add(bottom)
                        .add(
                                new ai.djl.nn.ParallelBlock(
                                        out ->
                                                new NDList(
                                                        out.get(0)
                                                                .singletonOrThrow()
                                                                .add(
                                                                        out.get(1)
                                                                                .singletonOrThrow())),
                                        java.util.List.of(
                                                new Checkpointed(left), new Checkpointed(right))));
        try (BoundedTrainer trainer = trainer(block, 1, new Shape(4, 3))) {
            NDArray x = trainer.getManager().randomNormal(new Shape(4, 3));
            try (GradientCollector collector = trainer.newGradientCollector()) {
                collector.backward(trainer.forward(new NDList(x)).singletonOrThrow().sum());
            }
            NDArray weights = weight(left).add(weight(right)).sum(new int[] {0}); // d loss / d h
            NDArray expected = weights.reshape(3, 1).matMul(x.sum(new int[] {0}).reshape(1, 3));
            assertArrayEquals(
                    expected.toFloatArray(),
                    bottom.getParameters()
                            .get(0)
                            .getValue()
                            .getArray()
                            .getGradient()
                            .toFloatArray(),
                    1e-4f);
        }
    }

    private static NDArray weight(Block linear) {
        return linear.getParameters().get(0).getValue().getArray().stopGradient();
    }

    private static Block linear() {
        return Linear.builder().setUnits(3).build();
    }
}
