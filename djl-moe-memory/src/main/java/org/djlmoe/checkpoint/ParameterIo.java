package org.djlmoe.checkpoint;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.index.NDIndex;
import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import org.djlmoe.kernel.HalfArrays;

/**
 * The elements of an F32 or BF16 array as a flat sequence of F32, read and written in pieces of at
 * most 4 MB.
 *
 * <p>On the CPU a piece is the array's own memory, reached through a zero-copy buffer; one engine
 * call opens a window of up to 1 GB (a buffer cannot span more than 2 GB). On other devices, and
 * where it is widened or rounded, a piece is copied by the engine. Either way the array is taken
 * off the gradient graph first, so writing is allowed while it requires a gradient.
 *
 * <p>{@code NDArray.set(Buffer)} and {@code copyTo} are of no use here: on a slice both replace the
 * slice's storage and leave the array it came from unchanged.
 */
final class ParameterIo implements AutoCloseable {

    private static final int PIECE_ELEMENTS = 1 << 20;
    private static final int WINDOW_ELEMENTS = 1 << 28;

    private final NDManager manager;
    private final NDArray flat;
    private final long size;
    private final boolean half;
    private final boolean direct;
    private final int windowElements;
    private FloatBuffer window;
    private long windowStart;
    private FloatBuffer staging;

    ParameterIo(NDArray array) {
        this(array, Device.cpu().equals(array.getDevice()), WINDOW_ELEMENTS);
    }

    /** For tests: the copying way and small windows on any device. */
    ParameterIo(NDArray array, boolean direct, int windowElements) {
        half = HalfArrays.isHalf(array);
        this.direct = direct && !half;
        this.windowElements = windowElements;
        size = array.size();
        manager = array.getManager().newSubManager(array.getDevice());
        flat = flatten(array);
    }

    /** Fills or consumes a piece. */
    @FunctionalInterface
    interface PieceAction {
        /**
         * Handles one piece.
         *
         * @param done elements handled before this piece
         * @param piece the elements, to be filled or consumed whole
         */
        void accept(long done, FloatBuffer piece) throws IOException;
    }

    /** Lets {@code source} fill {@code count} elements from {@code offset} on. */
    void write(long offset, long count, PieceAction source) throws IOException {
        for (long done = 0; done < count; ) {
            FloatBuffer piece = direct ? view(offset + done, count - done) : stage(count - done);
            int length = piece.remaining();
            source.accept(done, piece);
            if (!direct) {
                copyIn(offset + done, piece.flip());
            }
            done += length;
        }
    }

    /** Hands {@code count} elements from {@code offset} on to {@code sink}. */
    void read(long offset, long count, PieceAction sink) throws IOException {
        for (long done = 0; done < count; ) {
            FloatBuffer piece =
                    direct
                            ? view(offset + done, count - done)
                            : copyOut(offset + done, count - done);
            int length = piece.remaining();
            sink.accept(done, piece.asReadOnlyBuffer());
            done += length;
        }
    }

    /**
     * Makes sure that writes reach the array: flattening an array that is not contiguous would give
     * a copy, and everything written would be lost without a word.
     */
    void requireWritable(NDArray array, String name) {
        if (!direct || size == 0) {
            return;
        }
        try (NDArray again = flatten(array)) {
            FloatBuffer here = open(flat, 0, 1);
            FloatBuffer there = open(again, 0, 1);
            float before = here.get(0);
            float probe = before == 1 ? 2 : 1;
            here.put(0, probe);
            boolean shared = there.get(0) == probe;
            here.put(0, before);
            if (!shared) {
                throw new IllegalArgumentException(
                        "Parameter '"
                                + name
                                + "' is not contiguous in memory: duplicate its array");
            }
        }
    }

    private NDArray flatten(NDArray array) {
        try (NDArray detached = array.stopGradient()) {
            NDArray result = detached.reshape(size);
            result.attach(manager);
            return result;
        }
    }

    private FloatBuffer view(long offset, long wanted) {
        long start = offset / windowElements * windowElements;
        if (window == null || windowStart != start) {
            window = open(flat, start, (int) Math.min(windowElements, size - start));
            windowStart = start;
        }
        int from = (int) (offset - start);
        int length = (int) Math.min(Math.min(wanted, PIECE_ELEMENTS), window.capacity() - from);
        return window.slice(from, length);
    }

    /** The buffer outlives the slice made for it: both only point into the array's memory. */
    private FloatBuffer open(NDArray array, long start, int count) {
        if (start == 0 && count == size) {
            return floats(array.toByteBuffer(true));
        }
        try (NDArray slice = array.get(range(start, count))) {
            return floats(slice.toByteBuffer(true));
        }
    }

    private FloatBuffer stage(long wanted) {
        int length = (int) Math.min(wanted, Math.min(PIECE_ELEMENTS, size));
        if (staging == null) {
            staging = floats(ByteBuffer.allocateDirect((int) Math.min(PIECE_ELEMENTS, size) * 4));
        }
        return staging.clear().limit(length);
    }

    private void copyIn(long offset, FloatBuffer piece) {
        int length = piece.remaining();
        try (NDArray values = manager.create(piece, new Shape(length))) {
            if (half) {
                HalfArrays.put(flat, offset, values);
            } else {
                flat.set(range(offset, length), values);
            }
        }
    }

    private FloatBuffer copyOut(long offset, long wanted) {
        int length = (int) Math.min(wanted, PIECE_ELEMENTS);
        try (NDArray slice = flat.get(range(offset, length))) {
            if (!half) {
                return floats(slice.toByteBuffer(false));
            }
            try (NDArray wide = HalfArrays.widen(manager, slice)) {
                return floats(wide.toByteBuffer(false));
            }
        }
    }

    private static NDIndex range(long start, int count) {
        return new NDIndex("{}:{}", start, start + count);
    }

    private static FloatBuffer floats(ByteBuffer bytes) {
        return bytes.order(ByteOrder.nativeOrder()).asFloatBuffer();
    }

    @Override
    public void close() {
        window = null;
        staging = null;
        manager.close();
    }
}
