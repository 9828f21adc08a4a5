package org.djlmoe.serving;

import org.djlmoe.model.MoeConfig;

/**
 * How a checkpoint's experts are packed.
 *
 * @param half whether they are narrowed to BF16
 * @param widen a factor on the width I, the added rows and columns being zero: outputs and routing
 *     stay as they are, but there is more to load and to compute, as with a larger model. 1 for
 *     none
 */
public record Packing(boolean half, int widen) {

    /** F32 as they are. */
    public static final Packing EXACT = new Packing(false, 1);

    /** Checks the factor. */
    public Packing {
        if (widen < 1) {
            throw new IllegalArgumentException(
                    "widen is " + widen + ": the width of experts is multiplied by 1 or more");
        }
    }

    /**
     * Returns what the records look like.
     *
     * @param config the model
     * @return sizes and element type
     */
    public ExpertLayout layout(MoeConfig config) {
        long inner = (long) config.intermediateSize() * widen;
        if (inner > Integer.MAX_VALUE) {
            throw new IllegalArgumentException(
                    "widen is " + widen + ", which makes experts of width " + inner);
        }
        return new ExpertLayout(
                config.numLayers(), config.numExperts(), config.hiddenSize(), (int) inner, half);
    }
}
