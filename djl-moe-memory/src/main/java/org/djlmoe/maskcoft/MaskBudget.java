package org.djlmoe.maskcoft;

import org.djlmoe.routing.ExpertMask;

/**
 * How many experts a mask keeps: the same number in every layer, or one number for the whole model
 * whose split over the layers is learnt.
 *
 * <p>Every layer keeps its best {@code floor} experts; {@code shared} more places go to the best of
 * all experts that are left, whatever their layer. A layer that the loss is sensitive to pulls its
 * logits up and so takes more of the shared places. With a floor of top-k, every layer can serve.
 *
 * @param floor experts that every layer keeps, at least 1
 * @param shared further experts over all layers, 0 for the same number in each
 */
public record MaskBudget(int floor, int shared) {

    /** Checks the signs. */
    public MaskBudget {
        if (floor < 1 || shared < 0) {
            throw new IllegalArgumentException(
                    "A layer keeps 1 expert or more and layers share 0 places or more, not "
                            + floor
                            + " and "
                            + shared);
        }
    }

    /**
     * The same number in every layer.
     *
     * @param kept experts a layer
     * @return the budget
     */
    public static MaskBudget perLayer(int kept) {
        return new MaskBudget(kept, 0);
    }

    /**
     * One number for all layers together.
     *
     * @param total experts over all layers
     * @param layers the number of MoE layers
     * @param topK experts a token, kept in every layer
     * @return the budget
     * @throws IllegalArgumentException if the total is below topK experts a layer
     */
    public static MaskBudget total(int total, int layers, int topK) {
        if (total < layers * topK) {
            throw new IllegalArgumentException(
                    "A budget of %d kept experts is too small: %d layers need topK = %d each, %d"
                            .formatted(total, layers, topK, layers * topK));
        }
        return new MaskBudget(topK, total - layers * topK);
    }

    /**
     * Returns how many experts are kept over all layers.
     *
     * @param layers the number of MoE layers
     * @return the total
     */
    public int total(int layers) {
        return floor * layers + shared;
    }

    /**
     * Returns how many experts a mask of this budget can drop in one layer.
     *
     * @param layers the number of MoE layers
     * @param experts experts a layer
     * @return the most that any layer can be without, 0 if all experts are kept
     */
    public int mostDropped(int layers, int experts) {
        return Math.min(experts - floor, layers * experts - total(layers));
    }

    /**
     * Keeps the highest scores; of equal ones the lower id, then the lower layer.
     *
     * @param scores [layers, experts]
     * @return the mask
     */
    public ExpertMask top(double[][] scores) {
        return ExpertMask.topN(scores, floor, shared);
    }

    void check(int layers, int topK, int experts) {
        if (floor < topK || floor > experts) {
            throw new IllegalArgumentException(
                    "kept is %d: Cannot keep %d, set topK (%d) to numExperts (%d)"
                            .formatted(floor, floor, topK, experts));
        }
        if (shared > layers * (experts - floor)) {
            throw new IllegalArgumentException(
                    "kept is %d over all layers, but %d layers have %d experts"
                            .formatted(total(layers), layers, layers * experts));
        }
    }

    @Override
    public String toString() {
        return shared == 0
                ? floor + " experts a layer"
                : floor + " experts a layer and " + shared + " over all layers";
    }
}
