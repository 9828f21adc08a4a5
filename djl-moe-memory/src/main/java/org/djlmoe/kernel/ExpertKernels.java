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
            TorchKernels.load(ExpertKernels.class, "norm.py", "expert.py", "mask.py");

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
        DOWN_B,
        /** [1, 2 S, H], the rows of gate before those of up. */
        SHARED_GATE_UP,
        /** [1, H, S]. */
        SHARED_DOWN,
        /** [1, H]. */
        SHARED_GATE
    }

    /**
     * How experts are ranked.
     *
     * @param bias F64 [E], added to the router's scores in the ranking alone (negative infinity
     *     forbids an expert), or {@link TorchKernels#nothing}
     * @param byProbability whether the bias is added to probabilities and not to logits
     * @param protect how many of the router's own first choices no bias displaces
     * @param balance F64 [E], added to the probabilities in the ranking alone, those of the logits
     *     with the bias if that goes to the logits; or {@link TorchKernels#nothing}
     * @param outside F32 [E], negative infinity for the experts that the softmax of the combine
     *     weights leaves out and 0 for the others, or {@link TorchKernels#nothing}
     */
    public record Selection(
            NDArray bias, boolean byProbability, int protect, NDArray balance, NDArray outside) {

        /**
         * A ranking without balance, with combine weights from the softmax over all experts.
         *
         * @param bias F64 [E] or {@link TorchKernels#nothing}
         * @param byProbability whether the bias is added to probabilities and not to logits
         * @param protect how many of the router's own first choices no bias displaces
         */
        public Selection(NDArray bias, boolean byProbability, int protect) {
            this(bias, byProbability, protect, TorchKernels.nothing(), TorchKernels.nothing());
        }
    }

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
     * @param mask [N], 0 for the rows that do not count in the sums, or {@link
     *     TorchKernels#nothing}: all count
     * @param sums F64 [2 E + 2], added to: the sum of every expert's probabilities, its routes, the
     *     sum of squared log-sum-exps, the rows; or {@link TorchKernels#nothing}
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
            NDArray mask,
            NDArray sums,
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
                selection.balance(),
                selection.outside(),
                settings.renormalize(),
                mask,
                sums,
                ids,
                combine,
                scratch.block(),
                scratch.wide());
    }

    /**
     * Computes the router's logits, where they are looked at or somebody else chooses the experts.
     *
     * @param x [N, H]
     * @param weights the layer's weights
     * @param settings the layer's settings
     * @param scratch of any kind, of any number of rows
     * @param logits [N, E], filled
     */
    public static void routerLogits(
            NDArray x,
            List<NDArray> weights,
            Settings settings,
            ExpertScratch scratch,
            NDArray logits) {
        KERNELS.run(
                "router_logits",
                x,
                weights,
                settings.eps(),
                scratch.block(),
                scratch.wide(),
                logits);
    }

    /**
     * Computes the combine weights, from the softmax over all experts, of rows whose experts are
     * chosen.
     *
     * @param logits [N, E] from {@link #routerLogits}
     * @param settings the layer's settings
     * @param mask [N], 0 for the rows that do not count in the router's losses, or {@link
     *     TorchKernels#nothing}
     * @param sums as in {@link #route}
     * @param ids INT64 [N, topK]
     * @param combine [N, topK], filled
     */
    public static void combine(
            NDArray logits,
            Settings settings,
            NDArray mask,
            NDArray sums,
            NDArray ids,
            NDArray combine) {
        KERNELS.run("combine_chosen", logits, settings.renormalize(), mask, sums, ids, combine);
    }

    /**
     * Runs the experts of a chunk, the shared ones too.
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
     * @param losses from {@link #routerLossGradients}, or {@link TorchKernels#nothing}
     * @param mask [N], 0 for the rows that do not count in the router's losses, or {@link
     *     TorchKernels#nothing}
     * @param outside of the forward pass's {@link Selection}
     * @param ids INT64 [N, topK] of the forward pass
     * @param combine [N, topK] of the forward pass
     * @param scratch of a backward pass, of any number of rows
     * @param dx [N, H], the chunk's rows are filled
     * @param dcombine gradient of the combine weights [N, topK], the chunk's rows are filled, or
     *     {@link TorchKernels#nothing}
     */
    public static void backward(
            NDArray x,
            int start,
            int step,
            NDArray g,
            List<NDArray> weights,
            List<NDArray> gradients,
            Settings settings,
            NDArray losses,
            NDArray mask,
            NDArray outside,
            NDArray ids,
            NDArray combine,
            ExpertScratch scratch,
            NDArray dx,
            NDArray dcombine) {
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
                losses,
                mask,
                outside,
                ids,
                combine,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                dx,
                dcombine);
    }

    /**
     * Adds the gradient of the factors that the combine weights carry under a mask that is learnt
     * straight through: for a chosen expert w (dw - sum over the row of w dw) where the weights are
     * divided by their sum, w dw where not; for any other exactly nothing.
     *
     * @param ids INT64 [N, topK] of the forward pass
     * @param combine [N, topK] of the forward pass
     * @param dcombine [N, topK] from {@link #backward}
     * @param settings the layer's settings
     * @param sums F64 [E], added to
     */
    public static void maskGradient(
            NDArray ids, NDArray combine, NDArray dcombine, Settings settings, NDArray sums) {
        KERNELS.run("mask_gradient", ids, combine, dcombine, settings.renormalize(), sums);
    }

    /**
     * Adds that gradient for dropped experts: on every row the best of them run to learn what they
     * would have added, though they take no part in the output.
     *
     * @param x [N, H]
     * @param g gradient of the output [N, H]
     * @param weights the layer's weights
     * @param settings the layer's settings
     * @param selection the forward pass's, a hard mask
     * @param extra how many dropped experts run a row, 1 to the number of dropped ones
     * @param ids INT64 [N, topK] of the forward pass
     * @param combine [N, topK] of the forward pass
     * @param dcombine [N, topK] from {@link #backward}
     * @param scratch of a backward pass, of any number of rows
     * @param sums F64 [E], added to
     */
    public static void excludedGradient(
            NDArray x,
            NDArray g,
            List<NDArray> weights,
            Settings settings,
            Selection selection,
            int extra,
            NDArray ids,
            NDArray combine,
            NDArray dcombine,
            ExpertScratch scratch,
            NDArray sums) {
        KERNELS.run(
                "excluded_gradient",
                x,
                g,
                weights,
                settings.eps(),
                settings.adapterScale(),
                selection.bias(),
                selection.outside(),
                extra,
                settings.renormalize(),
                ids,
                combine,
                dcombine,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                sums);
    }

    /**
     * Passes the gradient of the factors on to the mask logits: {@code gradient += slopes * sums}.
     *
     * @param sums F64 [E], d loss / d factor
     * @param slopes F64 [E], d factor / d logit
     * @param gradient [E], added to
     */
    public static void maskLogitsGradient(NDArray sums, NDArray slopes, NDArray gradient) {
        KERNELS.run("mask_logits_gradient", sums, slopes, gradient);
    }

    /**
     * Adds what the shared experts make of all rows.
     *
     * @param x [N, H]
     * @param weights the layer's weights
     * @param settings the layer's settings
     * @param scratch of a forward pass, of any number of rows
     * @param y [N, H], added to
     */
    public static void sharedForward(
            NDArray x, List<NDArray> weights, Settings settings, ExpertScratch scratch, NDArray y) {
        KERNELS.run(
                "shared_forward",
                x,
                0,
                1,
                weights,
                settings.eps(),
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                y);
    }

    /**
     * What {@link #backward} does behind the experts: shared experts, router, norm and residual, of
     * all rows.
     *
     * @param x [N, H]
     * @param g gradient of the output [N, H]
     * @param weights the layer's weights
     * @param gradients their gradients, added to
     * @param settings the layer's settings
     * @param losses from {@link #routerLossGradients}, or {@link TorchKernels#nothing}
     * @param mask [N], 0 for the rows that do not count in the router's losses, or {@link
     *     TorchKernels#nothing}
     * @param outside of the forward pass's {@link Selection}
     * @param ids INT64 [N, topK] of the forward pass
     * @param dcombine [N, topK], the gradient of the combine weights
     * @param scratch of a backward pass, of any number of rows
     * @param dx [N, H], the gradient of the normed rows that the experts gave; replaced by that of
     *     the rows
     */
    public static void routerBackward(
            NDArray x,
            NDArray g,
            List<NDArray> weights,
            List<NDArray> gradients,
            Settings settings,
            NDArray losses,
            NDArray mask,
            NDArray outside,
            NDArray ids,
            NDArray dcombine,
            ExpertScratch scratch,
            NDArray dx) {
        KERNELS.run(
                "shared_backward",
                x,
                0,
                1,
                g,
                weights,
                gradients,
                settings.eps(),
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                dx);
        KERNELS.run(
                "router_backward",
                x,
                0,
                1,
                g,
                weights,
                gradients,
                settings.eps(),
                settings.residual(),
                settings.renormalize(),
                losses,
                mask,
                outside,
                ids,
                dcombine,
                scratch.block(),
                scratch.wide(),
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
     * Computes the router's losses from the sums of all chunks: the balance loss {@code E * sum f_e
     * P_e}, where f_e is the number of routes to expert e a row and P_e its mean probability, and
     * the z-loss, the mean of the squared log-sum-exp of the logits. Without rows both are 0.
     *
     * @param sums of {@link #route}
     * @param balance (), filled
     * @param z (), filled
     */
    public static void routerLosses(NDArray sums, NDArray balance, NDArray z) {
        KERNELS.run("router_losses", sums, balance, z);
    }

    /**
     * The gradients that {@code balance * (balance loss) + z * (z-loss)} has in the probabilities
     * of every row that counts and in its squared log-sum-exp.
     *
     * @param manager the owner of the result
     * @param sums of {@link #route}
     * @param balance factor of the balance loss
     * @param z factor of the z-loss
     * @return [E + 1]
     */
    public static NDArray routerLossGradients(
            NDManager manager, NDArray sums, double balance, double z) {
        return KERNELS.call(manager, "router_loss_gradients", sums, balance, z).head();
    }

    /**
     * Computes the router's losses in a way that autograd can follow.
     *
     * @param h normed rows [N, H]
     * @param router [E, H]
     * @param ids INT64 [N, topK], the chosen experts
     * @param mask [N], 0 for the rows that do not count, or {@link TorchKernels#nothing}
     * @return balance loss and z-loss, () each
     */
    public static NDList routerLossesPlain(NDArray h, NDArray router, NDArray ids, NDArray mask) {
        return KERNELS.record(h.getManager(), "router_losses_plain", h, router, ids, mask);
    }

    /**
     * Adds to the sums that {@link #route} makes, for rows whose experts are chosen.
     *
     * @param h normed rows [N, H]
     * @param router [E, H]
     * @param ids INT64 [N, topK], the chosen experts
     * @param mask [N], 0 for the rows that do not count, or {@link TorchKernels#nothing}
     * @param sums F64 [2 E + 2], added to
     */
    public static void routerSums(
            NDArray h, NDArray router, NDArray ids, NDArray mask, NDArray sums) {
        KERNELS.run("router_sums", h, router, ids, mask, sums);
    }

    /**
     * Chooses experts in a way that autograd can follow: the combine weights have a gradient.
     *
     * @param h normed rows [N, H]
     * @param router [E, H]
     * @param settings the layer's settings
     * @param selection how experts are ranked
     * @param maskLogits [E] of a mask that is learnt straight through: every combine weight carries
     *     a factor of value 1; {@link TorchKernels#nothing} without such a mask
     * @param slopes d factor / d logit, F64 [E], or {@link TorchKernels#nothing}
     * @return ids INT64 [N, topK] and combine weights [N, topK]
     */
    public static NDList routePlain(
            NDArray h,
            NDArray router,
            Settings settings,
            Selection selection,
            NDArray maskLogits,
            NDArray slopes) {
        NDManager manager = h.getManager();
        try (NDArray numbers =
                manager.create(
                        new double[] {
                            selection.byProbability() ? 1 : 0,
                            selection.protect(),
                            settings.renormalize() ? 1 : 0,
                            settings.topK()
                        })) {
            return KERNELS.record(
                    manager,
                    "router_plain",
                    h,
                    router,
                    selection.bias(),
                    selection.balance(),
                    selection.outside(),
                    numbers,
                    maskLogits,
                    slopes);
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
