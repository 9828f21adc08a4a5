package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import java.util.List;

/**
 * The attention half of a decoder layer, norm and residual included: {@code y = x +
 * attention(norm(x)) wo'}.
 *
 * <p>Memory is linear in the tokens: the scores are formed block by block (flash attention), and a
 * sliding window is cut into blocks of its own width, each against itself and the block before. On
 * the CPU the flash operators are called directly, with the KV heads expanded first, because
 * PyTorch 2.7 leaves its fast path for fewer KV heads than query heads. Elsewhere {@code
 * torch.scaled_dot_product_attention} chooses.
 *
 * <p>Weights come as lists in the order norm [H], q [heads d, H], k [kvHeads d, H], v [kvHeads d,
 * H], o [H, heads d]; lists of gradients likewise, with {@link TorchKernels#nothing} in place of a
 * frozen weight's.
 */
public final class AttentionKernels {

    private static final TorchKernels KERNELS =
            TorchKernels.load(AttentionKernels.class, "norm.py", "attention.py");

    private AttentionKernels() {}

    /**
     * What an attention layer looks like.
     *
     * @param heads query heads
     * @param kvHeads key and value heads, a divisor of {@code heads}
     * @param headDim width of a head, even
     * @param window how many tokens a token sees, itself included; 0 for all before it
     * @param ropeTheta base of the rotary angles
     * @param eps of the norm
     */
    public record Settings(
            int heads, int kvHeads, int headDim, int window, double ropeTheta, double eps) {

        private long[] dims(int sequence) {
            return new long[] {sequence, heads, kvHeads, headDim, window};
        }

        private NDArray numbers(NDManager manager, int sequence) {
            return manager.create(
                    new double[] {sequence, heads, kvHeads, headDim, window, eps, ropeTheta});
        }
    }

    /**
     * Runs the layer.
     *
     * @param x [B S, H], sequence after sequence
     * @param sequence S
     * @param weights the five weights
     * @param settings the layer's settings
     * @param y [B S, H], filled
     */
    public static void forward(
            NDArray x, int sequence, List<NDArray> weights, Settings settings, NDArray y) {
        KERNELS.run(
                "attention_forward",
                x,
                weights,
                settings.eps(),
                settings.dims(sequence),
                settings.ropeTheta(),
                y);
    }

    /**
     * Backward of {@link #forward}; repeats the forward as far as the attended values.
     *
     * @param x [B S, H]
     * @param sequence S
     * @param g gradient of the output [B S, H]
     * @param weights the five weights
     * @param gradients their gradients, added to
     * @param settings the layer's settings
     * @param dx [B S, H], filled
     */
    public static void backward(
            NDArray x,
            int sequence,
            NDArray g,
            List<NDArray> weights,
            List<NDArray> gradients,
            Settings settings,
            NDArray dx) {
        if (x.getDevice().isGpu()) {
            backwardGeneric(x, sequence, g, weights, gradients, settings, dx);
            return;
        }
        KERNELS.run(
                "attention_backward",
                x,
                g,
                weights,
                gradients,
                settings.eps(),
                settings.dims(sequence),
                settings.ropeTheta(),
                dx);
    }

    /**
     * As {@link #backward}, for devices that lack the CPU's direct operators. Works on the CPU as
     * well.
     */
    static void backwardGeneric(
            NDArray x,
            int sequence,
            NDArray g,
            List<NDArray> weights,
            List<NDArray> gradients,
            Settings settings,
            NDArray dx) {
        NDManager manager = x.getManager();
        try (NDArray numbers = settings.numbers(manager, sequence)) {
            KERNELS.record(
                            manager,
                            "attention_backward_generic",
                            x,
                            g,
                            weights,
                            gradients,
                            numbers,
                            dx)
                    .close();
        }
    }

    /**
     * {@link #forward} that autograd can follow.
     *
     * @param x [B S, H]
     * @param sequence S
     * @param weights the five weights
     * @param settings the layer's settings
     * @return [B S, H]
     */
    public static NDArray plain(NDArray x, int sequence, List<NDArray> weights, Settings settings) {
        NDManager manager = x.getManager();
        try (NDArray numbers = settings.numbers(manager, sequence)) {
            return KERNELS.record(manager, "attention_plain", x, weights, numbers).head();
        }
    }
}
