package org.djlmoe.maskcoft;

import java.util.LinkedHashMap;
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

    private final int steps;
    private final double softShare;
    private final int rank;
    private final double alpha;
    private final double learningRate;
    private final MaskedWeights weights;
    private final boolean halfExperts;
    private final long seed;
    private final Integer kept;
    private final Integer keptTotal;
    private final MaskEstimator estimator;
    private final int maskSteps;
    private final int maskSamples;
    private final double maskLearningRate;
    private final double temperature;
    private final double loadWeight;
    private final double softBeta;
    private final int protectedTop;
    private final Integer cacheSize;
    private final EvictionPolicy.Type policy;
    private final double perplexityLimit;
    private final List<Double> betas;
    private final SelectionPrior.Form form;

    MaskCoFTSettings(MaskCoFTOptions<?> options) {
        steps = options.steps;
        softShare = options.softShare;
        rank = options.rank;
        alpha = options.alpha;
        learningRate = options.learningRate;
        weights = options.weights;
        halfExperts = options.halfExperts;
        seed = options.seed;
        kept = options.kept;
        keptTotal = options.keptTotal;
        estimator = options.estimator;
        maskSteps = options.maskSteps;
        maskSamples = options.maskSamples;
        maskLearningRate = options.maskLearningRate;
        temperature = options.temperature;
        loadWeight = options.loadWeight;
        softBeta = options.softBeta;
        protectedTop = options.protectedTop;
        cacheSize = options.cacheSize;
        policy = options.policy;
        perplexityLimit = options.perplexityLimit;
        betas = List.copyOf(options.betas);
        form = options.form;
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
        if (keptTotal != null) {
            budget = MaskBudget.total(keptTotal, layers, topK);
        } else {
            budget =
                    MaskBudget.perLayer(
                            kept == null ? Math.max(topK, (3 * experts + 2) / 4) : kept);
        }
        budget.check(layers, topK, experts);
        return budget;
    }

    /** The cache size in a model. */
    int cacheSize(int experts, int topK) {
        int size = cacheSize == null ? Math.max(topK, experts / 2) : cacheSize;
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
                switch (form) {
                    case ADDITIVE -> SelectionPrior.additive(beta);
                    case SCALED -> SelectionPrior.scaled(beta, 1);
                    case PROBABILITY -> SelectionPrior.probability(beta);
                };
        return prior.withProtectedTop(protectedTop);
    }

    /**
     * Returns the training steps.
     *
     * @return updates of stage 2
     */
    public int steps() {
        return steps;
    }

    /**
     * Returns the part of the training steps under the soft prior.
     *
     * @return 0 to 1
     */
    public double softShare() {
        return softShare;
    }

    /**
     * Returns the adapters' rank.
     *
     * @return r
     */
    public int rank() {
        return rank;
    }

    /**
     * Returns the adapters' scaling numerator.
     *
     * @return alpha
     */
    public double alpha() {
        return alpha;
    }

    /**
     * Returns the highest learning rate of routers and adapters.
     *
     * @return the rate
     */
    public double learningRate() {
        return learningRate;
    }

    /**
     * Returns where combine weights come from under a hard mask.
     *
     * @return the rule
     */
    public MaskedWeights weights() {
        return weights;
    }

    /**
     * Returns whether the experts' frozen weights are BF16.
     *
     * @return true if they are
     */
    public boolean halfExperts() {
        return halfExperts;
    }

    /**
     * Returns what decides masks and adapters.
     *
     * @return the seed
     */
    public long seed() {
        return seed;
    }

    /**
     * Returns how the mask's gradient is estimated.
     *
     * @return the estimator
     */
    public MaskEstimator estimator() {
        return estimator;
    }

    /**
     * Returns the updates of the mask.
     *
     * @return steps of stage 1
     */
    public int maskSteps() {
        return maskSteps;
    }

    /**
     * Returns the sampled masks an update.
     *
     * @return M
     */
    public int maskSamples() {
        return maskSamples;
    }

    /**
     * Returns how far Adam moves the mask logits an update.
     *
     * @return the rate
     */
    public double maskLearningRate() {
        return maskLearningRate;
    }

    /**
     * Returns how far sampled masks stray.
     *
     * @return tau
     */
    public double temperature() {
        return temperature;
    }

    /**
     * Returns the weight of replayed loads in the loss of a mask.
     *
     * @return lambda
     */
    public double loadWeight() {
        return loadWeight;
    }

    /**
     * Returns how many of the router's own first choices no prior displaces.
     *
     * @return J
     */
    public int protectedTop() {
        return protectedTop;
    }

    /**
     * Returns the beta of the last training steps.
     *
     * @return the strength
     */
    public double softBeta() {
        return softBeta;
    }

    /**
     * Returns the policy of the cache that betas are judged by.
     *
     * @return the policy
     */
    public EvictionPolicy.Type policy() {
        return policy;
    }

    /**
     * Returns the highest validation perplexity that a beta may have.
     *
     * @return the limit, NaN for 1.01 times the lowest
     */
    public double perplexityLimit() {
        return perplexityLimit;
    }

    /**
     * Returns the betas to try.
     *
     * @return at least one
     */
    public List<Double> betas() {
        return betas;
    }

    /**
     * Returns the form of the prior.
     *
     * @return the form
     */
    public SelectionPrior.Form form() {
        return form;
    }

    Integer kept() {
        return kept;
    }

    Integer keptTotal() {
        return keptTotal;
    }

    Integer cacheSize() {
        return cacheSize;
    }

    /** All of them but the seed, by name. */
    Map<String, Object> byName() {
        Map<String, Object> named = new LinkedHashMap<>();
        named.put("steps", steps);
        named.put("softShare", softShare);
        named.put("rank", rank);
        named.put("alpha", alpha);
        named.put("learningRate", learningRate);
        named.put("weights", weights);
        named.put("halfExperts", halfExperts);
        named.put("kept", kept);
        named.put("keptTotal", keptTotal);
        named.put("estimator", estimator);
        named.put("maskSteps", maskSteps);
        named.put("maskSamples", maskSamples);
        named.put("maskLearningRate", maskLearningRate);
        named.put("temperature", temperature);
        named.put("loadWeight", loadWeight);
        named.put("softBeta", softBeta);
        named.put("protectedTop", protectedTop);
        named.put("cacheSize", cacheSize);
        named.put("policy", policy);
        named.put("perplexityLimit", perplexityLimit);
        named.put("betas", betas);
        named.put("form", form);
        return named;
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
