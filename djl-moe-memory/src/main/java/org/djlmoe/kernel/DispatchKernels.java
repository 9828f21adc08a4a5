package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import java.util.List;

/**
 * Experts of rows that lie anywhere, and the rows that travel to them.
 *
 * <p>Routes are grouped by expert and an expert's routes run in blocks of rows, as {@link
 * ExpertKernels} run them, so the largest buffer is the {@link ExpertScratch} that the caller
 * gives, however the router chose. Gradients of weights are added to in place.
 *
 * <p>Weights and gradients are lists in the order of {@link ExpertKernels.Weights}; norm and router
 * are not used. A rank has experts of its own and, for the length of a layer, some that other ranks
 * lend it. A <i>slot</i> numbers a rank's experts: its own, then the lent ones.
 *
 * <p>A row that travels is [H + 2 k]: its values, k combine weights, and the k experts that they
 * belong to, -1 where the route is computed elsewhere. Experts travel as floats, which hold whole
 * numbers up to 2^24.
 */
public final class DispatchKernels {

    private static final TorchKernels KERNELS =
            TorchKernels.load(DispatchKernels.class, "norm.py", "expert.py", "dispatch.py");

    private DispatchKernels() {}

    /**
     * Views the beginning of flat memory as rows.
     *
     * @param manager the owner of the view
     * @param memory [n]
     * @param rows the number of rows
     * @param width values a row
     * @return [rows, width], sharing memory
     */
    public static NDArray view(NDManager manager, NDArray memory, long rows, long width) {
        return KERNELS.call(manager, "view_rows", memory, rows, width).head();
    }

    /**
     * Views some rows.
     *
     * @param manager the owner of the view
     * @param array [rows, width]
     * @param first the first row
     * @param rows their number
     * @return [rows, width], sharing memory
     */
    public static NDArray rows(NDManager manager, NDArray array, long first, long rows) {
        return KERNELS.call(manager, "rows_of", array, first, rows).head();
    }

    /**
     * Views one element of a stack.
     *
     * @param manager the owner of the view
     * @param stack [n, ...]
     * @param index the element
     * @return [...], sharing memory
     */
    public static NDArray slab(NDManager manager, NDArray stack, int index) {
        return KERNELS.call(manager, "slab", stack, index).head();
    }

    /**
     * Makes a stack for elements of the shape and type of another's.
     *
     * @param manager the owner of the new stack
     * @param stack [n, a, b]
     * @param count the number of elements
     * @return [count, a, b], not filled
     */
    public static NDArray newStack(NDManager manager, NDArray stack, int count) {
        return KERNELS.call(manager, "new_stack", stack, count).head();
    }

    /**
     * Adds to one element of a stack.
     *
     * @param stack [n, ...], changed in place
     * @param index the element
     * @param part what is added [...]
     */
    public static void addToSlab(NDArray stack, int index, NDArray part) {
        KERNELS.run("add_slab", stack, index, part);
    }

    /**
     * Sets an array to zero.
     *
     * @param array changed in place
     */
    public static void zero(NDArray array) {
        KERNELS.run("fill_zero", array);
    }

    /**
     * Copies rows.
     *
     * @param x [N, H]
     * @param tokens INT64 [n] which rows
     * @param to [R, H], its rows {@code at, at + 1, ...} are filled
     * @param at the first of them
     */
    public static void gather(NDArray x, NDArray tokens, NDArray to, long at) {
        KERNELS.run("gather_rows", x, tokens, to, at);
    }

    /**
     * Fills rows that travel.
     *
     * @param x [N, H]
     * @param ids INT64 [N, k] the experts of a token
     * @param combine [N, k] their combine weights
     * @param destinations [N, k] the ranks that compute them
     * @param tokens INT64 [n] the tokens for the first target, then those for the second, ...
     * @param targets ranks
     * @param counts the number of tokens for each
     * @param to [R, H + 2 k], its rows {@code at, at + 1, ...} are filled
     * @param at the first of them
     */
    public static void pack(
            NDArray x,
            NDArray ids,
            NDArray combine,
            NDArray destinations,
            NDArray tokens,
            long[] targets,
            long[] counts,
            NDArray to,
            long at) {
        KERNELS.run("pack_rows", x, ids, combine, destinations, tokens, targets, counts, to, at);
    }

