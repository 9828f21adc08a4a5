package org.djlmoe.serving;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import org.djlmoe.kernel.DecodeKernels;
import org.djlmoe.model.MoeConfig;

/**
 * The keys and values of B sequences that are read and written in step, all at the same position.
 *
 * <p>Bound: {@code 2 layers B kvHeads d C} F32 values, made at the start; C is the longest text, or
 * with a sliding window w at most {@code w + max(w, 256)}: what no token sees any more is dropped.
 */
public final class KvCache implements AutoCloseable {

    private static final int LEAST_SPARE = 256;

    private final NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    private final int batch;
    private final int maxTokens;
    private final int capacity;
    private final int window;
    private final NDArray[] keys;
    private final NDArray[] values;
    private final NDArray cos;
    private final NDArray sin;
    private int used;
    private int position;

    KvCache(MoeConfig config, int batch, int maxTokens) {
        if (batch < 1 || maxTokens < 1) {
            throw new IllegalArgumentException(
                    "A cache needs at least one sequence and one token, not %d and %d"
                            .formatted(batch, maxTokens));
        }
        if (maxTokens > config.maxPositionEmbeddings()) {
            throw new IllegalArgumentException(
                    "%d tokens exceed the model's %d positions: shorten the prompt or generate fewer"
                            .formatted(maxTokens, config.maxPositionEmbeddings()));
        }
        this.batch = batch;
        this.maxTokens = maxTokens;
        window = config.slidingWindow();
        long windowed = (long) window + Math.max(window, LEAST_SPARE);
        capacity = window == 0 ? maxTokens : (int) Math.min(maxTokens, windowed);
        int d = config.headDim();
        keys = new NDArray[config.numLayers()];
        values = new NDArray[config.numLayers()];
        Shape shape = new Shape(batch, config.numKeyValueHeads(), capacity, d);
        for (int l = 0; l < keys.length; l++) {
            keys[l] = manager.zeros(shape);
            values[l] = manager.zeros(shape);
        }
        cos = manager.zeros(new Shape(maxTokens, d / 2));
        sin = manager.zeros(new Shape(maxTokens, d / 2));
        DecodeKernels.rotaryTables(config.ropeTheta(), cos, sin);
    }

    /**
     * Returns how many tokens of each sequence were read so far.
     *
     * @return tokens
     */
    public int length() {
        return position;
    }

    /**
     * Returns the number of sequences.
     *
     * @return B
     */
    public int batch() {
        return batch;
    }

    /**
     * Returns how long the sequences may become.
     *
     * @return tokens
     */
    public int maxTokens() {
        return maxTokens;
    }

    /**
     * Returns the memory of keys and values.
     *
     * @return bytes
     */
    public long bytes() {
        return 2 * keys.length * keys[0].size() * Float.BYTES;
    }

    /** Forgets the sequences. */
    public void clear() {
        used = 0;
        position = 0;
    }

    /** How many tokens can be read at a time. */
    int maxChunk() {
        return capacity == maxTokens ? capacity : capacity - window + 1;
    }

    /** Makes room for S more tokens, at most {@link #maxChunk}. */
    void reserve(int sequence) {
        if (sequence > maxTokens - position) {
            throw new IllegalArgumentException(
                    "The cache holds %d of at most %d tokens, %d more do not fit: make a larger one"
                            .formatted(position, maxTokens, sequence));
        }
        if (used + sequence > capacity) {
            int keep = Math.min(used, window - 1);
            for (int l = 0; l < keys.length; l++) {
                DecodeKernels.shift(keys[l], values[l], used, keep);
            }
            used = keep;
        }
    }

    DecodeKernels.Past past(int layer) {
        return new DecodeKernels.Past(keys[layer], values[layer], cos, sin, used, position);
    }

    void advance(int sequence) {
        used += sequence;
        position += sequence;
    }

    @Override
    public void close() {
        manager.close();
    }
}
