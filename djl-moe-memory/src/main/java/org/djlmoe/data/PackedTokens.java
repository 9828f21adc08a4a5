package org.djlmoe.data;

import java.util.Arrays;
import java.util.Iterator;
import java.util.NoSuchElementException;

/**
 * A token stream cut into rows of {@code sequenceLength + 1} ids, without padding: row {@code r} is
 * {@code stream[r S .. r S + S]}. A row's last id is the next row's first, so every token but the
 * stream's first is predicted exactly once; fewer than S tokens at the end fill no row and are left
 * out ({@link #unusedTokens}).
 *
 * <p>Rows run across document ends. A model sees there the end-of-text id and has to learn that
 * what precedes it does not matter; where documents must not attend to each other this is the wrong
 * layout.
 */
public final class PackedTokens {
    private final int[] stream;
    private final int length;
    private final int sequenceLength;
    private final int rows;

    PackedTokens(int[] stream, int length, int sequenceLength) {
        if (sequenceLength <= 0) {
            throw new IllegalArgumentException(
                    "sequence length must be positive, got " + sequenceLength);
        }
        if (length - 1 < sequenceLength) {
            throw new IllegalArgumentException(
                    "too few tokens for one row: there are "
                            + length
                            + ", a sequence length of "
                            + sequenceLength
                            + " needs "
                            + (sequenceLength + 1L)
                            + "; add documents or shorten the sequence");
        }
        this.stream = stream;
        this.length = length;
        this.sequenceLength = sequenceLength;
        this.rows = (length - 1) / sequenceLength;
    }

    /**
     * Cuts a ready-made stream.
     *
     * @param stream token ids; copied
     * @param sequenceLength tokens a row predicts
     * @return the rows
     * @throws IllegalArgumentException if the length is not positive or the stream is too short for
     *     one row
     */
    public static PackedTokens of(int[] stream, int sequenceLength) {
        return new PackedTokens(stream.clone(), stream.length, sequenceLength);
    }

    /** Returns the number of rows. */
    public int rows() {
        return rows;
    }

    /** Returns the number of tokens a row predicts. */
    public int sequenceLength() {
        return sequenceLength;
    }

    /** Returns the number of tokens all rows together predict. */
    public int predictedTokens() {
        return rows * sequenceLength;
    }

    /** Returns the number of tokens at the stream's end that are in no row. */
    public int unusedTokens() {
        return length - 1 - predictedTokens();
    }

    /**
     * Returns a copy of one row.
     *
     * @param index the row's place in the stream
     * @return {@code sequenceLength + 1} ids
     * @throws IndexOutOfBoundsException if there is no such row
     */
    public int[] row(int index) {
        if (index < 0 || index >= rows) {
            throw new IndexOutOfBoundsException("row " + index + " of " + rows);
        }
        int from = index * sequenceLength;
        return Arrays.copyOfRange(stream, from, from + sequenceLength + 1);
    }

    /**
     * Returns shuffled batches for training.
     *
     * @param batchSize rows a batch holds
     * @param seed decides the order of the rows
     * @throws IllegalArgumentException if the batch size is not positive or exceeds the rows
     */
    public PackedBatches batches(int batchSize, long seed) {
        return new PackedBatches(this, batchSize, seed);
    }

    /**
     * Returns the rows in the stream's order, each once, for evaluation.
     *
     * @param batchSize rows a batch holds; the last batch holds what is left
     * @return batches that can be gone through any number of times
     * @throws IllegalArgumentException if the batch size is not positive
     */
    public Iterable<TokenBatch> sequential(int batchSize) {
        return sample(rows, batchSize);
    }

    /**
     * Returns evenly spaced rows, each once, for evaluation on a part of the text.
     *
     * @param count how many rows; all of them if there are no more
     * @param batchSize rows a batch holds; the last batch holds what is left
     * @return batches that can be gone through any number of times
     * @throws IllegalArgumentException if the count or the batch size is not positive
     */
    public Iterable<TokenBatch> sample(int count, int batchSize) {
        if (count <= 0) {
            throw new IllegalArgumentException("row count must be positive, got " + count);
        }
        int taken = Math.min(count, rows);
        if (batchSize <= 0) {
            throw new IllegalArgumentException("batch size must be positive, got " + batchSize);
        }
        return () ->
                new Iterator<>() {
                    private int next;

                    @Override
                    public boolean hasNext() {
                        return next < taken;
                    }

                    @Override
                    public TokenBatch next() {
                        if (!hasNext()) {
                            throw new NoSuchElementException("all " + taken + " rows were read");
                        }
                        int[] chosen = new int[Math.min(batchSize, taken - next)];
                        for (int i = 0; i < chosen.length; ++i) {
                            chosen[i] = (int) ((long) next++ * rows / taken);
                        }
                        return gather(chosen);
                    }
                };
    }

    TokenBatch gather(int[] chosen) {
        int[] inputs = new int[Math.multiplyExact(chosen.length, sequenceLength)];
        int[] targets = new int[inputs.length];
        for (int i = 0; i < chosen.length; ++i) {
            int from = chosen[i] * sequenceLength;
            System.arraycopy(stream, from, inputs, i * sequenceLength, sequenceLength);
            System.arraycopy(stream, from + 1, targets, i * sequenceLength, sequenceLength);
        }
        return new TokenBatch(chosen.length, sequenceLength, inputs, targets);
    }

    @Override
    public String toString() {
        return "PackedTokens[rows=" + rows + ", sequenceLength=" + sequenceLength + "]";
    }
}
