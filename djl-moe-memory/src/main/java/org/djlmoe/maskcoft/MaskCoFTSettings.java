package org.djlmoe.maskcoft;

import java.util.Collections;
import java.util.List;
import java.util.Map;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.SelectionPrior;

/**
 * All options of MaskCoFT in one immutable object, apart from model and text. What they mean stands
 * with the builder's methods.
 */
public final class MaskCoFTSettings {

    private final MaskCoFTValues values;

    /** Keeps what nobody else may change. */
    MaskCoFTSettings(MaskCoFTValues values) {
        this.values = values;
    }

    MaskCoFTValues values() {
        return values;
    }

    /**
     * Returns a builder with the default of every option.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Returns how many experts a mask keeps in a model.
     *
     * @param layers the number of MoE layers
     * @param experts experts a layer
     * @param topK experts a token
     * @return the budget
     * @throws IllegalArgumentException if these settings ask for more experts than there are, or
     *     for fewer than a token uses
     */
    public MaskBudget budget(int layers, int experts, int topK) {
        MaskBudget budget;
        if (values.keptTotal != null) {
            budget = MaskBudget.total(values.keptTotal, layers, topK);
        } else {
            budget =
                    MaskBudget.perLayer(
                            values.kept == null
                                    ? Math.max(topK, (3 * experts + 2) / 4)
                                    : values.kept);
        }
        budget.check(layers, topK, experts);
        return budget;
    }

    /** The cache size in a model. */
    int cacheSize(int experts, int topK) {
        int size = values.cacheSize == null ? Math.max(topK, experts / 2) : values.cacheSize;
        Checks.require(
                size >= topK,
                "cacheSize is %d: a token uses topK = %d experts of a layer at once",
                size,
                topK);
        return size;
    }

    /** The prior of a strength. */
    SelectionPrior prior(double beta) {
        if (Double.isInfinite(beta)) {
            return SelectionPrior.hardMask();
        }
        SelectionPrior prior =
                switch (values.form) {
                    case ADDITIVE -> SelectionPrior.additive(beta);
                    case SCALED -> SelectionPrior.scaled(beta, 1);
                    case PROBABILITY -> SelectionPrior.probability(beta);
                };
        return prior.withProtectedTop(values.protectedTop);
    }

    /**
     * Returns the training steps.
     *
     * @return updates of stage 2
     */
    public int steps() {
        return values.steps;
    }

    /**
     * Returns the part of the training steps under the soft prior.
     *
     * @return 0 to 1
     */
    public double softShare() {
        return values.softShare;
    }

    /**
     * Returns the adapters' rank.
     *
     * @return r
     */
    public int rank() {
        return values.rank;
    }

    /**
     * Returns the adapters' scaling numerator.
     *
     * @return alpha
     */
    public double alpha() {
        return values.alpha;
    }

    /**
     * Returns the highest learning rate of routers and adapters.
     *
     * @return the rate
     */
    public double learningRate() {
        return values.learningRate;
    }

    /**
     * Returns where combine weights come from under a hard mask.
     *
     * @return the rule
     */
    public MaskedWeights weights() {
        return values.weights;
    }

    /**
     * Returns whether the experts' frozen weights are BF16.
     *
     * @return true if they are
     */
    public boolean halfExperts() {
        return values.halfExperts;
    }

    /**
     * Returns what decides masks and adapters.
     *
     * @return the seed
     */
    public long seed() {
        return values.seed;
    }

    /**
     * Returns how the mask's gradient is estimated.
     *
     * @return the estimator
     */
    public MaskEstimator estimator() {
        return values.estimator;
    }

    /**
     * Returns the updates of the mask.
     *
     * @return steps of stage 1
     */
    public int maskSteps() {
        return values.maskSteps;
    }

    /**
     * Returns the sampled masks an update.
     *
     * @return M
     */
    public int maskSamples() {
        return values.maskSamples;
    }

    /**
     * Returns how far Adam moves the mask logits an update.
     *
     * @return the rate
     */
    public double maskLearningRate() {
        return values.maskLearningRate;
    }

    /**
     * Returns how far sampled masks stray.
     *
     * @return tau
     */
    public double temperature() {
        return values.temperature;
    }

    /**
     * Returns the weight of replayed loads in the loss of a mask.
     *
     * @return lambda
     */
    public double loadWeight() {
        return values.loadWeight;
    }

    /**
     * Returns how many of the router's own first choices no prior displaces.
     *
     * @return J
     */
    public int protectedTop() {
        return values.protectedTop;
    }

    /**
     * Returns the beta of the last training steps.
     *
     * @return the strength
     */
    public double softBeta() {
        return values.softBeta;
    }

    /**
     * Returns the policy of the cache that betas are judged by.
     *
     * @return the policy
     */
    public EvictionPolicy.Type policy() {
        return values.policy;
    }

    /**
     * Returns the highest validation perplexity that a beta may have.
     *
     * @return the limit, NaN for 1.01 times the lowest
     */
    public double perplexityLimit() {
        return values.perplexityLimit;
    }

    /**
     * Returns the betas to try.
     *
     * @return at least one
     */
    public List<Double> betas() {
        return Collections.unmodifiableList(values.betas);
    }

    /**
     * Returns the form of the prior.
     *
     * @return the form
     */
    public SelectionPrior.Form form() {
        return values.form;
    }

    /** All of them but the seed, by name. */
    Map<String, Object> byName() {
        return values.byName();
    }

    /** Builds {@link MaskCoFTSettings}. */
    public static final class Builder extends MaskCoFTOptions<Builder> {

        Builder() {}

        @Override
        Builder self() {
            return this;
        }

        /**
         * Checks the options.
         *
         * @return the settings
         * @throws IllegalArgumentException if one is out of its range
         */
        public MaskCoFTSettings build() {
            return settings();
        }
    }
}
