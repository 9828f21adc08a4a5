package org.djlmoe.integration;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
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
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.TensorInfo;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.vocab.RingDtpLoss;
import org.djlmoe.vocab.VocabProjection;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/**
 * Our decoder against Hugging Face transformers: logits, loss, routing and every parameter's
 * gradient of a tiny Mixtral, and of models that also have shared experts or balancing biases.
 */
class MixtralParityTest {

    private static final Path FIXTURES = Path.of("src/test/resources/fixtures/mixtral-tiny");

    /** How the gradient is collected, and how many tokens a MoE chunk has. */
    private enum Mode {
        TAPE,
        TAPE_CHUNKED,
        AUTOGRAD
    }

    @ParameterizedTest
    @CsvSource({
        "f32, reference, TAPE",
        "f32, reference, TAPE_CHUNKED",
        "f32, reference, AUTOGRAD",
        "per-expert, reference, TAPE",
        "fused, reference, TAPE",
        "sharded, reference, TAPE",
        "f32, reference-all-valid, TAPE",
        "window-config, reference-window, TAPE_CHUNKED",
        "window-config, reference-window, AUTOGRAD"
    })
    void forwardAndBackward_everyLayout_equalTransformers(
            String folder, String reference, Mode mode) throws IOException {
        compare(
                FIXTURES.resolve(folder).resolve("config.json"),
                FIXTURES.resolve(folder.equals("window-config") ? "f32" : folder),
                FIXTURES.resolve(reference + ".safetensors"),
                mode);
    }

    /** What a Mixtral does not have, computed by Qwen2-MoE and by ERNIE 4.5 of transformers. */
    @ParameterizedTest
    @CsvSource({
        "gated, TAPE",
        "gated, TAPE_CHUNKED",
        "gated, AUTOGRAD",
        "biased, TAPE",
        "biased, TAPE_CHUNKED",
        "biased, AUTOGRAD"
    })
    void forwardAndBackward_sharedExpertsOrBiases_equalTransformers(String folder, Mode mode)
            throws IOException {
        Path weights = FIXTURES.resolveSibling("shared-tiny").resolve(folder);
        compare(
                weights.resolve("config.json"),
                weights,
                weights.resolve("reference.safetensors"),
                mode);
    }

    private static void compare(Path config, Path weights, Path reference, Mode mode)
            throws IOException {
        MoeDecoder decoder =
                new MoeDecoder(MoeConfig.fromJson(config), mode == Mode.TAPE_CHUNKED ? 7 : 4096);
        Map<Integer, long[]> routing = new HashMap<>();
        for (int layer = 0; layer < decoder.moeBlocks().size(); layer++) {
            int l = layer;
            decoder.moeBlocks()
                    .get(layer)
                    .router()
                    .setObserver(ids -> routing.put(l, ids.toLongArray()));
        }
        Loss loss = RingDtpLoss.builder().build();
        try (Model model = Model.newInstance("parity", "PyTorch");
                SafetensorsReader expected = SafetensorsReader.open(reference)) {
            model.setBlock(decoder);
            DefaultTrainingConfig training =
                    new DefaultTrainingConfig(loss).optDevices(new Device[] {Device.cpu()});
            try (Trainer trainer =
                    mode == Mode.AUTOGRAD
                            ? model.newTrainer(training)
                            : new BoundedTrainer(model, training)) {
                trainer.initialize(new Shape(2, 11));
                HfCheckpoint.load(weights, decoder.checkpointParameters());
                NDManager manager = trainer.getManager();
                NDArray ids = manager.create(longs(expected, "input_ids"), new Shape(2, 11));
                NDArray targets = manager.create(longs(expected, "target_ids"), new Shape(2, 11));

                NDList out = trainer.evaluate(new NDList(ids));
                NDArray logits = VocabProjection.logits(out.get(0), out.get(1), null);
                assertClose(floats(expected, "logits"), logits.toFloatArray(), 1e-5, "logits");
                routing.forEach(
                        (layer, chosen) ->
                                assertArrayEquals(longsOf(expected, "routing." + layer), chosen));
                assertEquals(2, routing.size());

                try (GradientCollector collector = trainer.newGradientCollector()) {
                    NDArray value =
                            loss.evaluate(new NDList(targets), trainer.forward(new NDList(ids)));
                    assertClose(
                            floats(expected, "loss"), new float[] {value.getFloat()}, 1e-6, "loss");
                    collector.backward(value);
                }
                for (Map.Entry<String, Parameter> p : decoder.checkpointParameters().entrySet()) {
                    if (p.getKey().endsWith("e_score_correction_bias")) {
                        continue; // it is moved by loads, not by a gradient
                    }
                    try (NDArray gradient = p.getValue().getArray().getGradient()) {
                        assertClose(
                                floats(expected, "grad." + p.getKey()),
                                gradient.toFloatArray(),
                                1e-4,
                                p.getKey());
                    }
                }
            }
        }
    }

