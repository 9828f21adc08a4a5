package org.djlmoe.offload;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDScope;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.engine.PtNDManager;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * A segment's output whose memory can be freed while its caller still refers to it.
 *
 * <p>It looks like any array. When it is evicted its native tensor goes, its values lie in a tier;
 * whoever asks for the tensor brings them back, with the same history: gradients arrive in the
 * anchor of the segment that made it, before and after alike.
 *
 * <p>What it cannot free: memory that others hold too, such as views made of it or an operation
 * outside segments that autograd will need it for. Those keep their values, and the memory.
 *
 * <p>Like the tape, it is to be used on the tape's thread.
 */
final class BoundaryArray extends PtNDArray {

    private static final TorchKernels KERNELS =
            TorchKernels.load(BoundaryArray.class, "boundary.py");

    /** Told when values have come back for the caller. */
    interface LateReads {

        /** Returns whether the array may be evicted again soon. */
        boolean restored(BoundaryArray array);
    }

    // The handle of the superclass is that of the anchor: it lives until close, so that managers
    // and lists see an open array, and costs no memory. The values' handle comes and goes.
    private final PtNDArray anchor;
    private final LateReads lateReads;
    private PtNDArray values;
    private StoredBoundary stored;
    private long version;

    private BoundaryArray(
            PtNDManager manager, PtNDArray anchor, PtNDArray values, LateReads lateReads) {
        super(manager, anchor.getHandle());
        this.anchor = anchor;
        this.lateReads = lateReads;
        this.values = values;
        this.version = ArrayKernels.version(values);
        // The superclass remembers these, and so need not ask an evicted array.
        getShape();
        getDataType();
        getDevice();
        getSparseFormat();
    }

    /**
     * Takes the place of an array.
     *
     * @param output the array, which must not be used any more
     * @param anchor the leaf in which its gradient arrives
     */
    static BoundaryArray inPlaceOf(NDArray output, NDArray anchor, LateReads lateReads) {
        PtNDManager manager = (PtNDManager) output.getManager();
        PtNDArray leaf = (PtNDArray) ArrayKernels.alias(manager, anchor);
        return new BoundaryArray(manager, unowned(leaf), unowned((PtNDArray) output), lateReads);
    }

    private static PtNDArray unowned(PtNDArray array) {
        NDScope.unregister(array);
        array.detach();
        return array;
    }

    @Override
    public synchronized Long getHandle() {
        if (!isReleased() && values == null) {
            restore();
        }
        return isReleased() ? super.getHandle() : values.getHandle();
    }

    private void restore() {
        NDArray plain =
                WorkerThread.await(
                        stored.fetch(getManager()), "a boundary was being read from its tier");
        // The history must be there whatever mode the reader is in.
        try (plain;
                GradMode on = GradMode.on()) {
            NDList joined = KERNELS.record(getManager(), "rejoin", plain, anchor);
            values = unowned((PtNDArray) joined.head());
        }
        version = ArrayKernels.version(values);
        if (!lateReads.restored(this)) {
            stored.release();
            stored = null;
        }
    }

    /**
     * Frees the memory, if the values are those that were stored.
     *
     * @return whether the memory was held and is freed
     */
    synchronized boolean evict(StoredBoundary place) {
        if (isReleased() || values == null || !isUnchanged()) {
            return false;
        }
        if (stored == null) {
            stored = place.hold();
        }
        values.close();
        values = null;
        return true;
    }

    /** Returns whether nobody has changed the values in place. An evicted array is unchanged. */
    synchronized boolean isUnchanged() {
        return isReleased() || values == null || ArrayKernels.version(values) == version;
    }

    /** Frees the memory again after a late read. */
    synchronized boolean evictAgain() {
        return stored != null && evict(stored);
    }

    synchronized boolean isEvicted() {
        return !isReleased() && values == null;
    }

    @Override
    public synchronized void close() {
        super.close();
        if (values != null) {
            values.close();
            values = null;
        }
        if (stored != null) {
            stored.release();
            stored = null;
        }
    }
}
