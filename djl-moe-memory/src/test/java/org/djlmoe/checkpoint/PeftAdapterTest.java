package org.djlmoe.checkpoint;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Random;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;
import org.djlmoe.kernel.HalfArrays;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.training.LanguageModel;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/**
 * Hidden width = 2 x expert width, so that neither B nor the weights tell by their shapes what they
 * are; three experts, rank 2. Against PEFT itself: PeftParityTest of the integration tests.
 */
class PeftAdapterTest {

    private static final int EXPERTS = 3;
    private static final int HIDDEN = 8;
    private static final int INNER = 4;
    private static final String AT = "base_model.model.model.layers.";

    @TempDir Path folder;

    /** What goes into a file, keyed {@code name:axis,axis}. */
    private final Map<String, float[]> tensors = new LinkedHashMap<>();

    private static MoeConfig config() {
        return MoeConfig.builder()
                .setVocabSize(40)
                .setHiddenSize(HIDDEN)
                .setIntermediateSize(INNER)
                .setNumLayers(2)
                .setNumHeads(2)
                .setNumExperts(EXPERTS)
                .setTopK(2)
                .optTieWordEmbeddings(true)
                .build();
    }

    private static LanguageModel model(long seed) {
        return LanguageModel.create(config(), LanguageModel.Chunks.DEFAULT, seed);
    }

    private static void attachNoise(LanguageModel model) {
        for (MoeBlock layer : model.decoder().moeBlocks()) {
            layer.experts()
                    .attachAdapters(2, 3)
                    .initialize(model.manager(), DataType.FLOAT32, new Shape(1));
        }
        Random random = new Random(6);
        for (Parameter p : model.decoder().adapterParameters().values()) {
            set(model, p, noise(random, p.getShape().size()));
        }
    }

    private static void set(LanguageModel model, Parameter p, float[] values) {
        HalfArrays.copy(p.getArray(), model.manager().create(values, p.getShape()));
    }

    private static float[] noise(Random random, long n) {
        float[] values = new float[(int) n];
        for (int i = 0; i < n; i++) {
            values[i] = (float) random.nextGaussian();
        }
        return values;
    }

    private static Map<String, float[]> adapters(LanguageModel model) {
        return values(model.decoder().adapterParameters());
    }

    private static Map<String, float[]> base(LanguageModel model) {
        return values(model.decoder().checkpointParameters());
    }

    private static Map<String, float[]> values(Map<String, Parameter> parameters) {
        Map<String, float[]> values = new LinkedHashMap<>();
        parameters.forEach((name, p) -> values.put(name, p.getArray().toFloatArray()));
        return values;
    }

    private static void assertSame(Map<String, float[]> expected, Map<String, float[]> actual) {
        assertEquals(expected.keySet(), actual.keySet());
        expected.forEach((name, v) -> assertArrayEquals(v, actual.get(name), name));
    }

    @Test
    void save_thenLoad_sameAdaptersAndRouters() throws IOException {
        try (LanguageModel model = model(3);
                LanguageModel other = model(4)) {
            attachNoise(model);
            model.saveAdapter(folder, "base", true);
            Map<String, float[]> before = base(other);
            PeftAdapter read = other.attachAdapter(folder);
            assertEquals(2, read.rank());
            assertEquals(3, read.alpha());
            assertTrue(read.hasRouters());
            assertSame(adapters(model), adapters(other));
            Map<String, float[]> expected = base(model);
            before.forEach(
                    (name, v) -> expected.computeIfPresent(name, (n, w) -> isRouter(n) ? w : v));
            assertSame(expected, base(other));
            assertThrows(IllegalStateException.class, () -> other.attachAdapter(folder));
            assertSame(adapters(model), adapters(other));
        }
    }

    private static boolean isRouter(String name) {
        return name.endsWith("mlp.gate.weight");
    }

    /** The expert is the outer axis of A and the inner one of B. */
    @Test
    void save_layout_isPefts() throws IOException {
        try (LanguageModel model = model(3)) {
            attachNoise(model);
            model.saveAdapter(folder, null, false);
            float[] a = adapters(model).get("model.layers.1.mlp.experts.down_proj.lora_A");
            float[] b = adapters(model).get("model.layers.1.mlp.experts.gate_up_proj.lora_B");
            try (SafetensorsReader file = written()) {
                String at = AT + "1.mlp.experts.";
                assertArrayEquals(
                        new long[] {EXPERTS * 2, INNER}, file.info(at + "lora_A.weight").shape());
                assertArrayEquals(a, read(file, at + "lora_A.weight"));
                float[] found = read(file, at + "base_layer.lora_B.weight");
                for (int e = 0; e < EXPERTS; e++) {
                    for (int o = 0; o < 2 * INNER; o++) {
                        for (int j = 0; j < 2; j++) {
                            assertEquals(
                                    b[(e * 2 * INNER + o) * 2 + j],
                                    found[o * 2 * EXPERTS + j * EXPERTS + e]);
                        }
                    }
                }
            }
        }
    }

