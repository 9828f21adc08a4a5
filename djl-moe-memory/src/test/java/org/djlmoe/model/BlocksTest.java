package org.djlmoe.model;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.dirtyMemory;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.util.Pair;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.reference.NaiveAttention;
import org.djlmoe.reference.NaiveNorm;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Embedding, norm and attention as blocks in somebody's model. */
class BlocksTest {

    private static final double BOUND = 1e-5;

    private Model model;

    @BeforeEach
    void open() {
        model = Model.newInstance("blocks", "PyTorch");
    }

    @AfterEach
    void close() {
        model.close();
    }

    private Trainer trainer(Block block, boolean bounded, Shape shape) {
        model.setBlock(block);
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.l2Loss()).optDevices(new Device[] {Device.cpu()});
        Trainer trainer = bounded ? new BoundedTrainer(model, config) : model.newTrainer(config);
        trainer.initialize(shape);
        return trainer;
    }

    private static float[] differentiate(Trainer trainer, NDArray x, NDArray dy) {
        dirtyMemory(trainer.getManager());
        try (GradientCollector collector = trainer.newGradientCollector()) {
            NDArray y = trainer.forward(new NDList(x)).singletonOrThrow();
            collector.backward(y.mul(dy).sum());
            return y.toFloatArray();
        }
    }

    private static double[] numbers(NDArray array) {
        float[] floats = array.toFloatArray();
        double[] numbers = new double[floats.length];
        Arrays.setAll(numbers, i -> floats[i]);
        return numbers;
    }

    private static MoeConfig config(int heads, int kvHeads, int window) {
        return MoeConfig.builder()
                .setVocabSize(11)
                .setHiddenSize(8)
                .setIntermediateSize(6)
                .setNumLayers(2)
                .setNumHeads(heads)
                .optNumKeyValueHeads(kvHeads)
                .optHeadDim(4)
                .setNumExperts(4)
                .setTopK(2)
                .optRopeTheta(100)
                .optSlidingWindow(window)
                .optInitializerRange(0.4)
                .build();
    }

    @ParameterizedTest
    @CsvSource({"true, 2, 2, 0", "true, 4, 2, 3", "false, 4, 2, 3", "true, 4, 1, 99"})
    void attention_batchOfSequences_equalTheReference(
            boolean bounded, int heads, int kvHeads, int window) {
        AttentionBlock block = new AttentionBlock(config(heads, kvHeads, window));
        Shape shape = new Shape(3, 7, 8);
        try (Trainer trainer = trainer(block, bounded, shape)) {
            NDManager manager = trainer.getManager();
            double[] input = random(new Random(1), 3 * 7 * 8, 1);
            double[] upstream = random(new Random(2), 3 * 7 * 8, 1);
            NDArray x = array(manager, input, 3, 7, 8);
            x.setRequiresGradient(true);
            List<double[]> weights = new ArrayList<>();
            block.getParameters().values().forEach(p -> weights.add(numbers(p.getArray())));
            NaiveAttention.Result expected =
                    NaiveAttention.run(
                            new NaiveAttention.Settings(8, 7, heads, kvHeads, 4, window, 100, 1e-5),
                            weights,
                            input,
                            upstream);
            float[] y = differentiate(trainer, x, array(manager, upstream, 3, 7, 8));
            assertClose(expected.y(), y, BOUND, "y");
            assertClose(expected.dx(), x.getGradient(), BOUND, "dx");
            int i = 0;
            for (Parameter p : block.getParameters().values()) {
                double[] gradient = expected.gradients().get(i++);
                assertClose(gradient, p.getArray().getGradient(), BOUND, p.getName());
            }
        }
    }

    @Test
    void attention_moreSequencesThanAChunkHolds_eachAsIfAlone() {
        // 1100 tokens a sequence: three in a chunk, the last chunk holds one
        int batch = 7;
        int sequence = 1100;
        AttentionBlock block = new AttentionBlock(config(2, 1, 0));
        Shape shape = new Shape(batch, sequence, 8);
        try (Trainer trainer = trainer(block, true, shape)) {
            NDManager manager = trainer.getManager();
            NDArray x =
                    array(
                            manager,
                            random(new Random(1), batch * sequence * 8, 1),
                            batch,
                            sequence,
                            8);
            NDArray dy =
                    array(
                            manager,
                            random(new Random(2), batch * sequence * 8, 1),
                            batch,
                            sequence,
                            8);
            x.setRequiresGradient(true);
            float[] y = differentiate(trainer, x, dy);
            float[] dx = x.getGradient().toFloatArray();
            List<float[]> gradients = new ArrayList<>();
            for (Parameter p : block.getParameters().values()) {
                gradients.add(p.getArray().getGradient().toFloatArray());
            }
            ((BoundedTrainer) trainer).zeroGradients();
            int width = sequence * 8;
            for (int b = 0; b < batch; b++) {
                NDArray one = x.get(b + ":" + (b + 1)).stopGradient();
                one.setRequiresGradient(true);
                float[] alone = differentiate(trainer, one, dy.get(b + ":" + (b + 1)));
                assertClose(alone, Arrays.copyOfRange(y, b * width, (b + 1) * width), 1e-6, "y");
                assertClose(
                        one.getGradient().toFloatArray(),
                        Arrays.copyOfRange(dx, b * width, (b + 1) * width),
                        1e-6,
                        "dx");
            }
            int i = 0;
            for (Parameter p : block.getParameters().values()) {
                float[] sum = p.getArray().getGradient().toFloatArray();
                assertClose(sum, gradients.get(i++), 1e-4, p.getName());
            }
        }
    }

    @Test
    void attention_noTokens_emptyOutput() {
        AttentionBlock block = new AttentionBlock(config(2, 1, 0));
        try (Trainer trainer = trainer(block, true, new Shape(1, 3, 8))) {
            for (Shape shape : List.of(new Shape(0, 3, 8), new Shape(2, 0, 8))) {
                NDArray x = trainer.getManager().create(shape);
                assertEquals(shape, trainer.evaluate(new NDList(x)).singletonOrThrow().getShape());
            }
        }
    }

    @Test
    void attention_rowsInsteadOfSequences_clearError() {
        AttentionBlock block = new AttentionBlock(config(2, 1, 0));
        try (Trainer trainer = trainer(block, true, new Shape(1, 3, 8))) {
            NDArray x = trainer.getManager().ones(new Shape(3, 8));
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class, () -> trainer.evaluate(new NDList(x)));
            assertTrue(e.getMessage().contains("[batch, sequence, hidden]"), e.getMessage());
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void rmsNorm_batchOfSequences_equalTheReference(boolean bounded) {
        RmsNorm block = new RmsNorm(5, 1e-5);
        try (Trainer trainer = trainer(block, bounded, new Shape(2, 3, 5))) {
            NDManager manager = trainer.getManager();
            double[] input = random(new Random(1), 30, 1);
            double[] upstream = random(new Random(2), 30, 1);
            double[] gamma = random(new Random(3), 5, 1);
            array(manager, gamma, 5).copyTo(block.weight().getArray());
            NDArray x = array(manager, input, 2, 3, 5);
            x.setRequiresGradient(true);
            NaiveNorm.Result expected = NaiveNorm.run(gamma, 1e-5, input, upstream);
            float[] y = differentiate(trainer, x, array(manager, upstream, 2, 3, 5));
            assertClose(expected.y(), y, BOUND, "y");
            assertClose(expected.dx(), x.getGradient(), BOUND, "dx");
            assertClose(
                    expected.dgamma(), block.weight().getArray().getGradient(), BOUND, "dgamma");
        }
    }

    @ParameterizedTest
    @EnumSource(
            value = DataType.class,
            names = {"INT64", "INT32", "FLOAT32"})
    void embedding_idsOfAnyType_rowsAndSummedGradients(DataType type) {
        for (boolean bounded : new boolean[] {true, false}) {
            TokenEmbedding block = new TokenEmbedding(4, 3, 0.02);
            model.close();
            model = Model.newInstance("blocks", "PyTorch");
            try (Trainer trainer = trainer(block, bounded, new Shape(2, 2))) {
                NDManager manager = trainer.getManager();
                NDArray table = block.weight().getArray();
                manager.arange(12f).reshape(4, 3).copyTo(table);
                NDArray ids =
                        manager.create(new long[] {2, 0, 2, 2}, new Shape(2, 2))
                                .toType(type, false);
                NDArray dy = manager.arange(1f, 13f, 1f).reshape(4, 3);
                assertArrayEquals(
                        new float[] {6, 7, 8, 0, 1, 2, 6, 7, 8, 6, 7, 8},
                        differentiate(trainer, ids, dy));
                assertArrayEquals(
                        new float[] {4, 5, 6, 0, 0, 0, 18, 21, 24, 0, 0, 0},
                        table.getGradient().toFloatArray());
            }
        }
    }

    @Test
    void embedding_idOutsideTheVocabulary_clearError() {
        TokenEmbedding block = new TokenEmbedding(4, 3, 0.02);
        try (Trainer trainer = trainer(block, true, new Shape(2, 2))) {
            for (long id : new long[] {4, -1}) {
                NDArray ids = trainer.getManager().create(new long[] {0, id}, new Shape(1, 2));
                IllegalArgumentException e =
                        assertThrows(
                                IllegalArgumentException.class,
                                () -> trainer.evaluate(new NDList(ids)));
                assertTrue(
                        e.getMessage().contains("Token id " + id + " is outside"), e.getMessage());
            }
        }
    }

    @Test
    void embedding_noTokens_noRows() {
        TokenEmbedding block = new TokenEmbedding(4, 3, 0.02);
        try (Trainer trainer = trainer(block, true, new Shape(2, 2))) {
            NDArray ids = trainer.getManager().create(new Shape(0, 2), DataType.INT64);
            assertEquals(
                    new Shape(0, 3),
                    trainer.evaluate(new NDList(ids)).singletonOrThrow().getShape());
        }
    }

    @Test
    void embedding_frozen_whatFollowsStillTrains() {
        TokenEmbedding embedding = new TokenEmbedding(4, 3, 1);
        Block block =
                new SequentialBlock()
                        .add(embedding)
                        .add(new RmsNorm(3, 1e-5))
                        .add(Linear.builder().setUnits(2).build());
        try (Trainer trainer = trainer(block, true, new Shape(2, 2))) {
            embedding.freezeParameters(true);
            NDManager manager = trainer.getManager();
            NDArray ids = manager.create(new long[] {2, 0, 3, 2}, new Shape(2, 2));
            differentiate(trainer, ids, array(manager, random(new Random(2), 8, 1), 4, 2));
            for (Pair<String, Parameter> p : block.getParameters()) {
                boolean trained = p.getValue() != embedding.weight();
                boolean moved =
                        trained && p.getValue().getArray().getGradient().abs().sum().getFloat() > 0;
                assertEquals(trained, moved, p.getKey());
            }
        }
    }
}
