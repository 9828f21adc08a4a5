package org.djlmoe.checkpoint;

import java.util.ArrayList;
import java.util.List;

/**
 * How the expert weights of a layer lie on disk. In memory they are always stacked: {@code
 * mlp.experts.gate_up_proj} [E, 2I, H], the gate's rows first, and {@code mlp.experts.down_proj}
 * [E, H, I].
 *
 * <p>Shared experts and balancing biases have one form, whatever the layout: {@code
 * mlp.shared_expert.{gate,up,down}_proj.weight} and {@code mlp.shared_expert_gate.weight} as in
 * Qwen2-MoE, {@code mlp.gate.e_score_correction_bias} as in DeepSeek-V3.
 */
public enum Layout {
    /**
     * {@code block_sparse_moe.experts.M.{w1,w3,w2}.weight} (gate, up, down) and {@code
     * block_sparse_moe.gate.weight}: Mixtral as published. Every version of transformers reads it.
     */
    MIXTRAL(".block_sparse_moe.", "w1", "w3", "w2"),

    /**
     * {@code mlp.experts.M.{gate,up,down}_proj.weight} and {@code mlp.gate.weight}, as other
     * families name them. transformers does not read it under the model type {@code mixtral}.
     */
    PER_EXPERT(".mlp.", "gate_proj", "up_proj", "down_proj"),

    /** As in memory, one tensor for all experts of a layer. transformers 5 and later read it. */
    FUSED(".mlp.", null, null, null);

    private static final String GATE = ".mlp.gate.weight";
    private static final String GATE_UP = ".mlp.experts.gate_up_proj";
    private static final String DOWN = ".mlp.experts.down_proj";
    private static final String SHARED = ".mlp.shared_expert.";

    private final String module;
    private final String gate;
    private final String up;
    private final String down;

    Layout(String module, String gate, String up, String down) {
        this.module = module;
        this.gate = gate;
        this.up = up;
        this.down = down;
    }

    /**
     * A tensor on disk and the run of a flattened parameter that it fills.
     *
     * @param tensor its name on disk
     * @param shape its shape on disk
     * @param offset index of its first element within the flattened parameter
     */
    record Part(String tensor, long[] shape, long offset) {

        long elements() {
            long count = 1;
            for (long axis : shape) {
                count *= axis;
            }
            return count;
        }
    }

    /**
     * Lists the tensors that together are one parameter, in the order of its elements.
     *
     * @param parameter its name in the stacked layout
     * @param shape its shape
     */
    List<Part> parts(String parameter, long[] shape) {
        if (parameter.endsWith(GATE)) {
            String layer = parameter.substring(0, parameter.length() - GATE.length());
            return List.of(new Part(layer + module + "gate.weight", shape, 0));
        }
        if (parameter.contains(SHARED)) {
            String module = parameter.substring(0, parameter.lastIndexOf('.') + 1);
            return parameter.endsWith("down_proj")
                    ? matrices(parameter, shape, module, "down_proj")
                    : matrices(parameter, shape, module, "gate_proj", "up_proj");
        }
        if (this == FUSED || !isExperts(parameter)) {
            return List.of(new Part(parameter, shape, 0));
        }
        if (shape.length != 3) {
            throw new IllegalArgumentException(
                    "Parameter '" + parameter + "' must have the axes [experts, out, in]");
        }
        String suffix = parameter.endsWith(DOWN) ? DOWN : GATE_UP;
        String layer = parameter.substring(0, parameter.length() - suffix.length());
        String prefix = layer + module + "experts.";
        return suffix.equals(DOWN)
                ? matrices(parameter, shape, prefix + "%d.", down)
                : matrices(parameter, shape, prefix + "%d.", gate, up);
    }

    /** The matrices of each expert in turn, in modules whose names may have the expert in them. */
    private static List<Part> matrices(
            String parameter, long[] shape, String module, String... names) {
        if (shape[1] % names.length != 0) {
            throw new IllegalArgumentException(
                    "Parameter '"
                            + parameter
                            + "' must have as many gate rows as up rows, not "
                            + shape[1]
                            + " in all");
        }
        long[] matrix = {shape[1] / names.length, shape[2]};
        List<Part> parts = new ArrayList<>();
        long offset = 0;
        for (long expert = 0; expert < shape[0]; expert++) {
            for (String name : names) {
                String tensor = module.replace("%d", Long.toString(expert)) + name + ".weight";
                parts.add(new Part(tensor, matrix, offset));
                offset += matrix[0] * matrix[1];
            }
        }
        return parts;
    }

    private static boolean isExperts(String parameter) {
        return parameter.endsWith(GATE_UP) || parameter.endsWith(DOWN);
    }
}