    private SafetensorsReader written() throws IOException {
        return SafetensorsReader.open(folder.resolve(PeftAdapter.WEIGHTS_FILE));
    }

    private static float[] read(SafetensorsReader file, String tensor) throws IOException {
        FloatBuffer values = FloatBuffer.allocate((int) file.info(tensor).elements());
        file.readF32(tensor, 0, values);
        return values.array();
    }

    /** With a tied head, too: neither it nor any other weight of the base is in the file. */
    @Test
    void save_tiedHead_fileHoldsAdaptersAloneAndMergeTouchesExpertsAlone() throws IOException {
        try (LanguageModel model = model(3)) {
            attachNoise(model);
            Map<String, float[]> before = base(model);
            model.saveAdapter(folder, null, false);
            long numbers = 2L * EXPERTS * 2 * (HIDDEN + 2 * INNER + INNER + HIDDEN);
            try (SafetensorsReader file = written()) {
                assertEquals(8, file.names().size());
                assertTrue(file.names().stream().allMatch(n -> n.contains(".lora_")));
            }
            long size = Files.size(folder.resolve(PeftAdapter.WEIGHTS_FILE));
            assertTrue(size >= 4 * numbers && size < 4 * numbers + 2000, "size " + size);
            model.mergeAdapters();
            base(model)
                    .forEach(
                            (name, v) ->
                                    assertEquals(
                                            name.contains(".experts."),
                                            !Arrays.equals(before.get(name), v),
                                            name));
        }
    }

    @Test
    void saveOrMerge_noAdapters_clearError() {
        try (LanguageModel model = model(3)) {
            assertThrows(IllegalStateException.class, () -> model.saveAdapter(folder, null, false));
            assertThrows(IllegalStateException.class, model::mergeAdapters);
            assertThrows(IllegalStateException.class, model::mergeAdaptersForNow);
        }
    }

