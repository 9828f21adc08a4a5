package org.djlmoe.routing;

import com.google.gson.annotations.SerializedName;

/**
 * Where the combine weights of a token come from while a hard mask drops experts.
 *
 * <p>With p the softmax over all experts and K the kept ones, a chosen expert e weighs p_e under
 * {@link #ALL} and p_e / sum over K of p under {@link #KEPT}. Where the model divides the weights
 * of a token by their sum, the denominators cancel and both rules are the same. Where it does not,
 * they differ: then a model that was trained under {@link #KEPT} sees smaller weights as soon as it
 * is served without the mask, a mismatch that {@link #ALL} does not have.
 */
public enum MaskedWeights {
    /** The softmax over all experts: the default, and what every soft prior uses. */
    @SerializedName("all")
    ALL,
    /** The softmax over the kept experts alone. */
    @SerializedName("kept")
    KEPT;

    /**
     * Checks that the rule fits a prior.
     *
     * @param prior the prior
     * @throws IllegalArgumentException if this is {@link #KEPT} and the prior forbids no expert
     */
    public void check(SelectionPrior prior) {
        if (this == KEPT && !prior.isHardMask()) {
            throw new IllegalArgumentException(
                    "Combine weights from the kept experts alone go with a hard mask; a prior of beta "
                            + prior.beta()
                            + " takes them from all: use MaskedWeights.ALL");
        }
    }
}
