package org.djlmoe.checkpoint;

import java.util.Arrays;
import org.djlmoe.io.SafetensorsFolder;
import org.djlmoe.model.MoeConfig;

/**
 * Compares each size of a configuration with one tensor that has it as an axis. Tensors that are
 * not there or have other axes are the loader's matter, which compares all of them.
 */
final class SizeCheck {

    private static final String LAYERS = "model.layers.";
    private static final String FIRST = LAYERS + "0.";

    private final SafetensorsFolder source;
    private final MoeConfig config;

    SizeCheck(SafetensorsFolder source, MoeConfig config) {
        this.source = source;
        this.config = config;
    }

    void run() throws CheckpointException {
        layers();
        axis(HfCheckpoint.EMBEDDING, 2, 0, "vocab_size", config.vocabSize());
        axis(HfCheckpoint.EMBEDDING, 2, 1, "hidden_size", config.hiddenSize());
        axis(
                FIRST + "self_attn.q_proj.weight",
                2,
                0,
                "num_attention_heads x head_dim",
                (long) config.numHeads() * config.headDim());
        axis(
                FIRST + "self_attn.k_proj.weight",
                2,
                0,
                "num_key_value_heads x head_dim",
                (long) config.numKeyValueHeads() * config.headDim());
        String shared = FIRST + "mlp.shared_expert.down_proj.weight";
        long width = config.sharedExpertIntermediateSize();
        if (width > 0 && !source.names().contains(shared)) {
            throw wrong("shared_expert_intermediate_size", width, "the weights have none", 0);
        }
        axis(shared, 2, 1, "shared_expert_intermediate_size", width);
        // One expert stands for all of them, so that their number can be anything.
        for (Layout layout : Layout.values()) {
            long[] gate = {config.numExperts(), config.hiddenSize()};
            String router = layout.parts(FIRST + "mlp.gate.weight", gate).get(0).tensor();
            axis(router, 2, 0, "num_local_experts", config.numExperts());
            long[] down = {1, config.hiddenSize(), config.intermediateSize()};
            Layout.Part one = layout.parts(FIRST + "mlp.experts.down_proj", down).get(0);
            int axes = one.shape().length;
            axis(one.tensor(), axes, axes - 1, "intermediate_size", config.intermediateSize());
        }
    }

    private void layers() throws CheckpointException {
        long found =
                source.names().stream()
                        .filter(name -> name.startsWith(LAYERS))
                        .map(name -> name.substring(LAYERS.length()).split("\\.")[0])
                        .distinct()
                        .count();
        if (found > 0 && found != config.numLayers()) {
            throw wrong(
                    "num_hidden_layers", config.numLayers(), "the weights have " + found, found);
        }
    }

    private void axis(String tensor, int axes, int axis, String key, long configured)
            throws CheckpointException {
        if (!source.names().contains(tensor)) {
            return;
        }
        long[] shape = source.info(tensor).shape();
        if (shape.length == axes && shape[axis] != configured) {
            throw wrong(
                    key,
                    configured,
                    "tensor '" + tensor + "' has the shape " + Arrays.toString(shape),
                    shape[axis]);
        }
    }

    private CheckpointException wrong(String key, long configured, String found, long right) {
        return new CheckpointException(
                source.folder().resolve(HfCheckpoint.CONFIG_FILE)
                        + ": "
                        + key
                        + " is "
                        + configured
                        + ", but "
                        + found
                        + ": set it to "
                        + right
                        + ", or take the weights that belong to this file");
    }
}
