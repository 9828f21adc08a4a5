package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.nio.IntBuffer;
import java.nio.LongBuffer;

/** The memory of one pass, counted to the byte. */
final class PassMemory implements AutoCloseable {

    private final NDManager manager;
    private long bytes;
    private long peak;

    PassMemory(NDArray like) {
        manager = like.getManager().newSubManager(like.getDevice());
    }

    NDManager manager() {
        return manager;
    }

    /** Flat memory for F32 values, not initialised. */
    NDArray values(long count) {
        add(4 * count);
        return manager.create(new Shape(count), DataType.FLOAT32);
    }

    /** An index array in a chunk's own manager. */
    NDArray indices(NDManager owner, long[] values) {
        return owner.create(LongBuffer.wrap(values), new Shape(values.length), DataType.INT64);
    }

    NDArray indices(int[] values, Shape shape) {
        add(4L * values.length);
        return manager.create(IntBuffer.wrap(values), shape, DataType.INT32);
    }

    void add(long more) {
        bytes += more;
        peak = Math.max(peak, bytes);
    }

    void remove(long fewer) {
        bytes -= fewer;
    }

    long peak() {
        return peak;
    }

    @Override
    public void close() {
        manager.close();
    }
}
