package org.djlmoe.offload;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.concurrent.Future;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.tier.SlotTier;

/**
 * The values of a boundary in a slot of the tier. The tape and the caller's array each hold it; the
 * slot is free when both have let go.
 */
final class StoredBoundary {

    private final SlotPool pool;
    private final WorkerThread thread;
    private final SlotTier.Slot slot;
    private final Shape shape;
    private final DataType type;
    private final Device device;
    private int holders = 1;

    StoredBoundary(SlotPool pool, WorkerThread thread, SlotTier.Slot slot, NDArray array) {
        this.pool = pool;
        this.thread = thread;
        this.slot = slot;
        shape = array.getShape();
        type = array.getDataType();
        device = array.getDevice();
    }

    long bytes() {
        return shape.size() * type.getNumOfBytes();
    }

    /** Writes the values; on the tier's thread. */
    void write(NDArray array) {
        slot.write(array);
    }

    /**
     * Starts to bring the values back.
     *
     * @param home owner of the array that comes; it must stay open until then
     */
    Future<NDArray> fetch(NDManager home) {
        if (pool.isClosed()) {
            throw new IllegalStateException(
                    "The values of this array lay in the tier of a SelectiveCheckpointOffload, which"
                            + " closed with its trainer: copy what is needed longer");
        }
        return thread.submit(
                () -> {
                    // Made here, so that the first touch of its memory is not waited for.
                    NDArray array = home.create(shape, type, device);
                    NDScope.unregister(array);
                    try {
                        slot.read(array);
                    } catch (RuntimeException | Error e) {
                        array.close();
                        throw e;
                    }
                    return array;
                });
    }

    synchronized StoredBoundary hold() {
        holders++;
        return this;
    }

    synchronized void release() {
        if (--holders == 0) {
            pool.release(slot);
        }
    }

    /** Gives the slot up after a failed write. */
    void discard() {
        pool.discard(slot);
    }
}
