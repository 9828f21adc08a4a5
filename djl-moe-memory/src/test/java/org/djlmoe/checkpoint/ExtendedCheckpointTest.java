package org.djlmoe.checkpoint;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsFolder;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

/** Checkpoints with what a Mixtral does not have: shared experts and balancing biases. */
class ExtendedCheckpointTest {

    private static final String LAYER = "model.layers.1.";
    private static final String BIAS = LAYER + "mlp.gate.e_score_correction_bias";
    private static final int EXPERTS = 5;

    @TempDir private Path folder;

    private static MoeConfig.Builder config() {
        return MoeConfig.builder()
                .setVocabSize(11)
                .setHiddenSize(8)
                .setIntermediateSize(6)
                .setNumLayers(2)
                .setNumHeads(2)
                .setNumExperts(EXPERTS)
                .setTopK(2)
                .optInitializerRange(0.3);
    }

    private static MoeConfig everything() {
        return config().optSharedExperts(7, true).optRoutingBias(true).build();
    }

    /** A decoder whose weights are all different, balancing biases included. */
    private static MoeDecoder decoder(MoeConfig config, NDManager manager, int seed) {
        Engine.getEngine("PyTorch").setRandomSeed(seed);
        MoeDecoder decoder = new MoeDecoder(config);
        decoder.initialize(manager, DataType.FLOAT32, new Shape(1, 1));
        for (int layer = 0; layer < config.numLayers(); layer++) {
            Parameter bias = decoder.moeBlocks().get(layer).router().balanceBias();
            if (bias != null) {
                float[] values = new float[EXPERTS];
                for (int e = 0; e < EXPERTS; e++) {
                    // 0.001 is no number of F32, let alone of BF16
                    values[e] = seed + layer + 0.001f * (e - 2);
                }
                try (NDArray array = manager.create(values)) {
                    array.copyTo(bias.getArray());
                }
            }
        }
        return decoder;
    }

    private static void assertSameBits(
            Map<String, Parameter> expected, Map<String, Parameter> actual) {
        assertEquals(List.copyOf(expected.keySet()), List.copyOf(actual.keySet()));
        expected.forEach(
                (name, parameter) ->
                        assertArrayEquals(
                                bits(parameter), bits(actual.get(name)), "parameter " + name));
    }

    private static int[] bits(Parameter parameter) {
        float[] values = parameter.getArray().toFloatArray();
        int[] bits = new int[values.length];
        for (int i = 0; i < bits.length; i++) {
            bits[i] = Float.floatToRawIntBits(values[i]);
        }
        return bits;
    }

    private static SaveOptions options(Layout layout) {
        return SaveOptions.builder().optLayout(layout).build();
    }

    @ParameterizedTest
    @CsvSource({
        // layout, S, gated, bias, bytes a file
        "MIXTRAL, 7, true, true, 1000000",
        "PER_EXPERT, 7, true, true, 1500",
        "FUSED, 7, true, true, 1500",
        "FUSED, 3, false, false, 1000000",
        "MIXTRAL, 12, false, true, 1000000",
        "PER_EXPERT, 0, false, true, 1000000",
        "MIXTRAL, 1, true, false, 700",
    })
    void saveAndLoad_anyForm_everyBitAndTheConfigurationComeBack(
            Layout layout, int shared, boolean gated, boolean bias, long fileBytes)
            throws IOException {
        MoeConfig config = config().optSharedExperts(shared, gated).optRoutingBias(bias).build();
        try (NDManager manager = NDManager.newBaseManager("PyTorch")) {
            MoeDecoder saved = decoder(config, manager, 1);
            HfCheckpoint.save(
                    folder,
                    config,
                    saved.checkpointParameters(),
                    SaveOptions.builder().optLayout(layout).optMaxShardBytes(fileBytes).build());
            MoeConfig read = MoeConfig.fromJson(folder.resolve("config.json"));
            assertEquals(config, read);
            HfCheckpoint.check(folder, read);
            assertEquals(
                    List.copyOf(HfCheckpoint.parameterShapes(read).keySet()),
                    List.copyOf(saved.checkpointParameters().keySet()));
            MoeDecoder loaded = decoder(read, manager, 2);
            HfCheckpoint.load(folder, loaded.checkpointParameters());
            assertSameBits(saved.checkpointParameters(), loaded.checkpointParameters());
        }
    }

