package org.djlmoe.model;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.util.PairList;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.autograd.Tape;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.NormKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * Root mean square norm: {@code y = x / sqrt(mean(x^2) + eps) * weight}. Keeps only its input for
 * backward.
 *
 * <ul>
 *   <li>input and output: [..., H]
 *   <li>parameter {@code weight}: [H], ones at first
 * </ul>
 *
 * <p>Source: B. Zhang, R. Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467.
 */
public final class RmsNorm extends AbstractBlock {

    private final Parameter weight;
    private final double eps;

    /**
     * Creates a norm.
     *
     * @param hidden H
     * @param eps added to the mean square
     */
    public RmsNorm(int hidden, double eps) {
        this.eps = eps;
        weight =
                addParameter(
                        Parameter.builder()
                                .setName("weight")
                                .setType(Parameter.Type.GAMMA)
                                .optInitializer(Initializer.ONES)
                                .optShape(new Shape(hidden))
                                .build());
    }

    /**
     * Returns the weight.
     *
     * @return [H]
     */
    public Parameter weight() {
        return weight;
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray x = inputs.singletonOrThrow();
        return new NDList(forward(parameterStore, x, x.getShape(), training));
    }

    /**
     * Norms rows and gives the result another shape, at no cost.
     *
     * @param parameterStore the parameter store
     * @param x [..., H]
     * @param shape the shape of the result, as many elements and the same last axis
     * @param training whether the weight tracks gradients
     * @return the normed rows in the given shape
     */
    public NDArray forward(
            ParameterStore parameterStore, NDArray x, Shape shape, boolean training) {
        NDArray gamma = parameterStore.getValue(weight, x.getDevice(), training);
        return Tape.apply(new Norm(gamma, shape), new NDList(x)).head();
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return inputShapes;
    }

    private final class Norm implements Segment {

        private final NDArray gamma;
        private final Shape shape;

        Norm(NDArray gamma, Shape shape) {
            this.gamma = gamma;
            this.shape = shape;
        }

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            NDArray x = inputs.head();
            NDArray y = x.getManager().create(x.getShape());
            NormKernels.rmsNorm(x, gamma, eps, y);
            return new NDList(y.reshape(shape));
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
            NDArray x = inputs.head();
            NDArray dx = x.getManager().create(x.getShape());
            NDArray dgamma = context.gradient(gamma);
            NormKernels.rmsNormBackward(
                    x,
                    gamma,
                    eps,
                    outputGradients.head().reshape(x.getShape()),
                    dx,
                    dgamma == null ? TorchKernels.nothing() : dgamma);
            return new NDList(context.handOver(dx));
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(NormKernels.rmsNormPlain(inputs.head(), gamma, eps).reshape(shape));
        }

        @Override
        public boolean hasTrainableParameters() {
            return ArrayKernels.requiresGradient(gamma);
        }
    }
}
