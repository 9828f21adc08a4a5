package org.djlmoe.data;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.Arrays;

/**
 * One batch for next-token prediction; {@code targets[i]} is the token that follows {@code
 * inputs[i]}.
 *
 * @param batchSize rows B
 * @param sequenceLength tokens a row S
 * @param inputs [B, S] row by row; copied on the way in and out
 * @param targets [B, S] row by row; copied on the way in and out
 */
public record TokenBatch(int batchSize, int sequenceLength, int[] inputs, int[] targets) {

    /**
     * Checks the sizes.
     *
     * @throws IllegalArgumentException if a size is not positive or an array does not hold B x S
     *     ids
     */
    public TokenBatch {
        if (batchSize <= 0 || sequenceLength <= 0) {
            throw new IllegalArgumentException(
                    "batch must have rows and tokens, got " + batchSize + " x " + sequenceLength);
        }
        long size = (long) batchSize * sequenceLength;
        if (inputs.length != size || targets.length != size) {
            throw new IllegalArgumentException(
                    "a batch of "
                            + batchSize
                            + " x "
                            + sequenceLength
                            + " needs "
                            + size
                            + " inputs and targets, got "
                            + inputs.length
                            + " and "
                            + targets.length);
        }
        inputs = inputs.clone();
        targets = targets.clone();
    }

    @Override
    public int[] inputs() {
        return inputs.clone();
    }

    @Override
    public int[] targets() {
        return targets.clone();
    }

    /** Returns the number of tokens the batch predicts, B x S. */
    public int tokens() {
        return inputs.length;
    }

    /**
     * Copies the inputs into an array.
     *
     * @param manager the array's owner
     * @return INT64 [B, S]
     */
    public NDArray toInputs(NDManager manager) {
        return toArray(manager, inputs);
    }

    /**
     * Copies the targets into an array.
     *
     * @param manager the array's owner
     * @return INT64 [B, S]
     */
    public NDArray toTargets(NDManager manager) {
        return toArray(manager, targets);
    }

    private NDArray toArray(NDManager manager, int[] ids) {
        long[] wide = new long[ids.length];
        for (int i = 0; i < ids.length; ++i) {
            wide[i] = ids[i];
        }
        return manager.create(wide, new Shape(batchSize, sequenceLength));
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof TokenBatch that
                && batchSize == that.batchSize
                && sequenceLength == that.sequenceLength
                && Arrays.equals(inputs, that.inputs)
                && Arrays.equals(targets, that.targets);
    }

    @Override
    public int hashCode() {
        return 31 * (31 * batchSize + Arrays.hashCode(inputs)) + Arrays.hashCode(targets);
    }

    @Override
    public String toString() {
        return "TokenBatch[" + batchSize + " x " + sequenceLength + "]";
    }
}