    @Test
    void merge_infinityInOneLayer_errorNamesTheTensorAndNoLayerChanges() {
        try (LanguageModel model = model(3)) {
            attachNoise(model);
            Map<String, float[]> before = base(model);
            String name = "model.layers.1.mlp.experts.down_proj.lora_A";
            Parameter bad = model.decoder().adapterParameters().get(name);
            float[] values = bad.getArray().toFloatArray();
            values[1] = Float.NEGATIVE_INFINITY;
            set(model, bad, values);
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, model::mergeAdapters);
            assertTrue(e.getMessage().contains(name), e.getMessage());
            assertThrows(IllegalStateException.class, model::mergeAdaptersForNow);
            assertSame(before, base(model));
        }
    }

    /** Experts with ranks and scales of their own, and some without adapters. */
    @Test
    void load_singleExpertsOfDifferentRanksAndScales_deltasOfTheFile() throws IOException {
        Random random = new Random(8);
        single(random, "0.block_sparse_moe.experts.0.w1", 1, HIDDEN, INNER);
        single(random, "0.block_sparse_moe.experts.0.w3", 2, HIDDEN, INNER);
        single(random, "0.block_sparse_moe.experts.2.w3", 2, HIDDEN, INNER);
        single(random, "1.block_sparse_moe.experts.1.w2", 4, INNER, HIDDEN);
        write(
                "\"r\": 2, \"lora_alpha\": 6, \"target_modules\": [\"w1\", \"w2\", \"w3\"],"
                        + " \"rank_pattern\": {\"w1\": 1, \"experts.1.w2\": 4},"
                        + " \"alpha_pattern\": {\"experts.1.w2\": 2}");
        try (LanguageModel model = model(3)) {
            PeftAdapter adapter = model.attachAdapter(folder);
            assertEquals(4, adapter.rank());
            assertFalse(adapter.hasRouters());
            double[] gateUp = new double[EXPERTS * 2 * INNER * HIDDEN];
            add(gateUp, 0, "0.block_sparse_moe.experts.0.w1", 1, HIDDEN, 6);
            add(gateUp, INNER * HIDDEN, "0.block_sparse_moe.experts.0.w3", 2, HIDDEN, 3);
            int third = 2 * 2 * INNER * HIDDEN + INNER * HIDDEN;
            add(gateUp, third, "0.block_sparse_moe.experts.2.w3", 2, HIDDEN, 3);
            assertDelta(gateUp, model, 0, "gate_up_proj", HIDDEN);
            double[] down = new double[EXPERTS * HIDDEN * INNER];
            assertDelta(down, model, 0, "down_proj", INNER);
            add(down, HIDDEN * INNER, "1.block_sparse_moe.experts.1.w2", 4, INNER, 0.5);
            assertDelta(down, model, 1, "down_proj", INNER);
        }
    }

    private void single(Random random, String name, int rank, int in, int out) {
        tensors.put(
                AT + name + ".lora_A.weight:" + rank + "," + in, noise(random, (long) rank * in));
        tensors.put(
                AT + name + ".lora_B.weight:" + out + "," + rank, noise(random, (long) out * rank));
    }

    private float[] tensor(String start) {
        return tensors.entrySet().stream()
                .filter(e -> e.getKey().startsWith(start))
                .findFirst()
                .orElseThrow()
                .getValue();
    }

    private void add(double[] sum, int offset, String name, int rank, int in, double scale) {
        float[] a = tensor(AT + name + ".lora_A");
        float[] b = tensor(AT + name + ".lora_B");
        for (int o = 0; o < b.length / rank; o++) {
            for (int i = 0; i < in; i++) {
                for (int j = 0; j < rank; j++) {
                    sum[offset + o * in + i] += scale * b[o * rank + j] * a[j * in + i];
                }
            }
        }
    }

    private static void assertDelta(
            double[] expected, LanguageModel model, int layer, String parameter, int in) {
        String name = "model.layers." + layer + ".mlp.experts." + parameter;
        float[] a = adapters(model).get(name + ".lora_A");
        float[] b = adapters(model).get(name + ".lora_B");
        double scale = model.decoder().moeBlocks().get(layer).experts().adapterScale();
        int rank = 4;
        int rows = b.length / rank;
        int out = rows / EXPERTS;
        for (int row = 0; row < rows; row++) {
            for (int i = 0; i < in; i++) {
                double sum = 0;
                for (int j = 0; j < rank; j++) {
                    sum += scale * b[row * rank + j] * a[(row / out * rank + j) * in + i];
                }
                assertEquals(expected[row * in + i], sum, 1e-5);
            }
        }
    }

    private void write(String entries) throws IOException {
        Files.writeString(
                folder.resolve(PeftAdapter.CONFIG_FILE),
                "{\"peft_type\": \"LORA\", " + entries + "}");
        SafetensorsWriter.Builder plan = SafetensorsWriter.builder();
        for (String key : tensors.keySet()) {
            String[] parts = key.split(":");
            String[] axes = parts[1].split(",");
            plan.addTensor(parts[0], DType.F32, Long.parseLong(axes[0]), Long.parseLong(axes[1]));
        }
        try (SafetensorsWriter writer = plan.build(folder.resolve(PeftAdapter.WEIGHTS_FILE))) {
            for (Map.Entry<String, float[]> e : tensors.entrySet()) {
                writer.writeF32(e.getKey().split(":")[0], FloatBuffer.wrap(e.getValue()));
            }
            writer.commit();
        }
    }

    /** Stacked tensors of one parameter, which may be either: out is H = 2 I for both. */
    private void stacked(int in) {
        Random random = new Random(1);
        for (int layer = 0; layer < 2; layer++) {
            String at = AT + layer + ".mlp.experts.lora_";
            tensors.put(at + "A.weight:" + EXPERTS * 2 + "," + in, noise(random, 6L * in));
            tensors.put(at + "B.weight:" + HIDDEN + "," + EXPERTS * 2, noise(random, 6L * HIDDEN));
        }
    }

    @Test
    void load_oneParameterNamed_itsTensorsHaveNoBaseLayer() throws IOException {
        stacked(HIDDEN);
        write("\"r\": 2, \"lora_alpha\": 4, \"target_parameters\": [\"gate_up_proj\"]");
        try (LanguageModel model = model(3)) {
            model.attachAdapter(folder);
            assertArrayEquals(
                    tensor(AT + "1.mlp.experts.lora_A"),
                    adapters(model).get("model.layers.1.mlp.experts.gate_up_proj.lora_A"));
            float[] none = adapters(model).get("model.layers.1.mlp.experts.down_proj.lora_B");
            assertArrayEquals(new float[none.length], none);
        }
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            value = {
                "r: 2, lora_alpha: 4 | target_parameters",
                "r: 2, lora_alpha: 4, target_parameters: [`q_proj.weight`] | target_parameters",
                "r: 2, lora_alpha: 4, target_parameters: [`gate_up_proj`, `down_proj`]"
                        + " | base_layer.lora_A",
                "r: 3, lora_alpha: 4, target_parameters: [`gate_up_proj`] | [9, 8]",
                "r: 2, lora_alpha: 4, target_parameters: [`down_proj`] | [6, 4]",
                "r: 0, lora_alpha: 4, target_parameters: [`down_proj`] | 1 or more",
                "lora_alpha: 4 | lacks r",
                "r: 4 | lora_alpha",
                "r: 2, lora_alpha: 4, use_dora: true | use_dora",
                "r: 2, lora_alpha: 4, bias: `all` | bias",
                "r: [], lora_alpha: 4 | another type"
            })
    void open_configThatDoesNotFit_errorNamesFolderAndFault(String entries, String expected)
            throws IOException {
        stacked(HIDDEN);
        write(entries.replaceAll("(\\w+):", "\"$1\":").replace('`', '"'));
        CheckpointException e =
                assertThrows(CheckpointException.class, () -> PeftAdapter.open(folder, config()));
        assertTrue(e.getMessage().contains(expected), e.getMessage());
        assertTrue(e.getMessage().contains(folder.toString()), e.getMessage());
    }

    @ParameterizedTest
    @CsvSource({
        "0.self_attn.q_proj.lora_A.weight, 2, 8, something other",
        "0.mlp.gate.lora_A.weight, 2, 8, something other",
        "7.mlp.experts.0.w1.lora_A.weight, 2, 8, beyond the model's 2",
        "0.mlp.experts.3.w1.lora_A.weight, 2, 8, beyond the model's 3",
        "0.mlp.experts.0.w1.lora_A.weight, 2, 8, lora_B",
        "0.mlp.experts.0.w1.lora_B.weight, 4, 2, lora_A",
        "0.mlp.experts.0.w1.lora_A.weight, 2, 5, '[2, 5]'",
        "0.mlp.experts.0.w1.lora_A.weight, 0, 8, '[0, 8]'",
        "99999999999.mlp.experts.0.w1.lora_A.weight, 2, 8, something other",
        "0.mlp.gate.weight, 3, 8, no adapter of experts",
        "0.mlp.gate.weight, 8, 3, '[8, 3]'"
    })
    void open_tensorThatDoesNotFit_errorSaysHow(String name, int rows, int columns, String expected)
            throws IOException {
        tensors.put(AT + name + ":" + rows + "," + columns, new float[rows * columns]);
        write("\"r\": 2, \"lora_alpha\": 4, \"target_modules\": [\"w1\"]");
        CheckpointException e =
                assertThrows(CheckpointException.class, () -> PeftAdapter.open(folder, config()));
        assertTrue(e.getMessage().contains(expected), e.getMessage());
    }

    @Test
    void open_routersOfSomeLayersOnly_errorNamesTheMissing() throws IOException {
        single(new Random(1), "0.mlp.experts.0.w1", 2, HIDDEN, INNER);
        tensors.put(AT + "0.mlp.gate.weight:3,8", new float[24]);
        write("\"r\": 2, \"lora_alpha\": 4");
        CheckpointException e =
                assertThrows(CheckpointException.class, () -> PeftAdapter.open(folder, config()));
        assertTrue(e.getMessage().contains("layers.1.mlp.gate.weight"), e.getMessage());
    }

    @Test
    void open_filesMissingOrOfAnotherKind_errorNamesThem() throws IOException {
        assertThrows(NoSuchFileException.class, () -> PeftAdapter.open(folder, config()));
        Path config = folder.resolve(PeftAdapter.CONFIG_FILE);
        Files.writeString(config, "{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 4}");
        NoSuchFileException e =
                assertThrows(NoSuchFileException.class, () -> PeftAdapter.open(folder, config()));
        assertTrue(e.getMessage().contains("safe_serialization"), e.getMessage());
        for (String text : new String[] {"{\"peft_type\": \"IA3\"}", "{\"r\": ", "[]"}) {
            Files.writeString(config, text);
            assertThrows(CheckpointException.class, () -> PeftAdapter.open(folder, config()), text);
        }
    }

    @Test
    void attachAdapter_filesMissing_modelIsAsBefore() {
        try (LanguageModel model = model(3)) {
            assertThrows(IOException.class, () -> model.attachAdapter(folder));
            assertTrue(model.decoder().adapterParameters().isEmpty());
        }
    }
}
