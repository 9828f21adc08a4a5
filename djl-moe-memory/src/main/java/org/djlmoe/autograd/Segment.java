package org.djlmoe.autograd;

import ai.djl.ndarray.NDList;

/**
 * A piece of a model with a backward computation of its own.
 *
 * <p>Between its forward and its backward a segment keeps its inputs and what it {@linkplain
 * SegmentContext#save saves}, nothing else: that is what bounds memory. A segment is used for one
 * forward and at most one backward.
 */
public interface Segment {

    /**
     * Computes the outputs. Nothing is recorded while this runs, and every array that it makes is
     * closed afterwards, except the outputs and what was saved.
     *
     * @param context where to save what the backward needs beyond the inputs
     * @param inputs the inputs, without history
     * @return the outputs, arrays of the segment's own and not its inputs; above 1024 elements they
     *     must not be made of Java values ({@code manager.create(float[])}), whose memory goes with
     *     the array object
     */
    NDList forward(SegmentContext context, NDList inputs);

    /**
     * Computes the gradients of the inputs and adds those of the parameters in place, to {@link
     * SegmentContext#gradient}. Nothing is recorded while this runs.
     *
     * @param context the one that {@link #forward} saved to
     * @param inputs the inputs of {@link #forward}
     * @param outputGradients one a output, null where the output had no influence; not to be
     *     changed, since autograd may have left the same memory as another array's gradient
     * @return one a input, null where the input needs no gradient; they are copied where they have
     *     to be kept, unless they are {@linkplain SegmentContext#handOver handed over}
     */
    NDList backward(SegmentContext context, NDList inputs, NDList outputGradients);

    /**
     * Computes the outputs with operations that DJL differentiates by itself. This is what runs
     * when gradients are collected without a {@link Tape}: right, but not bounded.
     *
     * @param inputs the inputs, with their history
     * @return the outputs
     */
    NDList plain(NDList inputs);

    /**
     * Returns whether any parameter of the segment is to get a gradient. A segment that neither has
     * one nor gets an input that needs a gradient is not recorded: what lies below frozen layers
     * costs nothing in backward.
     *
     * @return false only if it is certain that no parameter does
     */
    default boolean hasTrainableParameters() {
        return true;
    }
}
