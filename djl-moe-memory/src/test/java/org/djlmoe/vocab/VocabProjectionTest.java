package org.djlmoe.vocab;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotSame;
import static org.junit.jupiter.api.Assertions.assertSame;
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
import ai.djl.nn.Activation;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.EasyTrain;
import ai.djl.training.GradientCollector;
import ai.djl.training.ParameterStore;
import ai.djl.training.Trainer;
import ai.djl.training.dataset.ArrayDataset;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.training.listener.EvaluatorTrainingListener;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.listener.TrainingListenerAdapter;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Tape;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class VocabProjectionTest {

    private static final int V = 23;
    private static final int H = 6;
    private static final int BATCH = 8;

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private static Block tied(boolean tie) {
        TokenEmbedding embedding = new TokenEmbedding(V, H);
        VocabProjection.Builder projection = VocabProjection.builder().setVocabSize(V);
        if (tie) {
            projection.optWeight(embedding.table);
        }
        return new SequentialBlock()
                .add(embedding)
                .add(Linear.builder().setUnits(H).build())
                .add(Activation::tanh)
                .add(projection.build());
    }

    private static Block dense() {
        Block last = Linear.builder().setUnits(V).optBias(false).build();
        last.setInitializer(new NormalInitializer(0.02f), Parameter.Type.WEIGHT);
        return new SequentialBlock()
                .add(new TokenEmbedding(V, H))
                .add(Linear.builder().setUnits(H).build())
                .add(Activation::tanh)
                .add(last);
    }

    private static List<Float> train(Block block, Loss loss, boolean bounded) throws Exception {
        Engine.getEngine("PyTorch").setRandomSeed(3);
        List<Float> losses = new ArrayList<>();
        TrainingListener record =
                new TrainingListenerAdapter() {
                    @Override
                    public void onTrainingBatch(Trainer trainer, BatchData batch) {
                        losses.add(
                                trainer.getLoss()
                                        .getAccumulator(EvaluatorTrainingListener.TRAIN_ALL));
                    }
                };
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(loss)
                        .optOptimizer(
                                Optimizer.adam()
                                        .optLearningRateTracker(Tracker.fixed(0.02f))
                                        .build())
                        .optDevices(new Device[] {Device.cpu()})
                        .addTrainingListeners(new EvaluatorTrainingListener(), record);
        try (Model model = Model.newInstance("vocab", "PyTorch")) {
            model.setBlock(block);
            try (Trainer trainer =
                    bounded ? new BoundedTrainer(model, config) : model.newTrainer(config)) {
                trainer.initialize(new Shape(BATCH));
                NDManager data = trainer.getManager();
                NDArray ids = data.arange(5 * BATCH).mul(7).mod(V).toType(DataType.INT64, false);
                NDArray next = ids.add(7).mod(V).toType(DataType.FLOAT32, false);
                ArrayDataset set =
                        new ArrayDataset.Builder()
                                .setData(ids)
                                .optLabels(next)
                                .setSampling(BATCH, false)
                                .build();
                EasyTrain.fit(trainer, 4, set, null);
            }
        }
        return losses;
    }

    private static void assertSameCurve(List<Float> expected, List<Float> actual) {
        assertEquals(20, expected.size());
        assertEquals(20, actual.size());
        for (int i = 0; i < expected.size(); i++) {
            assertEquals(expected.get(i), actual.get(i), 2e-5f * expected.get(i), "batch " + i);
        }
        assertTrue(actual.get(19) < actual.get(0), actual::toString);
    }

    @Test
    void fit_boundedAndStockTrainer_lossesOfALinearLayerWithSoftmaxCrossEntropy() throws Exception {
        List<Float> reference = train(dense(), Loss.softmaxCrossEntropyLoss(), false);
        assertSameCurve(reference, train(tied(false), RingDtpLoss.builder().build(), true));
        assertSameCurve(reference, train(tied(false), RingDtpLoss.builder().build(), false));
    }

    @Test
    void fit_tiedWeight_boundedTrainerAsStockTrainer() throws Exception {
        List<Float> stock = train(tied(true), RingDtpLoss.builder().build(), false);
        assertSameCurve(stock, train(tied(true), RingDtpLoss.builder().build(), true));
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void backward_tiedWeight_gradientIsTheSumOfBothUses(boolean bounded) {
        TokenEmbedding embedding = new TokenEmbedding(V, H);
        Block block =
                new SequentialBlock()
                        .add(embedding)
                        .add(
                                VocabProjection.builder()
                                        .setVocabSize(V)
                                        .optWeight(embedding.table)
                                        .build());
        block.initialize(manager, DataType.FLOAT32, new Shape(4));
        long[] ids = {3, 5, 3, 0};
        long[] labels = {5, 1, -100, 3};
        NDArray table = embedding.table.getArray();
        ParameterStore store = new ParameterStore(manager, false);
        try (GradientCollector collector =
                bounded
                        ? new Tape(manager, 1, () -> {})
                        : Engine.getEngine("PyTorch").newGradientCollector()) {
            NDList out = block.forward(store, new NDList(manager.create(ids)), true);
            NDList target = new NDList(manager.create(labels));
            collector.backward(RingDtpLoss.builder().build().evaluate(target, out));
        }

        double[] w = table.toType(DataType.FLOAT64, true).toDoubleArray();
        double[] hidden = new double[ids.length * H];
        for (int t = 0; t < ids.length; t++) {
            System.arraycopy(w, (int) ids[t] * H, hidden, t * H, H);
        }
        double third = 1 / 3.0;
        NaiveCrossEntropy.Result naive =
                new NaiveCrossEntropy()
                        .compute(
                                hidden, w, null, labels, new double[] {third, third, third, third});
        double[] expected = naive.weight().clone();
        for (int t = 0; t < ids.length; t++) {
            for (int i = 0; i < H; i++) {
                expected[(int) ids[t] * H + i] += naive.hidden()[t * H + i];
            }
        }
        assertArrayEquals(
                expected, table.getGradient().toType(DataType.FLOAT64, true).toDoubleArray(), 1e-7);
    }

    @Test
    void getParameters_tiedWeight_listedAndSavedOnce() throws Exception {
        Block block = tied(true);
        block.initialize(manager, DataType.FLOAT32, new Shape(BATCH));
        assertEquals(3, block.getParameters().size());

        ByteArrayOutputStream saved = new ByteArrayOutputStream();
        block.saveParameters(new DataOutputStream(saved));
        Block loaded = tied(true);
        loaded.loadParameters(
                manager, new DataInputStream(new ByteArrayInputStream(saved.toByteArray())));
        NDList ids = new NDList(manager.create(new long[] {1, 2}));
        ParameterStore store = new ParameterStore(manager, false);
        NDList a = block.forward(store, ids, false);
        NDList b = loaded.forward(store, ids, false);
        assertArrayEquals(a.get(0).toFloatArray(), b.get(0).toFloatArray());
        assertArrayEquals(a.get(1).toFloatArray(), b.get(1).toFloatArray());
    }

    @Test
    void initialize_tiedWeightOfAnotherShape_clearError() {
        TokenEmbedding embedding = new TokenEmbedding(V + 1, H);
        Block projection =
                VocabProjection.builder().setVocabSize(V).optWeight(embedding.table).build();
        IllegalArgumentException e =
                assertThrows(
                        IllegalArgumentException.class,
                        () ->
                                projection.initialize(
                                        manager, DataType.FLOAT32, new Shape(BATCH, H)));
        assertTrue(e.getMessage().contains("tied weight"), e.getMessage());
    }

    @Test
    void forward_tiedWeightNotInitialized_clearError() {
        TokenEmbedding embedding = new TokenEmbedding(V, H);
        Block projection =
                VocabProjection.builder().setVocabSize(V).optWeight(embedding.table).build();
        projection.initialize(manager, DataType.FLOAT32, new Shape(BATCH, H));
        NDList hidden = new NDList(manager.ones(new Shape(BATCH, H)));
        ParameterStore store = new ParameterStore(manager, false);
        IllegalStateException e =
                assertThrows(
                        IllegalStateException.class,
                        () -> projection.forward(store, hidden, false));
        assertTrue(e.getMessage().contains("embedding"), e.getMessage());
    }

    private VocabProjection projection(boolean bias) {
        VocabProjection projection =
                VocabProjection.builder().setVocabSize(V).optBias(bias).build();
        projection.initialize(manager, DataType.FLOAT32, new Shape(BATCH, 3, H));
        return projection;
    }

    @Test
    void forward_anyInput_pairOfHiddenAndWeightNeverLogits() {
        VocabProjection projection = projection(true);
        NDArray hidden = manager.randomNormal(new Shape(BATCH, 3, H));
        ParameterStore store = new ParameterStore(manager, false);
        NDList out = projection.forward(store, new NDList(hidden), true);

        assertEquals(3, out.size());
        assertSame(hidden, out.get(0));
        assertEquals(new Shape(V, H), out.get(1).getShape());
        assertEquals(new Shape(V), out.get(2).getShape());
        Shape[] promised = projection.getOutputShapes(new Shape[] {hidden.getShape()});
        for (int i = 0; i < 3; i++) {
            assertEquals(out.get(i).getShape(), promised[i]);
        }
    }

    @Test
    void forward_batchManagerCloses_weightSurvives() {
        VocabProjection projection = projection(true);
        NDArray weight = projection.getParameters().get("weight").getArray();
        float[] before = weight.toFloatArray();
        ParameterStore store = new ParameterStore(manager, false);
        for (int i = 0; i < 2; i++) {
            NDList out;
            try (NDManager batch = manager.newSubManager()) {
                NDArray hidden = batch.ones(new Shape(BATCH, H));
                out = projection.forward(store, new NDList(hidden), true);
                assertNotSame(weight, out.get(1));
                assertSame(batch, out.get(1).getManager());
            }
            out.close();
        }
        assertArrayEquals(before, weight.toFloatArray());
    }

    @Test
    void initialize_default_normalWithSmallDeviationAndZeroBias() {
        VocabProjection projection =
                VocabProjection.builder().setVocabSize(400).optBias(true).build();
        projection.initialize(manager, DataType.FLOAT32, new Shape(1, 50));
        NDArray weight = projection.getParameters().get("weight").getArray();
        assertEquals(0.02f, (float) Math.sqrt(weight.square().mean().getFloat()), 1e-3f);
        assertEquals(0f, projection.getParameters().get("bias").getArray().abs().sum().getFloat());
    }

    @Test
    void initialize_shapeWithoutHiddenAxis_clearError() {
        VocabProjection projection = VocabProjection.builder().setVocabSize(V).build();
        assertThrows(
                IllegalArgumentException.class,
                () -> projection.initialize(manager, DataType.FLOAT32, new Shape(4)));
    }

    @Test
    void build_withoutVocabSize_clearError() {
        assertThrows(IllegalArgumentException.class, () -> VocabProjection.builder().build());
    }

    @Test
    void logits_withBias_productPlusBias() {
        VocabProjection projection = projection(true);
        projection.getParameters().get("bias").getArray().addi(2);
        NDArray hidden = manager.ones(new Shape(1, 2, H));
        ParameterStore store = new ParameterStore(manager, false);
        NDArray logits = projection.logits(store, hidden, false);
        assertEquals(new Shape(1, 2, V), logits.getShape());
        NDArray weight = projection.getParameters().get("weight").getArray();
        float row = weight.get("4").sum().getFloat();
        assertEquals(2 + row, logits.getFloat(0, 1, 4), 1e-6f);
    }

    @ParameterizedTest
    @ValueSource(strings = {"MEAN", "NONE"})
    void evaluate_hundredTimes_nothingStaysWithTheModel(String reduction) {
        RingDtpLoss loss =
                RingDtpLoss.builder()
                        .optReduction(RingDtpLoss.Reduction.valueOf(reduction))
                        .optLabelSmoothing(.1)
                        .optSoftcap(5)
                        .build();
        VocabProjection projection = projection(true);
        ParameterStore store = new ParameterStore(manager, false);
        int before = -1;
        for (int i = 0; i < 101; i++) {
            try (NDManager batch = manager.newSubManager()) {
                NDArray hidden = batch.ones(new Shape(BATCH, H));
                NDList labels = new NDList(batch.arange(BATCH).toType(DataType.INT64, false));
                NDList out;
                try (Tape tape = new Tape(batch, 1, () -> {})) {
                    out = projection.forward(store, new NDList(hidden), true);
                    tape.backward(loss.evaluate(labels, out).sum());
                }
                try (GradMode off = GradMode.off()) {
                    loss.evaluate(labels, out);
                    loss.evaluate(new NDList(labels.head().duplicate()), out);
                    loss.validTokens(labels.head());
                }
            }
            if (i == 0) {
                before = manager.getManagedArrays().size();
            }
        }
        assertEquals(before, manager.getManagedArrays().size());
    }
}