    @ParameterizedTest
    @ValueSource(strings = {"f16", "bf16"})
    void forward_halfPrecisionFile_equalTransformersOnTheWidenedWeights(String folder)
            throws IOException {
        Path path = FIXTURES.resolve(folder);
        MoeDecoder decoder = new MoeDecoder(MoeConfig.fromJson(path.resolve("config.json")));
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                SafetensorsReader expected =
                        SafetensorsReader.open(path.resolve("reference.safetensors"))) {
            decoder.initialize(manager, DataType.FLOAT32, new Shape(2, 11));
            HfCheckpoint.load(path, decoder.checkpointParameters());
            long[] input;
            try (SafetensorsReader inputs =
                    SafetensorsReader.open(FIXTURES.resolve("reference.safetensors"))) {
                input = longs(inputs, "input_ids");
            }
            NDList out =
                    decoder.forward(
                            new ai.djl.training.ParameterStore(manager, false),
                            new NDList(manager.create(input, new Shape(2, 11))),
                            false);
            NDArray logits = VocabProjection.logits(out.get(0), out.get(1), null);
            assertClose(floats(expected, "logits"), logits.toFloatArray(), 1e-5, folder);
        }
        assertTrue(Engine.getAllEngines().contains("PyTorch"));
    }

    /** ||a - b|| / ||b|| over the whole tensor. */
    private static void assertClose(float[] expected, float[] actual, double bound, String name) {
        assertEquals(expected.length, actual.length, name);
        double difference = 0;
        double norm = 0;
        for (int i = 0; i < expected.length; i++) {
            difference += Math.pow((double) expected[i] - actual[i], 2);
            norm += Math.pow(expected[i], 2);
        }
        double error = Math.sqrt(difference / norm);
        assertTrue(error <= bound, name + ": relative error " + error + " > " + bound);
    }

    private static float[] floats(SafetensorsReader file, String name) throws IOException {
        FloatBuffer values = FloatBuffer.allocate((int) elements(file.info(name)));
        file.readF32(name, 0, values);
        return values.array();
    }

    private static long[] longs(SafetensorsReader file, String name) throws IOException {
        TensorInfo info = file.info(name);
        ByteBuffer bytes =
                ByteBuffer.allocate((int) elements(info) * 8).order(ByteOrder.LITTLE_ENDIAN);
        file.readBytes(name, 0, bytes);
        bytes.flip();
        long[] values = new long[(int) elements(info)];
        bytes.asLongBuffer().get(values);
        return values;
    }

    private static long[] longsOf(SafetensorsReader file, String name) {
        try {
            return longs(file, name);
        } catch (IOException e) {
            throw new AssertionError(e);
        }
    }

    private static long elements(TensorInfo info) {
        return Arrays.stream(info.shape()).reduce(1, (a, b) -> a * b);
    }
}
