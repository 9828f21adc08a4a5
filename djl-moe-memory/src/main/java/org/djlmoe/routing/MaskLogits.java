package org.djlmoe.routing;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.util.PairList;

/**
 * The logits of an expert mask that trains through backward, straight through.
 *
 * <p>While a layer runs under a hard mask, the combine weight of expert e carries a factor whose
 * value is exactly 1 and whose slope by the logit of e is given here; a dropped expert's factor has
 * value 0. So outputs are those of the mask alone, and backward leaves d loss / d logit with the
 * parameter, for whatever optimizer trains it. Which mask is in force, and with which slopes, is
 * decided outside: see {@code MaskBlocks}.
 *
 * <p>Experts that no token has chosen, dropped ones among them, get a gradient of exactly zero,
 * unless {@link #excluded} dropped experts a token run along for it. With one expert a token and
 * weights divided by their sum, every gradient is zero: there is nothing to learn from a factor
 * that cancels.
 *
 * <ul>
 *   <li>parameter {@code gate.mask_logits}: [E], zeros at first
 *   <li>input and output of the block itself: anything, passed on; a {@code Router} uses the
 *       parameter
 * </ul>
 */
public final class MaskLogits extends AbstractBlock {

    private final Parameter logits;
    private final int experts;
    private double[] slopes;
    private int excluded;

    MaskLogits(int experts) {
        this.experts = experts;
        logits =
                addParameter(
                        Parameter.builder()
                                .setName("gate.mask_logits")
                                .setType(Parameter.Type.OTHER)
                                .optInitializer(Initializer.ZEROS)
                                .optShape(new Shape(experts))
                                .build());
    }

    /**
     * Returns the parameter.
     *
     * @return theta, [E]
     */
    public Parameter logits() {
        return logits;
    }

    /**
     * Sets what backward leaves in the parameter, until it is set again.
     *
     * @param slope d factor / d logit of each expert, [E], finite; null for no gradient
     * @param excludedExperts how many dropped experts a token run along, 0 for none; at most as
     *     many as are dropped run
     */
    public void setSlopes(double[] slope, int excludedExperts) {
        if (slope != null && slope.length != experts) {
            throw new IllegalArgumentException(
                    slope.length + " slopes for a layer of " + experts + " experts");
        }
        if (excludedExperts < 0) {
            throw new IllegalArgumentException(
                    "The number of excluded experts that run must be 0 or more, not "
                            + excludedExperts);
        }
        slopes = slope == null ? null : slope.clone();
        excluded = excludedExperts;
    }

    /**
     * Returns whether backward computes a gradient.
     *
     * @return whether slopes are set and the parameter is not frozen
     */
    public boolean trains() {
        return slopes != null && logits.requiresGradient();
    }

    /**
     * Returns how many dropped experts run along.
     *
     * @return experts a token
     */
    public int excluded() {
        return excluded;
    }

    /**
     * Returns the slopes in the form that kernels take.
     *
     * @param manager the owner of the result
     * @return F64 [E]
     */
    public NDArray slopes(NDManager manager) {
        // A copy: arrays from values point into Java's memory.
        try (NDArray values = manager.create(slopes)) {
            return values.duplicate();
        }
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        return inputs;
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return inputShapes;
    }
}
