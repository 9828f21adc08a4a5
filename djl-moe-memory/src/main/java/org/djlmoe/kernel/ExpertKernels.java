package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import java.util.List;

/**
 * A Mixture-of-Experts layer chunk by chunk: norm, router, SwiGLU experts over stacked weights,
 * residual.
 *
 * <p>Rows are x [N, H]; a chunk is the rows {@code start, start + step, ...}. The experts of a
 * chunk run one after the other on blocks of their rows, in an {@link ExpertScratch} whose size the
 * router cannot change. Besides that, a few numbers a route and, for the rows of a block, a few a
 * router's output are allocated. Backward repeats the gate and up projections but not the down
 * projection, whose output nobody needs: the gradient of a combine weight is the inner product of
 * the activation and its own gradient.
 *
 * <p>{@link #forwardRows} and {@link #backwardRows} run the experts alone, on rows that are grouped
 * already.
 *
 * <p>Weights come as a list in the order of {@link Weights}; an absent one (no norm, no adapter) is
 * {@link TorchKernels#nothing}, and so is the gradient of a frozen one. Gradients are added to in
 * place, in F32. Expert weights may be BF16; their products are then computed in BF16 with F32
 * accumulation. Router and norm always compute in F32.
 */
public final class ExpertKernels {

    private static final TorchKernels KERNELS =
            TorchKernels.load(ExpertKernels.class, "norm.py", "expert.py");

    private ExpertKernels() {}

    /** The order of a layer's weights and of their gradients. */
    public enum Weights {
        /** [H]. */
        NORM,
        /** [E, H]. */
        ROUTER,
        /** [E, 2 I, H], the rows of gate before those of up. */
        GATE_UP,
        /** [E, H, I]. */
        DOWN,
        /** [E, r, H]. */
        GATE_UP_A,
        /** [E, 2 I, r]. */
        GATE_UP_B,
        /** [E, r, I]. */
        DOWN_A,
        /** [E, H, r]. */
        DOWN_B
    }

    /**
     * How experts are ranked.
     *
     * @param bias F64 [E], added to the router's scores in the ranking alone (negative infinity
     *     forbids an expert), or {@link TorchKernels#nothing}
     * @param byProbability whether the bias is added to probabilities and not to logits
     * @param protect how many of the router's own first choices no bias displaces
     */
    public record Selection(NDArray bias, boolean byProbability, int protect) {}

    /**
     * What a layer looks like beside its weights.
     *
     * @param topK experts a row
     * @param eps of the norm
     * @param adapterScale factor of the adapters' products, alpha / r
     * @param residual whether the rows themselves are added to the output
     * @param renormalize whether the combine weights of a row are divided by their sum
     */
    public record Settings(
            int topK, double eps, double adapterScale, boolean residual, boolean renormalize) {}

    /**
     * Chooses the experts of a chunk. Ties go to the lower index.
     *
     * @param x [N, H]
     * @param start first row of the chunk
     * @param step distance of its rows
     * @param weights the layer's weights
     * @param settings the layer's settings
     * @param selection how experts are ranked
     * @param ids INT64 [N, topK], the chunk's rows are filled
     * @param combine [N, topK], the chunk's rows are filled
     * @param scratch of any kind, of any number of rows
     */
    public static void route(
            NDArray x,
            int start,
            int step,
            List<NDArray> weights,
            Settings settings,
            Selection selection,
            NDArray ids,
            NDArray combine,
            ExpertScratch scratch) {
        KERNELS.run(
                "route",
                x,
                start,
                step,
                weights,
                settings.eps(),
                selection.bias(),
                selection.byProbability(),
                selection.protect(),
                settings.renormalize(),
                ids,
                combine,
                scratch.block(),
                scratch.wide());
    }

    /**
     * Runs the experts of a chunk.
     *
     * @param x [N, H]
     * @param start first row of the chunk
     * @param step distance of its rows
     * @param weights the layer's weights
     * @param settings the layer's settings
     * @param ids INT64 [N, topK] from {@link #route}
     * @param combine [N, topK] from {@link #route}
     * @param scratch of a forward pass, of any number of rows
     * @param y [N, H], the chunk's rows are filled
     */
    public static void forward(
            NDArray x,
            int start,
            int step,
            List<NDArray> weights,
            Settings settings,
            NDArray ids,
            NDArray combine,
            ExpertScratch scratch,
            NDArray y) {
        KERNELS.run(
                "experts_forward",
                x,
                start,
                step,
                weights,
                settings.eps(),
                settings.adapterScale(),
                settings.residual(),
                ids,
                combine,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                y);
    }

    /**
     * Backward of a chunk, through experts, router and norm.
     *
     * @param x [N, H]
     * @param start first row of the chunk
     * @param step distance of its rows
     * @param g gradient of the output [N, H]
     * @param weights the layer's weights
     * @param gradients their gradients, added to
     * @param settings the layer's settings
     * @param balance gradient of every row's router probabilities under a balance loss, from {@link
     *     #balanceGradient}, or {@link TorchKernels#nothing}
     * @param ids INT64 [N, topK] of the forward pass
     * @param combine [N, topK] of the forward pass
     * @param scratch of a backward pass, of any number of rows
     * @param dx [N, H], the chunk's rows are filled
     */
    public static void backward(
            NDArray x,
            int start,
            int step,
            NDArray g,
            List<NDArray> weights,
            List<NDArray> gradients,
            Settings settings,
            NDArray balance,
            NDArray ids,
            NDArray combine,
            ExpertScratch scratch,
            NDArray dx) {
        KERNELS.run(
                "experts_backward",
                x,
                start,
                step,
                g,
                weights,
                gradients,
                settings.eps(),
                settings.adapterScale(),
                settings.residual(),
                settings.renormalize(),
                balance,
                ids,
                combine,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                dx);
    }

