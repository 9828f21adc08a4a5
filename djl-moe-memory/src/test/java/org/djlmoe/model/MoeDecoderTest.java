package org.djlmoe.model;

import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.dirtyMemory;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
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
import ai.djl.nn.Parameter;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.reference.ProcessMemory;
import org.djlmoe.vocab.VocabProjection;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class MoeDecoderTest {

    private static final int VOCAB = 13;
    private static final Shape BATCH = new Shape(3, 5);

    private static MoeDecoder decoder(boolean tied) {
        return decoder(tied, 2, 4);
    }

    private static MoeDecoder decoder(boolean tied, int layers, int chunkTokens) {
        return new MoeDecoder(config(tied, layers), chunkTokens);
    }

    private static MoeConfig config(boolean tied, int layers) {
        return MoeConfig.builder()
                .setVocabSize(VOCAB)
                .setHiddenSize(8)
                .setIntermediateSize(6)
                .setNumLayers(layers)
                .setNumHeads(4)
                .optNumKeyValueHeads(2)
                .setNumExperts(4)
                .setTopK(2)
                .optRopeTheta(100)
                .optSlidingWindow(3)
                .optTieWordEmbeddings(tied)
                .optInitializerRange(0.3)
                .build();
    }

    private static Trainer trainer(Model model, boolean bounded) {
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.softmaxCrossEntropyLoss())
                        .optOptimizer(
                                Optimizer.adam()
                                        .optLearningRateTracker(Tracker.fixed(0.01f))
                                        .build())
                        .optDevices(new Device[] {Device.cpu()});
        Trainer trainer = bounded ? new BoundedTrainer(model, config) : model.newTrainer(config);
        trainer.initialize(BATCH);
        return trainer;
    }

    private static NDArray ids(NDManager manager, int step) {
        long[] ids = new long[(int) BATCH.size()];
        Arrays.setAll(ids, i -> (i * i + 3L * i + step) % VOCAB);
        return manager.create(ids, BATCH);
    }

    private static NDArray logits(NDList out) {
        return VocabProjection.logits(out.get(0), out.get(1), null);
    }

    /** One step on the task of naming the token itself plus one; returns the loss. */
    private static float step(Trainer trainer, int step) {
        try (NDManager batch = trainer.getManager().newSubManager()) {
            NDArray ids = ids(batch, step);
            NDArray labels = ids.add(1).mod(VOCAB).reshape(-1);
            float value;
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray logits = logits(trainer.forward(new NDList(ids))).reshape(-1, VOCAB);
                NDArray loss = trainer.getLoss().evaluate(new NDList(labels), new NDList(logits));
                collector.backward(loss);
                value = loss.getFloat();
            }
            trainer.step();
            return value;
        }
    }

    private static Map<String, float[]> weights(MoeDecoder decoder) {
        Map<String, float[]> weights = new LinkedHashMap<>();
        decoder.namedParameters()
                .forEach((name, p) -> weights.put(name, p.getArray().toFloatArray()));
        return weights;
    }

    @Test
    void build_allOptions_everyParameterHasANameMovesAndBothTrainersAgree() {
        List<Map<String, float[]>> runs = new ArrayList<>();
        for (boolean bounded : new boolean[] {false, true}) {
            Engine.getEngine("PyTorch").setRandomSeed(3);
            MoeDecoder decoder =
                    MoeDecoder.builder()
                            .setConfig(config(false, 2))
                            .optChunkTokens(2)
                            .optMaxChunks(3)
                            .optBalanceCoefficient(0.1)
                            .optZCoefficient(0.01)
                            .optBiasUpdateRate(0.01)
                            .optSharedExperts(7, true)
                            .build();
            assertEquals(3, decoder.moeBlocks().get(0).chunks(15));
            try (Model model = Model.newInstance("decoder", "PyTorch")) {
                model.setBlock(decoder);
                try (Trainer trainer = trainer(model, bounded)) {
                    Map<String, float[]> before = weights(decoder);
                    for (int i = 0; i < 3; i++) {
                        step(trainer, i);
                        if (!bounded) {
                            decoder.moeBlocks().forEach(MoeBlock::afterStep);
                        }
                    }
                    Map<String, float[]> after = weights(decoder);
                    after.forEach(
                            (name, w) -> assertFalse(Arrays.equals(before.get(name), w), name));
                    assertEquals(decoder.getParameters().size(), after.size());
                    runs.add(after);
                }
            }
        }
        String prefix = "model.layers.1.mlp.";
        assertTrue(
                runs.get(0)
                        .keySet()
                        .containsAll(
                                List.of(
                                        prefix + "gate.e_score_correction_bias",
                                        prefix + "shared_expert.gate_up_proj",
                                        prefix + "shared_expert.down_proj",
                                        prefix + "shared_expert_gate.weight")));
        runs.get(0).forEach((name, w) -> assertClose(w, runs.get(1).get(name), 1e-4, name));
    }

    @Test
    void forward_mask_paddingDoesNotCountAndChangesNoOutput() {
        MoeDecoder decoder = decoder(false);
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder);
            try (Trainer trainer = trainer(model, true)) {
                NDManager manager = trainer.getManager();
                NDArray ids = ids(manager, 1);
                boolean[] counted = new boolean[15];
                Arrays.fill(counted, 2, 9, true);
                NDArray mask = manager.create(counted, BATCH);
                try (GradientCollector collector = trainer.newGradientCollector()) {
                    float[] plain = trainer.forward(new NDList(ids)).head().toFloatArray();
                    assertEquals(15, tokens(decoder));
                    NDList masked = trainer.forward(new NDList(ids, mask));
                    assertArrayEquals(plain, masked.head().toFloatArray());
                    assertEquals(7, tokens(decoder));
                    collector.backward(masked.head().sum());
                }
                NDList wrong = new NDList(ids, mask.reshape(15));
                assertThrows(IllegalArgumentException.class, () -> trainer.evaluate(wrong));
            }
        }
    }

    private static long tokens(MoeDecoder decoder) {
        return decoder.moeBlocks().get(1).statistics().orElseThrow().tokens();
    }

    @Test
    void config_whatTheBuilderAdded_isPartOfIt() {
        MoeConfig plain = config(false, 1);
        assertEquals(plain, new MoeDecoder(plain).config());
        MoeConfig extended =
                plain.toBuilder().optSharedExperts(7, true).optRoutingBias(true).build();
        assertEquals(
                extended,
                MoeDecoder.builder()
                        .setConfig(plain)
                        .optBiasUpdateRate(0.01)
                        .optSharedExperts(7, true)
                        .build()
                        .config());
        MoeDecoder decoder = MoeDecoder.builder().setConfig(extended).build();
        assertEquals(extended, decoder.config());
        assertNotNull(decoder.moeBlocks().get(0).sharedExperts());
        assertNotNull(decoder.moeBlocks().get(0).router().balanceBias());
        MoeDecoder without =
                MoeDecoder.builder().setConfig(extended).optSharedExperts(0, true).build();
        assertEquals(plain.toBuilder().optRoutingBias(true).build(), without.config());
        assertNull(without.moeBlocks().get(0).sharedExperts());
    }

    @Test
    void build_noConfig_clearError() {
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> MoeDecoder.builder().build());
        assertTrue(e.getMessage().contains("setConfig"), e.getMessage());
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void train_threeSteps_lossesAndWeightsOfTheStockTrainerAndAllMove(boolean tied) {
        List<Map<String, float[]>> runs = new ArrayList<>();
        List<List<Float>> losses = new ArrayList<>();
        for (boolean bounded : new boolean[] {false, true}) {
            Engine.getEngine("PyTorch").setRandomSeed(3);
            MoeDecoder decoder = decoder(tied);
            try (Model model = Model.newInstance("decoder", "PyTorch")) {
                model.setBlock(decoder);
                try (Trainer trainer = trainer(model, bounded)) {
                    Map<String, float[]> before = weights(decoder);
                    List<Float> values = new ArrayList<>();
                    for (int i = 0; i < 3; i++) {
                        dirtyMemory(trainer.getManager());
                        values.add(step(trainer, i));
                    }
                    Map<String, float[]> after = weights(decoder);
                    after.forEach(
                            (name, w) -> assertFalse(Arrays.equals(before.get(name), w), name));
                    runs.add(after);
                    losses.add(values);
                }
            }
        }
        for (int i = 0; i < 3; i++) {
            assertEquals(losses.get(0).get(i), losses.get(1).get(i), 1e-5f);
        }
        runs.get(0).forEach((name, w) -> assertClose(w, runs.get(1).get(name), 1e-3, name));
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void saveAndLoad_modelOfDjl_sameOutputs(boolean tied, @TempDir Path folder) throws Exception {
        float[] expected;
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(tied));
            try (Trainer trainer = trainer(model, true)) {
                step(trainer, 0);
                expected =
                        logits(trainer.evaluate(new NDList(ids(trainer.getManager(), 1))))
                                .toFloatArray();
            }
            model.save(folder, "decoder");
        }
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(tied));
            model.load(folder, "decoder");
            try (Trainer trainer = trainer(model, true)) {
                NDArray ids = ids(trainer.getManager(), 1);
                assertArrayEquals(
                        expected, logits(trainer.evaluate(new NDList(ids))).toFloatArray());
                // A loaded model trains on, the shared weight included.
                float[] before = weights((MoeDecoder) model.getBlock()).values().iterator().next();
                step(trainer, 2);
                float[] after = weights((MoeDecoder) model.getBlock()).values().iterator().next();
                assertFalse(Arrays.equals(before, after));
            }
        }
    }

    @Test
    void saveAndLoad_withAdapters_sameOutputs(@TempDir Path folder) throws Exception {
        float[] expected;
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            MoeDecoder decoder = decoder(false);
            model.setBlock(decoder);
            try (Trainer trainer = trainer(model, true)) {
                attach(decoder, model.getNDManager());
                step(trainer, 0);
                expected =
                        logits(trainer.evaluate(new NDList(ids(trainer.getManager(), 1))))
                                .toFloatArray();
            }
            model.save(folder, "decoder");
        }
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            MoeDecoder decoder = decoder(false);
            decoder.moeBlocks().forEach(block -> block.experts().attachAdapters(2, 4));
            model.setBlock(decoder);
            model.load(folder, "decoder");
            try (Trainer trainer = trainer(model, true)) {
                NDArray ids = ids(trainer.getManager(), 1);
                assertArrayEquals(
                        expected, logits(trainer.evaluate(new NDList(ids))).toFloatArray());
            }
        }
    }

    private static void attach(MoeDecoder decoder, NDManager manager) {
        decoder.moeBlocks()
                .forEach(
                        block -> {
                            LoraExperts adapters = block.experts().attachAdapters(2, 4);
                            adapters.initialize(manager, DataType.FLOAT32, new Shape(-1, 8));
                        });
    }

    @Test
    void namedParameters_tiedUntiedAndAdapted_oneNameAParameter() {
        MoeDecoder untied = decoder(false);
        assertEquals(1 + 2 * (5 + 4) + 2, untied.checkpointParameters().size());
        assertEquals(Set.of(), untied.adapterParameters().keySet());
        assertTrue(untied.checkpointParameters().containsKey("lm_head.weight"));
        assertTrue(
                untied.checkpointParameters()
                        .containsKey("model.layers.1.mlp.experts.gate_up_proj"));
        untied.moeBlocks().forEach(block -> block.experts().attachAdapters(2, 4));
        assertEquals(8, untied.adapterParameters().size());
        assertAllNamed(untied);
        MoeDecoder tied = decoder(true);
        assertFalse(tied.checkpointParameters().containsKey("lm_head.weight"));
        assertAllNamed(tied);
    }

    private static void assertAllNamed(MoeDecoder decoder) {
        List<Parameter> all = decoder.getParameters().values();
        assertEquals(all.size(), decoder.namedParameters().size());
        assertEquals(Set.copyOf(all), Set.copyOf(decoder.namedParameters().values()));
    }

    @Test
    void forward_emptyBatch_emptyHiddenStates() {
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(false));
            try (Trainer trainer = trainer(model, true)) {
                NDArray ids = trainer.getManager().create(new Shape(0, 5), DataType.INT64);
                assertEquals(
                        new Shape(0, 5, 8), trainer.evaluate(new NDList(ids)).get(0).getShape());
            }
        }
    }

    @Test
    void forward_idsWithoutBatchAxis_clearError() {
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(false));
            try (Trainer trainer = trainer(model, true)) {
                NDArray ids = trainer.getManager().create(new long[] {1, 2});
                IllegalArgumentException e =
                        assertThrows(
                                IllegalArgumentException.class,
                                () -> trainer.evaluate(new NDList(ids)));
                assertTrue(e.getMessage().contains("[batch, sequence]"), e.getMessage());
            }
        }
    }

    @Test
    void train_twoHundredSteps_arraysConstantMemoryFlatAndLossFalls() {
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(false, 1, 8));
            try (Trainer trainer = trainer(model, true)) {
                float first = step(trainer, 0);
                int arrays = 0;
                int trainerArrays = 0;
                long memory = 0;
                float last = 0;
                for (int i = 1; i <= 200; i++) {
                    last = step(trainer, i % 3);
                    if (i == 5) {
                        arrays = model.getNDManager().getManagedArrays().size();
                        trainerArrays = trainer.getManager().getManagedArrays().size();
                    }
                    if (i == 50 && ProcessMemory.isKnown()) {
                        memory = ProcessMemory.nativeBytes();
                    }
                }
                assertEquals(arrays, model.getNDManager().getManagedArrays().size());
                assertEquals(trainerArrays, trainer.getManager().getManagedArrays().size());
                assertTrue(last < 0.5 * first, first + " -> " + last);
                Assumptions.assumeTrue(ProcessMemory.isKnown(), "memory is read from /proc");
                long growth = ProcessMemory.nativeBytes() - memory;
                assertTrue(growth <= 8 << 20, "grew by " + (growth >> 10) + " KiB");
            }
        }
    }
}
