package org.djlmoe.serving;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.ParameterStore;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.SplittableRandom;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.vocab.VocabProjection;

/** A small model with grouped KV heads for the tests of this package. */
final class ServedModel {

    static final int VOCAB = 40;
    static final int LAYERS = 3;
    static final int EXPERTS = 8;
    static final int TOP_K = 2;

    private ServedModel() {}

    static MoeConfig.Builder config() {
        return MoeConfig.builder()
                .setVocabSize(VOCAB)
                .setHiddenSize(16)
                .setIntermediateSize(12)
                .setNumLayers(LAYERS)
                .setNumHeads(4)
                .optNumKeyValueHeads(2)
                .setNumExperts(EXPERTS)
                .setTopK(TOP_K)
                .optRopeTheta(100)
                .optMaxPositionEmbeddings(2048)
                .optInitializerRange(0.3);
    }

    /** A model with random weights, balancing biases included. */
    static LanguageModel create(MoeConfig config) {
        LanguageModel model = LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, 7);
        SplittableRandom random = new SplittableRandom(5);
        for (MoeBlock block : model.decoder().moeBlocks()) {
            if (block.router().balanceBias() != null) {
                float[] bias = new float[config.numExperts()];
                for (int e = 0; e < bias.length; e++) {
                    bias[e] = (float) random.nextDouble(-0.2, 0.2);
                }
                try (NDArray values = model.manager().create(bias)) {
                    values.copyTo(block.router().balanceBias().getArray());
                }
            }
        }
        return model;
    }

    /** Saves the model with a seed's weights. */
    static Path save(Path folder) throws IOException {
        try (LanguageModel model = create(config().build())) {
            model.save(folder, SaveOptions.builder().build());
        }
        return folder;
    }

    static int[] tokens(int count, int seed) {
        SplittableRandom random = new SplittableRandom(seed);
        return random.ints(count, 0, VOCAB).toArray();
    }

    /** Logits of the full forward pass, [S, V]. */
    static float[][] fullForward(LanguageModel model, int[] tokens) {
        try (GradMode off = GradMode.off();
                NDManager scope = model.manager().newSubManager()) {
            NDArray ids =
                    scope.create(
                            Arrays.stream(tokens).asLongStream().toArray(),
                            new Shape(1, tokens.length));
            NDList out =
                    model.decoder()
                            .forward(new ParameterStore(scope, false), new NDList(ids), false);
            float[] flat = VocabProjection.logits(out.get(0), out.get(1), null).toFloatArray();
            float[][] rows = new float[tokens.length][];
            for (int i = 0; i < rows.length; i++) {
                rows[i] = Arrays.copyOfRange(flat, i * VOCAB, (i + 1) * VOCAB);
            }
            return rows;
        }
    }
}