    /**
     * Runs the experts on rows that are grouped by expert, in place: row = combine weight *
     * expert(row).
     *
     * @param rows [R, H], the rows of expert 0 first; replaced by the outputs
     * @param counts rows of each expert, [E], together R
     * @param combine [R, 1]
     * @param weights the layer's weights; norm and router are not used
     * @param settings the layer's settings; the adapters' scale is used
     * @param scratch of a forward pass, of any number of rows
     */
    public static void forwardRows(
            NDArray rows,
            long[] counts,
            NDArray combine,
            List<NDArray> weights,
            Settings settings,
            ExpertScratch scratch) {
        KERNELS.run(
                "grouped_forward",
                rows,
                counts,
                combine,
                weights,
                settings.adapterScale(),
                scratch.block(),
                scratch.wide(),
                scratch.half());
    }

    /**
     * Backward of {@link #forwardRows}, in place.
     *
     * @param rows [R, H], what went into the forward pass; overwritten
     * @param g gradient of the outputs [R, H]; replaced by that of the rows
     * @param counts rows of each expert, [E], together R
     * @param combine [R, 1]
     * @param dcombine [R], filled with the gradient of the combine weights
     * @param weights the layer's weights
     * @param gradients their gradients, added to from {@link Weights#GATE_UP} on
     * @param settings the layer's settings; the adapters' scale is used
     * @param scratch of a backward pass, of any number of rows
     */
    public static void backwardRows(
            NDArray rows,
            NDArray g,
            long[] counts,
            NDArray combine,
            NDArray dcombine,
            List<NDArray> weights,
            List<NDArray> gradients,
            Settings settings,
            ExpertScratch scratch) {
        KERNELS.run(
                "grouped_backward",
                rows,
                g,
                counts,
                combine,
                dcombine,
                weights,
                gradients,
                settings.adapterScale(),
                scratch.block(),
                scratch.wide(),
                scratch.half());
    }

    /** Two arrays of as many numbers, the second in the experts' half precision or empty. */
    static NDList scratch(NDManager manager, List<NDArray> weights, long wide, long half) {
        return KERNELS.call(manager, "experts_scratch", weights, wide, half);
    }

    /**
     * The gradient that the balance loss {@code coefficient * E * sum f_e P_e} has in every row's
     * router probabilities, where f_e is the number of routes to expert e a row and P_e its mean
     * probability.
     *
     * @param manager the owner of the result
     * @param ids INT64 [N, topK]
     * @param experts E
     * @param coefficient of the loss
     * @return [E]
     */
    public static NDArray balanceGradient(
            NDManager manager, NDArray ids, int experts, double coefficient) {
        return KERNELS.call(manager, "balance_gradient", ids, experts, coefficient).head();
    }

    /**
     * Chooses experts in a way that autograd can follow: the combine weights have a gradient.
     *
     * @param h normed rows [N, H]
     * @param router [E, H]
     * @param settings the layer's settings
     * @param selection how experts are ranked
     * @return ids INT64 [N, topK] and combine weights [N, topK]
     */
    public static NDList routePlain(
            NDArray h, NDArray router, Settings settings, Selection selection) {
        NDManager manager = h.getManager();
        try (NDArray numbers =
                manager.create(
                        new double[] {
                            selection.byProbability() ? 1 : 0,
                            selection.protect(),
                            settings.renormalize() ? 1 : 0,
                            settings.topK()
                        })) {
            return KERNELS.record(manager, "router_plain", h, router, selection.bias(), numbers);
        }
    }

    /**
     * Runs the experts in a way that autograd can follow. Not bounded.
     *
     * @param h normed rows [N, H]
     * @param ids INT64 [N, topK]
     * @param combine [N, topK]
     * @param weights the weights from {@link Weights#GATE_UP} on
     * @param settings the layer's settings
     * @return [N, H]
     */
    public static NDArray expertsPlain(
            NDArray h, NDArray ids, NDArray combine, List<NDArray> weights, Settings settings) {
        NDManager manager = h.getManager();
        try (NDArray scale = manager.create(settings.adapterScale())) {
            return KERNELS.record(manager, "experts_plain", h, ids, combine, weights, scale).head();
        }
    }

    /**
     * Adds an adapter's product to the stacked weight, one expert at a time: {@code w += scale B
     * A}, summed in F32 and cast once to the weight's type.
     *
     * @param w [E, out, in], F32 or BF16, changed in place
     * @param a [E, r, in]
     * @param b [E, out, r]
     * @param scale alpha / r
     * @return how many elements of the weight changed, or -1 if some are no longer finite
     */
    public static long merge(NDArray w, NDArray a, NDArray b, double scale) {
        return (long) KERNELS.callDouble("merge_adapter", w, a, b, scale);
    }
}
