package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import java.util.List;

/**
 * Decoding a few tokens at a time: attention over a cache of keys and values, and experts that come
 * one by one.
 *
 * <p>Rows are [B S, H], sequence after sequence, all at the same position. Nothing is recorded for
 * differentiation. An expert may be F32 or BF16; the products of a BF16 expert are computed in BF16
 * with F32 accumulation, as in {@link ExpertKernels}.
 */
public final class DecodeKernels {

    private static final TorchKernels KERNELS =
            TorchKernels.load(DecodeKernels.class, "norm.py", "attention.py", "decode.py");

    private DecodeKernels() {}

    /**
     * Fills the tables of rotary angles.
     *
     * @param theta base of the angles
     * @param cos [P, d / 2], a row a position
     * @param sin [P, d / 2]
     */
    public static void rotaryTables(double theta, NDArray cos, NDArray sin) {
        KERNELS.run("rotary_tables", theta, cos, sin);
    }

    /**
     * Moves the last positions of a cache to its front.
     *
     * @param keys [B, kvHeads, C, d]
     * @param values [B, kvHeads, C, d]
     * @param used how many positions are filled
     * @param keep how many of them, the last ones, remain
     */
    public static void shift(NDArray keys, NDArray values, int used, int keep) {
        KERNELS.run("cache_shift", keys, values, used, keep);
    }

    /**
     * What a layer has seen so far.
     *
     * @param keys [B, kvHeads, C, d]
     * @param values [B, kvHeads, C, d]
     * @param cos [P, d / 2]
     * @param sin [P, d / 2]
     * @param used how many of the C positions are filled
     * @param position place of the first new token in its text, below P
     */
    public record Past(
            NDArray keys, NDArray values, NDArray cos, NDArray sin, int used, int position) {}

    /**
     * Runs the attention half of a layer on S new tokens a sequence: {@code y = x +
     * attention(norm(x)) wo'}. Their keys and values are appended to the cache.
     *
     * <p>The scores of S &gt; 1 new tokens take S (used + S) values for the mask.
     *
     * @param x [B S, H]
     * @param sequence S
     * @param weights norm, q, k, v, o as in {@link AttentionKernels}
     * @param settings the layer's settings
     * @param past keys and values before these tokens; {@code used + S} must not exceed C
     * @param y [B S, H], filled
     */
    public static void attention(
            NDArray x,
            int sequence,
            List<NDArray> weights,
            AttentionKernels.Settings settings,
            Past past,
            NDArray y) {
        long[] dims = {
            sequence, settings.heads(), settings.kvHeads(), settings.headDim(), settings.window()
        };
        KERNELS.run(
                "attention_cached",
                x,
                weights,
                settings.eps(),
                dims,
                past.cos(),
                past.sin(),
                past.keys(),
                past.values(),
                past.used(),
                past.position(),
                y);
    }

    /**
     * Runs one expert on the routes that go to it.
     *
     * @param h normed rows [N, H]
     * @param gateUp [2 I, H], the rows of gate before those of up
     * @param down [H, I]
     * @param routes the routes, row * k + choice
     * @param topK k
     * @param out [N k, H]; the rows {@code routes} are filled, without the combine weights
     */
    public static void expert(
            NDArray h, NDArray gateUp, NDArray down, long[] routes, int topK, NDArray out) {
        KERNELS.run("expert_routes", h, gateUp, down, routes, topK, out);
    }

    /**
     * Adds the shared experts' output to rows.
     *
     * @param h normed rows [N, H]
     * @param gateUp [1, 2 S, H], the rows of gate before those of up
     * @param down [1, H, S]
     * @param gate [1, H], or empty for ungated ones
     * @param x [N, H], changed
     */
    public static void addShared(NDArray h, NDArray gateUp, NDArray down, NDArray gate, NDArray x) {
        KERNELS.run("add_shared", h, gateUp, down, gate, x);
    }

    /**
     * Adds each row's weighted experts to it. The order of the sum is that of the choices,
     * whichever expert was computed first.
     *
     * @param x [N, H]
     * @param combine [N, k]
     * @param out [N k, H] from {@link #expert}
     * @param y [N, H], filled
     */
    public static void combine(NDArray x, NDArray combine, NDArray out, NDArray y) {
        KERNELS.run("combine_routes", x, combine, out, y);
    }

    /**
     * Computes logits behind the final norm.
     *
     * @param manager the owner of the result
     * @param x [B S, H]
     * @param sequence S
     * @param gamma the final norm's weight [H]
     * @param eps of the norm
     * @param head the output projection [V, H]
     * @param every whether all tokens' logits are wanted, or the last one's of each sequence
     * @return [B S, V] or [B, V]
     */
    public static NDArray logits(
            NDManager manager,
            NDArray x,
            int sequence,
            NDArray gamma,
            double eps,
            NDArray head,
            boolean every) {
        return KERNELS.call(manager, "logits", x, sequence, gamma, eps, head, every).head();
    }

    /**
     * Makes memory for one expert on the CPU.
     *
     * @param manager the owner
     * @param elements how many weights
     * @param half whether they are BF16; then DJL does not know the array's type, and nothing but
     *     kernels and {@code toByteBuffer(true)} may touch it
     * @return a flat array of zeros
     */
    public static NDArray expertMemory(NDManager manager, long elements, boolean half) {
        return KERNELS.call(manager, "expert_memory", elements, half).head();
    }

    /**
     * Returns the two weights of an expert as views of its memory.
     *
     * @param manager the owner of the views
     * @param memory from {@link #expertMemory}, of 3 I H elements
     * @param inner I
     * @param hidden H
     * @return gate and up [2 I, H], down [H, I]
     */
    public static NDList expertViews(NDManager manager, NDArray memory, int inner, int hidden) {
        return KERNELS.call(manager, "expert_views", memory, inner, hidden);
    }
}