    @ParameterizedTest
    @EnumSource(Layout.class)
    void save_anyLayout_sharedExpertsAndBiasesUnderTheirOneName(Layout layout) throws IOException {
        try (NDManager manager = NDManager.newBaseManager("PyTorch")) {
            MoeDecoder decoder = decoder(everything(), manager, 1);
            HfCheckpoint.save(
                    folder, everything(), decoder.checkpointParameters(), options(layout));
        }
        try (SafetensorsFolder files = SafetensorsFolder.open(folder)) {
            String shared = LAYER + "mlp.shared_expert.";
            Map<String, long[]> expected =
                    Map.of(
                            shared + "gate_proj.weight",
                            new long[] {7, 8},
                            shared + "up_proj.weight",
                            new long[] {7, 8},
                            shared + "down_proj.weight",
                            new long[] {8, 7},
                            LAYER + "mlp.shared_expert_gate.weight",
                            new long[] {1, 8},
                            BIAS,
                            new long[] {5});
            Set<String> names = files.names();
            for (Map.Entry<String, long[]> e : expected.entrySet()) {
                assertTrue(names.contains(e.getKey()), () -> e.getKey() + " in " + names);
                assertArrayEquals(e.getValue(), files.info(e.getKey()).shape(), e.getKey());
            }
            assertEquals(
                    expected.size(),
                    names.stream()
                            .filter(n -> n.startsWith(LAYER))
                            .filter(n -> n.contains("shared") || n.contains("bias"))
                            .count());
        }
    }

    @Test
    void save_bf16_biasesStayF32() throws IOException {
        try (NDManager manager = NDManager.newBaseManager("PyTorch")) {
            MoeDecoder saved = decoder(everything(), manager, 1);
            HfCheckpoint.save(
                    folder,
                    everything(),
                    saved.checkpointParameters(),
                    SaveOptions.builder().optDtype(DType.BF16).build());
            try (SafetensorsFolder files = SafetensorsFolder.open(folder)) {
                assertEquals(DType.F32, files.info(BIAS).dtype());
                assertEquals(
                        DType.BF16, files.info(LAYER + "mlp.shared_expert_gate.weight").dtype());
            }
            MoeDecoder loaded = decoder(everything(), manager, 2);
            HfCheckpoint.load(folder, loaded.checkpointParameters());
            assertArrayEquals(
                    bits(saved.checkpointParameters().get(BIAS)),
                    bits(loaded.checkpointParameters().get(BIAS)));
        }
    }

    @Test
    void save_configurationThatLacksThem_refused() {
        try (NDManager manager = NDManager.newBaseManager("PyTorch")) {
            Map<String, Parameter> parameters =
                    decoder(everything(), manager, 1).checkpointParameters();
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () ->
                                    HfCheckpoint.save(
                                            folder,
                                            config().build(),
                                            parameters,
                                            options(Layout.FUSED)));
            assertTrue(e.getMessage().contains("e_score_correction_bias"), e.getMessage());
            assertFalse(folder.resolve("config.json").toFile().exists());
        }
    }

    /** What the folder has and the model does not, and the other way round, by name. */
    @Test
    void load_folderOfAnotherForm_refusedByNameAndParametersUnchanged() throws IOException {
        List<MoeConfig> forms =
                List.of(
                        config().build(),
                        config().optRoutingBias(true).build(),
                        config().optSharedExperts(7, false).build(),
                        config().optSharedExperts(7, true).build(),
                        config().optSharedExperts(6, true).build());
        List<String> parts =
                List.of("", "e_score_correction_bias", "shared_expert", "shared_expert", "shape");
        try (NDManager manager = NDManager.newBaseManager("PyTorch")) {
            for (MoeConfig saved : forms) {
                Path own = folder.resolve("form" + forms.indexOf(saved));
                HfCheckpoint.save(
                        own,
                        saved,
                        decoder(saved, manager, 1).checkpointParameters(),
                        options(Layout.MIXTRAL));
                for (MoeConfig other : forms) {
                    if (other.equals(saved)) {
                        continue;
                    }
                    Map<String, Parameter> target =
                            decoder(other, manager, 2).checkpointParameters();
                    List<int[]> before = new ArrayList<>();
                    target.values().forEach(p -> before.add(bits(p)));
                    CheckpointException e =
                            assertThrows(
                                    CheckpointException.class,
                                    () -> HfCheckpoint.load(own, target),
                                    () -> saved + " into " + other);
                    String names =
                            parts.get(forms.indexOf(saved)) + parts.get(forms.indexOf(other));
                    assertTrue(
                            names.contains("e_score") && e.getMessage().contains("e_score")
                                    || e.getMessage().contains("shared_expert"),
                            e.getMessage());
                    int i = 0;
                    for (Parameter p : target.values()) {
                        assertArrayEquals(before.get(i++), bits(p));
                    }
                }
            }
        }
    }

    @ParameterizedTest
    @CsvSource({"0", "6", "70"})
    void check_widthOfSharedExpertsWrong_namesTheKey(int width) throws IOException {
        MoeConfig right = config().optSharedExperts(7, false).build();
        try (NDManager manager = NDManager.newBaseManager("PyTorch")) {
            HfCheckpoint.save(
                    folder,
                    right,
                    decoder(right, manager, 1).checkpointParameters(),
                    options(Layout.FUSED));
        }
        MoeConfig wrong = config().optSharedExperts(width, false).build();
        CheckpointException e =
                assertThrows(CheckpointException.class, () -> HfCheckpoint.check(folder, wrong));
        assertTrue(
                e.getMessage().contains("shared_expert_intermediate_size is " + width),
                e.getMessage());
        assertTrue(e.getMessage().contains("set it to 7"), e.getMessage());
    }
}
