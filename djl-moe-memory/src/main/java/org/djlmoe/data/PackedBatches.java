package org.djlmoe.data;

/**
 * Shuffled batches without end, addressed by step: what {@link #at} returns depends on the rows,
 * the batch size, the seed and the step alone, so a resumed run needs no state but its step number.
 *
 * <p>The rows of one epoch are a permutation decided by (seed, epoch). Epochs follow each other
 * without a gap: where the batch size does not divide the rows, a batch takes its last rows from
 * the next epoch, and every row is used exactly once an epoch.
 *
 * <p>Reading in order costs one permutation an epoch (O(rows)); the permutation of the epoch read
 * last is kept, 4 bytes a row. Safe for several threads.
 */
public final class PackedBatches {
    private final PackedTokens tokens;
    private final int batchSize;
    private final long seed;
    private volatile Order order;

    PackedBatches(PackedTokens tokens, int batchSize, long seed) {
        if (batchSize <= 0) {
            throw new IllegalArgumentException("batch size must be positive, got " + batchSize);
        }
        if (batchSize > tokens.rows()) {
            throw new IllegalArgumentException(
                    "a batch of "
                            + batchSize
                            + " rows is larger than the "
                            + tokens.rows()
                            + " rows there are; lower the batch size, shorten the sequence or add"
                            + " documents");
        }
        this.tokens = tokens;
        this.batchSize = batchSize;
        this.seed = seed;
    }

    /** Returns the number of rows a batch holds. */
    public int batchSize() {
        return batchSize;
    }

    /** Returns the rows the batches are drawn from. */
    public PackedTokens tokens() {
        return tokens;
    }

    /**
     * Returns the batch of one step.
     *
     * @param step the step, from 0
     * @throws IllegalArgumentException if the step is negative
     */
    public TokenBatch at(long step) {
        if (step < 0) {
            throw new IllegalArgumentException("step must not be negative, got " + step);
        }
        long first = Math.multiplyExact(step, (long) batchSize);
        int[] chosen = new int[batchSize];
        for (int i = 0; i < batchSize; ++i) {
            long position = Math.addExact(first, i);
            chosen[i] = order(position / tokens.rows())[(int) (position % tokens.rows())];
        }
        return tokens.gather(chosen);
    }

    /**
     * Returns the epoch that a step's first row belongs to.
     *
     * @param step the step, from 0
     */
    public long epoch(long step) {
        return Math.multiplyExact(step, (long) batchSize) / tokens.rows();
    }

    /**
     * Returns the number of steps that see every row at least {@code epochs} times.
     *
     * @param epochs passes over the rows
     */
    public long steps(int epochs) {
        return ((long) epochs * tokens.rows() + batchSize - 1) / batchSize;
    }

    private int[] order(long epoch) {
        Order current = order;
        if (current == null || current.epoch != epoch) {
            current = new Order(epoch, shuffle(tokens.rows(), seed, epoch));
            order = current;
        }
        return current.rows;
    }

    // Fisher-Yates.
    private static int[] shuffle(int rows, long seed, long epoch) {
        SplitMix64 random = new SplitMix64(seed, epoch);
        int[] permutation = new int[rows];
        for (int i = 0; i < rows; ++i) {
            int j = random.next(i + 1);
            permutation[i] = permutation[j];
            permutation[j] = i;
        }
        return permutation;
    }

    private record Order(long epoch, int[] rows) {}
}
