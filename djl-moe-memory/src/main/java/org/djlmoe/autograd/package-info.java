/**
 * A tape of segments, which is the custom autograd function that DJL lacks, and the trainer that
 * uses it.
 *
 * <p>Blocks hand in segments, each a forward and a backward computation; gradients of inputs and
 * parameters come out. Here, in {@code kernel} and nowhere else are internals of DJL's PyTorch
 * engine touched.
 */
package org.djlmoe.autograd;