    /**
     * Adds rows to those of their tokens.
     *
     * @param rows [n, H]
     * @param tokens INT64 [n]
     * @param y [N, H], added to
     */
    public static void add(NDArray rows, NDArray tokens, NDArray y) {
        KERNELS.run("add_rows", rows, tokens, y);
    }

    /**
     * Adds gradients that have come back to those of their tokens.
     *
     * @param rows [n, H + k] the gradients of a row and of its combine weights
     * @param tokens INT64 [n]
     * @param dx [N, H], added to
     * @param dcombine [N, k], added to
     */
    public static void addGradients(NDArray rows, NDArray tokens, NDArray dx, NDArray dcombine) {
        KERNELS.run("add_gradients", rows, tokens, dx, dcombine);
    }

    /**
     * Runs the experts of a chunk whose rows are all here, and the experts too.
     *
     * @param x [N, H]
     * @param tokens INT64 [n] the chunk's tokens
     * @param ids INT64 [N, k]
     * @param combine [N, k]
     * @param weights of all experts
     * @param adapterScale factor of the adapters' products
     * @param scratch of a forward pass
     * @param y [N, H], added to
     */
    public static void localForward(
            NDArray x,
            NDArray tokens,
            NDArray ids,
            NDArray combine,
            List<NDArray> weights,
            double adapterScale,
            ExpertScratch scratch,
            NDArray y) {
        KERNELS.run(
                "local_forward",
                x,
                tokens,
                ids,
                combine,
                weights,
                adapterScale,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                y);
    }

    /**
     * Backward of {@link #localForward}.
     *
     * @param x [N, H]
     * @param tokens INT64 [n] the chunk's tokens
     * @param g gradient of y [N, H]
     * @param ids INT64 [N, k]
     * @param combine [N, k]
     * @param weights of all experts
     * @param gradients theirs, added to
     * @param adapterScale factor of the adapters' products
     * @param scratch of a backward pass
     * @param dx [N, H], added to
     * @param dcombine [N, k], the chunk's rows are filled
     */
    public static void localBackward(
            NDArray x,
            NDArray tokens,
            NDArray g,
            NDArray ids,
            NDArray combine,
            List<NDArray> weights,
            List<NDArray> gradients,
            double adapterScale,
            ExpertScratch scratch,
            NDArray dx,
            NDArray dcombine) {
        KERNELS.run(
                "local_backward",
                x,
                tokens,
                g,
                ids,
                combine,
                weights,
                gradients,
                adapterScale,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                dx,
                dcombine);
    }

    /**
     * Runs the experts of rows that have travelled here. Adapters are not looked at.
     *
     * @param rows [R, H + 2 k]
     * @param topK k
     * @param table INT64 [E + 1] the slot of an expert; the last element, and that of an expert
     *     which is not here, is the number of slots
     * @param slots the number of slots
     * @param own weights of this rank's experts
     * @param lent weights that other ranks lend
     * @param scratch of a forward pass
     * @param out [R, H], filled with the sum of what this rank's experts give a row
     */
    public static void receivedForward(
            NDArray rows,
            int topK,
            NDArray table,
            int slots,
            List<NDArray> own,
            List<NDArray> lent,
            ExpertScratch scratch,
            NDArray out) {
        KERNELS.run(
                "received_forward",
                rows,
                topK,
                table,
                slots,
                own,
                lent,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                out);
    }

    /**
     * Backward of {@link #receivedForward}.
     *
     * @param rows [R, H + 2 k]
     * @param g gradients of their outputs [R, H]
     * @param topK k
     * @param table INT64 [E + 1], as in the forward pass
     * @param slots the number of slots
     * @param own weights of this rank's experts
     * @param lent weights that other ranks lend
     * @param ownGradients added to
     * @param lentGradients added to
     * @param scratch of a backward pass
     * @param back [R, H + k], filled with the gradients of a row and of its combine weights
     */
    public static void receivedBackward(
            NDArray rows,
            NDArray g,
            int topK,
            NDArray table,
            int slots,
            List<NDArray> own,
            List<NDArray> lent,
            List<NDArray> ownGradients,
            List<NDArray> lentGradients,
            ExpertScratch scratch,
            NDArray back) {
        KERNELS.run(
                "received_backward",
                rows,
                g,
                topK,
                table,
                slots,
                own,
                lent,
                ownGradients,
                lentGradients,
                scratch.block(),
                scratch.wide(),
                scratch.half(),
                back);
    }
}
