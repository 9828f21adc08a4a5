package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.List;

/**
 * What {@link ExpertKernels} compute in: made once for a pass through a layer, used by every chunk
 * and expert of it.
 *
 * <p>The idea: rows of an expert go through it in blocks of at most {@link #blockRows} rows, the
 * even share of a chunk. So the scratch is as large when one expert gets every row as when all get
 * the same, and nothing sized by the router's choices is ever allocated. A block below {@value
 * #MIN_BLOCK_ROWS} rows would cost speed: the weights' gradients are read and written once a block.
 *
 * <p>A row of a block takes 2 I + H + r numbers forward and 5 I + 2 H + r backward, beside H + 2 I
 * in half precision if the experts' weights are. With shared experts wider than I their width
 * counts in place of I.
 */
public final class ExpertScratch implements AutoCloseable {

    private static final int MIN_BLOCK_ROWS = 512;
    private static final int F32 = 4;
    private static final int HALF = 2;

    private final int block;
    private final NDArray wide;
    private final NDArray half;

    private ExpertScratch(int block, NDArray wide, NDArray half) {
        this.block = block;
        this.wide = wide;
        this.half = half;
    }

    /**
     * Makes the scratch of a forward pass; {@link ExpertKernels#route} may use it as well.
     *
     * @param manager its owner
     * @param rows the most rows that an expert may get at a time: those of a chunk
     * @param topK experts a row
     * @param weights the layer's weights
     * @return the scratch
     */
    public static ExpertScratch forward(
            NDManager manager, long rows, int topK, List<NDArray> weights) {
        return of(manager, rows, topK, weights, false);
    }

    /**
     * Makes the scratch of a backward pass.
     *
     * @param manager its owner
     * @param rows the most rows that an expert may get at a time: those of a chunk
     * @param topK experts a row
     * @param weights the layer's weights
     * @return the scratch
     */
    public static ExpertScratch backward(
            NDManager manager, long rows, int topK, List<NDArray> weights) {
        return of(manager, rows, topK, weights, true);
    }

    /**
     * Makes a scratch that is good for {@link ExpertKernels#route} and {@link
     * ExpertKernels#routerLogits} alone.
     *
     * @param manager its owner
     * @param rows rows of a chunk
     * @param hidden H
     * @return the scratch
     */
    public static ExpertScratch routing(NDManager manager, long rows, long hidden) {
        int block = (int) Math.max(1, Math.min(rows, MIN_BLOCK_ROWS));
        return new ExpertScratch(
                block, manager.create(new Shape(block * hidden)), TorchKernels.nothing());
    }

    private static ExpertScratch of(
            NDManager manager, long rows, int topK, List<NDArray> weights, boolean backward) {
        Shape down = weights.get(ExpertKernels.Weights.DOWN.ordinal()).getShape();
        NDArray adapter = weights.get(ExpertKernels.Weights.GATE_UP_A.ordinal());
        long rank = adapter.size() > 0 ? adapter.getShape().get(1) : 0;
        long inner = Math.max(down.get(2), sharedInner(weights));
        int block = blockRows(rows, topK, down.get(0));
        if (!backward) {
            boolean half = HalfArrays.isHalf(weights.get(ExpertKernels.Weights.DOWN.ordinal()));
            block = forwardRows(rows, block, down.get(1), inner, rank, half);
        }
        NDList arrays =
                ExpertKernels.scratch(
                        manager,
                        weights,
                        block * wideNumbers(down.get(1), inner, rank, backward),
                        block * halfNumbers(down.get(1), inner));
        return new ExpertScratch(block, arrays.get(0), arrays.get(1));
    }

    private static long sharedInner(List<NDArray> weights) {
        int place = ExpertKernels.Weights.SHARED_DOWN.ordinal();
        NDArray shared = place < weights.size() ? weights.get(place) : TorchKernels.nothing();
        return shared.size() > 0 ? shared.getShape().get(2) : 0;
    }

    /**
     * Returns how many rows go through an expert at a time in a backward pass.
     *
     * @param rows rows of a chunk
     * @param topK experts a row
     * @param experts E
     * @return the even share of the chunk's routes, at least 512 where the chunk has as many rows
     */
    public static int blockRows(long rows, int topK, long experts) {
        long share = (rows * topK + experts - 1) / experts;
        return (int) Math.max(1, Math.min(rows, Math.max(share, MIN_BLOCK_ROWS)));
    }

    /**
     * Returns how many rows go through an expert at a time in a forward pass: what the memory of a
     * backward pass has room for, since larger products are faster.
     *
     * @param rows rows of a chunk
     * @param block rows a block in the backward pass
     * @param hidden H
     * @param inner I, or the width of the shared experts if that is larger
     * @param rank r of the adapters, 0 without
     * @param halfWeights whether the experts' weights are in half precision
     * @return rows
     */
    public static int forwardRows(
            long rows, long block, long hidden, long inner, long rank, boolean halfWeights) {
        long room = bytes(block, hidden, inner, rank, halfWeights, true);
        long row = bytes(1, hidden, inner, rank, halfWeights, false);
        return (int) Math.max(1, Math.min(rows, room / row));
    }

    /**
     * Returns the size of a scratch.
     *
     * @param block rows a block
     * @param hidden H
     * @param inner I, or the width of the shared experts if that is larger
     * @param rank r of the adapters, 0 without
     * @param halfWeights whether the experts' weights are in half precision
     * @param backward whether it is for a backward pass
     * @return bytes
     */
    public static long bytes(
            long block, long hidden, long inner, long rank, boolean halfWeights, boolean backward) {
        return block
                * (F32 * wideNumbers(hidden, inner, rank, backward)
                        + (halfWeights ? HALF * halfNumbers(hidden, inner) : 0));
    }

    private static long wideNumbers(long hidden, long inner, long rank, boolean backward) {
        return backward ? 5 * inner + 2 * hidden + rank : 2 * inner + hidden + rank;
    }

    private static long halfNumbers(long hidden, long inner) {
        return hidden + 2 * inner;
    }

    /**
     * Returns what the scratch takes.
     *
     * @return bytes
     */
    public long bytes() {
        return F32 * wide.size() + HALF * (half == TorchKernels.nothing() ? 0 : half.size());
    }

    int block() {
        return block;
    }

    NDArray wide() {
        return wide;
    }

    NDArray half() {
        return half;
    }

    /** Releases the arrays. */
    @Override
    public void close() {
        wide.close();
        if (half != TorchKernels.nothing()) {
            half.close();
        }
    }
}
