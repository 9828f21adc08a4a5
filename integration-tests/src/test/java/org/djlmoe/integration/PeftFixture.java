package org.djlmoe.integration;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Map;
import java.util.Random;
import org.djlmoe.kernel.HalfArrays;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.training.LanguageModel;

/**
 * An adapter with noise in all of it, and routers that have moved, made from a seed. Its files are
 * committed in {@code fixtures/peft/ours}, with the logits that PEFT computes from them.
 *
 * <p>Run {@code main} in this module's folder to write them anew, then {@code
 * reference/make_peft_fixtures.py}.
 */
final class PeftFixture {

    static final Path FIXTURES = Path.of("src/test/resources/fixtures");
    static final Path OURS = FIXTURES.resolve("peft/ours");
    static final Path BASE = FIXTURES.resolve("mixtral-tiny/f32");

    private PeftFixture() {}

    /** Attaches the adapter to the tiny Mixtral. */
    static void attach(LanguageModel model) {
        for (MoeBlock layer : model.decoder().moeBlocks()) {
            layer.experts()
                    .attachAdapters(4, 6)
                    .initialize(model.manager(), DataType.FLOAT32, new Shape(1));
        }
        Random random = new Random(5);
        for (Map.Entry<String, Parameter> entry : model.decoder().namedParameters().entrySet()) {
            boolean router = entry.getKey().endsWith("mlp.gate.weight");
            if (router || entry.getKey().contains(".lora_")) {
                NDArray array = entry.getValue().getArray();
                float[] values = router ? array.toFloatArray() : new float[(int) array.size()];
                for (int i = 0; i < values.length; i++) {
                    values[i] += (float) ((router ? 0.1 : 0.2) * random.nextGaussian());
                }
                try (NDArray filled = model.manager().create(values, array.getShape())) {
                    HalfArrays.copy(array, filled);
                }
            }
        }
    }

    /** Writes the adapter. */
    static void write(Path folder) throws IOException {
        try (LanguageModel model = LanguageModel.load(BASE, LanguageModel.Chunks.DEFAULT)) {
            attach(model);
            model.saveAdapter(folder, "mixtral-tiny", true);
        }
    }

    public static void main(String[] args) throws IOException {
        write(OURS);
    }
}
