package org.djlmoe.training;

import static org.djlmoe.reference.Numbers.assertClose;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.io.DType;
import org.djlmoe.kernel.HalfArrays;
import org.djlmoe.maskcoft.CoAdaptation;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** Adapters and routers train in F32 over experts that are frozen in BF16. */
class HalfExpertsTest {

    @TempDir private Path folder;
    private Path checkpoint;

    private static MoeConfig config() {
        return MoeConfig.builder()
                .setVocabSize(19)
                .setHiddenSize(16)
                .setIntermediateSize(12)
                .setNumLayers(2)
                .setNumHeads(2)
                .setNumExperts(5)
                .setTopK(2)
                .optInitializerRange(0.3)
                .build();
    }

    @BeforeEach
    void save() throws IOException {
        checkpoint = folder.resolve("bf16");
        try (LanguageModel model =
                LanguageModel.create(config(), LanguageModel.Chunks.DEFAULT, 5)) {
            model.save(checkpoint, SaveOptions.builder().optDtype(DType.BF16).build());
        }
    }

    private static PackedTokens text() {
        Random random = new Random(5);
        int[] stream = new int[16 * 60 + 1];
        for (int i = 1; i < stream.length; i++) {
            stream[i] = random.nextInt(10) == 0 ? random.nextInt(19) : (stream[i - 1] * 7 + 3) % 19;
        }
        return PackedTokens.of(stream, 16);
    }

    private LanguageModel load(boolean half) throws IOException {
        return half
                ? LanguageModel.loadHalf(checkpoint, LanguageModel.Chunks.DEFAULT)
                : LanguageModel.load(checkpoint, LanguageModel.Chunks.DEFAULT);
    }

    private static CoAdaptation stage(LanguageModel model, boolean half) {
        return CoAdaptation.builder()
                .setModel(model)
                .setBatches(text().batches(4, 1))
                .setSteps(30)
                .optAdapters(3, 6)
                .optLearningRate(1e-2)
                .optHalfExperts(half)
                .build();
    }

    private static float[] hidden(LanguageModel model) {
        try (NDManager scope = model.manager().newSubManager()) {
            long[] ids = new long[24];
            Arrays.setAll(ids, i -> (i * 7 + 3) % 19);
            return model.decoder()
                    .forward(
                            new ParameterStore(scope, false),
                            new NDList(scope.create(ids, new Shape(2, 12))),
                            false)
                    .get(0)
                    .toFloatArray();
        }
    }

    private static float[] wide(Parameter parameter) {
        NDArray array = parameter.getArray();
        if (!HalfArrays.isHalf(array)) {
            return array.toFloatArray();
        }
        try (NDArray wide = HalfArrays.widen(array.getManager(), array)) {
            return wide.toFloatArray();
        }
    }

    /** Shared experts are F32 beside experts in BF16, be they narrower or wider. */
    @Test
    void loadHalf_sharedExperts_hiddenStatesOfTheF32Model() throws IOException {
        for (int width : new int[] {5, 30}) {
            MoeConfig config =
                    config().toBuilder().optSharedExperts(width, true).optRoutingBias(true).build();
            try (LanguageModel model =
                    LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, 5)) {
                model.save(checkpoint, SaveOptions.builder().optDtype(DType.BF16).build());
            }
            try (LanguageModel half = load(true);
                    LanguageModel full = load(false)) {
                assertClose(hidden(full), hidden(half), 2e-2, "width " + width);
                float[] shared =
                        half.decoder()
                                .moeBlocks()
                                .get(0)
                                .sharedExperts()
                                .weights()
                                .get(0)
                                .getArray()
                                .toFloatArray();
                assertEquals(2 * width * 16, shared.length);
            }
        }
    }

    @Test
    void run_bf16Checkpoint_trainsLikeF32AndSavesTheBaseToTheBit() throws IOException {
        float[][] losses = new float[2][];
        for (int half = 0; half < 2; half++) {
            try (LanguageModel model = load(half == 1)) {
                losses[half] = stage(model, half == 1).run((step, steps, tokens, loss) -> {});
                boolean isHalf = model.decoder().moeBlocks().get(1).experts().hasHalfWeights();
                assertEquals(half == 1, isHalf);
                for (MoeBlock layer : model.decoder().moeBlocks()) {
                    boolean[] all = new boolean[5];
                    Arrays.fill(all, true);
                    assertArrayEquals(all, layer.experts().adapters().moved());
                    layer.experts().detachAdapters();
                }
                Path again = folder.resolve("again" + half);
                model.save(again, SaveOptions.builder().optDtype(DType.BF16).build());
                try (LanguageModel before = load(false);
                        LanguageModel after =
                                LanguageModel.load(again, LanguageModel.Chunks.DEFAULT)) {
                    Map<String, Parameter> saved = after.decoder().checkpointParameters();
                    before.decoder()
                            .checkpointParameters()
                            .forEach(
                                    (name, parameter) -> {
                                        boolean same =
                                                Arrays.equals(
                                                        wide(parameter), wide(saved.get(name)));
                                        assertEquals(!name.endsWith("mlp.gate.weight"), same, name);
                                    });
                }
            }
        }
        double first = losses[0][0];
        assertTrue(losses[1][29] < first - 0.1, Arrays.toString(losses[1]));
        for (int i = 0; i < 30; i++) {
            assertEquals(losses[0][i], losses[1][i], 0.02 * first, "step " + i);
        }
    }

    @Test
    void load_half_isTheSameAsNarrowingLater() throws IOException {
        try (LanguageModel direct = load(true);
                LanguageModel later = load(false)) {
            float[] f32 = hidden(later);
            later.narrowExperts();
            assertArrayEquals(hidden(later), hidden(direct));
            assertFalse(Arrays.equals(f32, hidden(direct)));
            double[] expected = new double[f32.length];
            Arrays.setAll(expected, i -> f32[i]);
            assertClose(expected, hidden(direct), 0.02, "BF16 products");
            later.widenExperts();
            assertArrayEquals(f32, hidden(later));
        }
    }

    /** B = 0: what is served before the first step is the base model to the bit. */
    @Test
    void attachAdapters_fresh_outputsOfTheModelWithout() throws IOException {
        try (LanguageModel model = load(true)) {
            float[] plain = hidden(model);
            for (MoeBlock layer : model.decoder().moeBlocks()) {
                layer.experts()
                        .attachAdapters(3, 6)
                        .initialize(model.manager(), DataType.FLOAT32, new Shape(1));
            }
            assertArrayEquals(plain, hidden(model));
        }
    }

    @Test
    void backward_halfExperts_gradientsOfAdaptersAndRoutersLikeF32() throws IOException {
        List<Map<String, float[]>> gradients = new ArrayList<>();
        for (boolean half : new boolean[] {false, true}) {
            try (LanguageModel model = load(half)) {
                attachNoise(model);
                model.train(path -> path.contains(".lora_") || path.endsWith("mlp.gate.weight"));
                Map<String, float[]> found = new LinkedHashMap<>();
                try (OffloadStreamAdamW optimizer =
                                OffloadStreamAdamW.builder()
                                        .setLearningRateTracker(Tracker.fixed(1e-3f))
                                        .build();
                        LanguageModelTrainer trainer =
                                new LanguageModelTrainer(model, optimizer, 1)) {
                    trainer.accumulate(text().batches(4, 1).at(0));
                    model.decoder()
                            .namedParameters()
                            .forEach(
                                    (name, parameter) -> {
                                        if (parameter.requiresGradient()) {
                                            try (NDArray g = parameter.getArray().getGradient()) {
                                                found.put(name, g.toFloatArray());
                                            }
                                        }
                                    });
                }
                gradients.add(found);
            }
        }
        assertEquals(2 * 5, gradients.get(0).size());
        gradients
                .get(0)
                .forEach(
                        (name, f32) -> {
                            double[] expected = new double[f32.length];
                            Arrays.setAll(expected, i -> f32[i]);
                            assertClose(expected, gradients.get(1).get(name), 0.05, name);
                        });
    }

    private static void attachNoise(LanguageModel model) {
        Random random = new Random(2);
        for (MoeBlock layer : model.decoder().moeBlocks()) {
            layer.experts()
                    .attachAdapters(3, 6)
                    .initialize(model.manager(), DataType.FLOAT32, new Shape(1));
            for (Parameter p : layer.experts().adapters().weights()) {
                float[] values = new float[(int) p.getShape().size()];
                for (int i = 0; i < values.length; i++) {
                    values[i] = (float) (0.2 * random.nextGaussian());
                }
                HalfArrays.copy(p.getArray(), model.manager().create(values, p.getShape()));
            }
        }
    }

    @Test
    void train_halfWeights_errorNamesThemAndNothingIsThawed() throws IOException {
        try (LanguageModel model = load(true)) {
            model.train(path -> false);
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, () -> model.train(path -> true));
            assertTrue(e.getMessage().contains("layers.0.mlp.experts.gate_up_proj"));
            assertEquals(0, model.trainableElements());
        }
    }

    @Test
    void merge_halfExperts_savedAsBf16IsTheSumRoundedOnce() throws IOException {
        Path narrow = folder.resolve("narrow");
        Path wide = folder.resolve("wide");
        SaveOptions bf16 = SaveOptions.builder().optDtype(DType.BF16).build();
        for (boolean half : new boolean[] {false, true}) {
            try (LanguageModel model = load(half)) {
                attachNoise(model);
                assertTrue(model.mergeAdapters() > 0);
                model.save(half ? narrow : wide, bf16);
            }
        }
        assertEquals(
                -1,
                Files.mismatch(
                        narrow.resolve("model.safetensors"), wide.resolve("model.safetensors")));
    }
}
