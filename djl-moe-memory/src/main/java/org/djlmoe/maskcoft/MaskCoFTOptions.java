package org.djlmoe.maskcoft;

import java.util.List;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.routing.SelectionPrior;

/**
 * The options of the whole recipe, shared by {@link MaskCoFT.Builder} and {@link
 * MaskCoFTSettings.Builder}.
 *
 * @param <B> the builder itself
 */
public abstract class MaskCoFTOptions<B extends MaskCoFTOptions<B>> extends AdaptationOptions<B> {

    Integer kept;
    Integer keptTotal;
    MaskEstimator estimator = MaskEstimator.plackettLuce();
    int maskSteps = 60;
    int maskSamples = 6;
    double maskLearningRate = 0.1;
    double temperature = 1;
    double loadWeight;
    double softBeta = 1.5;
    int protectedTop;
    Integer cacheSize;
    EvictionPolicy.Type policy = EvictionPolicy.Type.LFU_LIFETIME;
    double perplexityLimit = Double.NaN;
    List<Double> betas = List.of(0.5, 1.0, 1.25, 1.5, 2.0, 4.0);
    SelectionPrior.Form form = SelectionPrior.Form.ADDITIVE;

    MaskCoFTOptions() {
        super(200);
    }

    /**
     * Takes over all options of finished settings; what is called after it changes them.
     *
     * @param settings the settings
     * @return this builder
     */
    public B optSettings(MaskCoFTSettings settings) {
        steps = settings.steps();
        softShare = settings.softShare();
        rank = settings.rank();
        alpha = settings.alpha();
        learningRate = settings.learningRate();
        weights = settings.weights();
        halfExperts = settings.halfExperts();
        seed = settings.seed();
        kept = settings.kept();
        keptTotal = settings.keptTotal();
        estimator = settings.estimator();
        maskSteps = settings.maskSteps();
        maskSamples = settings.maskSamples();
        maskLearningRate = settings.maskLearningRate();
        temperature = settings.temperature();
        loadWeight = settings.loadWeight();
        softBeta = settings.softBeta();
        protectedTop = settings.protectedTop();
        cacheSize = settings.cacheSize();
        policy = settings.policy();
        perplexityLimit = settings.perplexityLimit();
        betas = settings.betas();
        form = settings.form();
        return self();
    }

    /**
     * Sets how many experts a layer keeps. Default: three quarters of them.
     *
     * @param value from the experts that a token uses to all
     * @return this builder
     */
    public B optKept(int value) {
        kept = value;
        return self();
    }

    /**
     * Sets how many experts all layers keep together, in place of {@link #optKept}: every layer
     * keeps as many as a token uses, and how the rest is shared is learnt with the mask.
     *
     * @param value from the experts that a token uses, times the layers, to all
     * @return this builder
     */
    public B optKeptTotal(int value) {
        keptTotal = value;
        return self();
    }

    /**
     * Sets how the mask's gradient is estimated. Default: Plackett-Luce.
     *
     * @param value the estimator
     * @return this builder
     */
    public B optEstimator(MaskEstimator value) {
        estimator = value;
        return self();
    }

    /**
     * Sets the updates of the mask. Default: 60. With 0 the mask keeps the experts that the
     * validation text uses most.
     *
     * @param value 0 or more
     * @return this builder
     */
    public B optMaskSteps(int value) {
        maskSteps = value;
        return self();
    }

    /**
     * Sets the sampled masks an update. Default: 6.
     *
     * @param value at least 2, or 1 where the estimator runs backward
     * @return this builder
     */
    public B optMaskSamples(int value) {
        maskSamples = value;
        return self();
    }

    /**
     * Sets how far Adam moves the mask logits an update, roughly. Default: 0.1.
     *
     * @param value finite, above 0
     * @return this builder
     */
    public B optMaskLearningRate(double value) {
        maskLearningRate = value;
        return self();
    }

    /**
     * Sets how far sampled masks stray from the best one. Default: 1.
     *
     * @param value finite, above 0, in the unit of the mask logits
     * @return this builder
     */
    public B optTemperature(double value) {
        temperature = value;
        return self();
    }

    /**
     * Adds this weight times the replayed loads a token to the loss of a sampled mask. Default: 0.
     * Only Plackett-Luce sees it.
     *
     * @param value lambda, in nats a load, finite, 0 or more
     * @return this builder
     */
    public B optLoadWeight(double value) {
        loadWeight = value;
        return self();
    }

    /**
     * Sets how many of the router's own first choices no prior displaces, in training and in
     * serving. With 1 or more there is a floor below which no beta gets the loads. Default: 0.
     *
     * @param value J, 0 or above
     * @return this builder
     */
    public B optProtectedTop(int value) {
        protectedTop = value;
        return self();
    }

    /**
     * Sets the beta of the soft prior that the last training steps run under. Default: 1.5.
     *
     * @param value 0 or above, or infinity
     * @return this builder
     */
    public B optSoftBeta(double value) {
        softBeta = value;
        return self();
    }

    /**
     * Sets the part of the training steps that run under the soft prior. Default: all of them; the
     * steps before run under the hard mask.
     *
     * @param value 0 to 1
     * @return this builder
     */
    public B optSoftShare(double value) {
        softShare = value;
        return self();
    }

    /**
     * Sets the training steps. Default: 200.
     *
     * @param value at least 1
     * @return this builder
     */
    public B optSteps(int value) {
        steps = value;
        return self();
    }

    /**
     * Sets the betas to try, each 0 or above; infinity is the hard mask. Default: 0.5, 1, 1.25,
     * 1.5, 2, 4.
     *
     * @param values at least one
     * @return this builder
     */
    public B optBetas(List<Double> values) {
        betas = values;
        return self();
    }

    /**
     * Sets the form of the prior: what betas are added to, and so what they mean. The scaled form's
     * ranges are measured on the validation text. Default: additive.
     *
     * @param value the form
     * @return this builder
     */
    public B optForm(SelectionPrior.Form value) {
        form = value;
        return self();
    }

    /**
     * Sets the cache that betas and the load term are judged by, in experts a layer. Default: half
     * of the experts.
     *
     * @param value at least the experts that a token uses
     * @return this builder
     */
    public B optCacheSize(int value) {
        cacheSize = value;
        return self();
    }

    /**
     * Sets the policy of that cache. Default: keep the most frequent by lifetime counts.
     *
     * @param value the setting
     * @return this builder
     */
    public B optPolicy(EvictionPolicy.Type value) {
        policy = value;
        return self();
    }

    /**
     * Sets the highest validation perplexity that a beta may have. Default: 1.01 times the lowest
     * of all betas; to compare with another way of fine-tuning, give 1.01 times its perplexity.
     *
     * @param value the setting
     * @return this builder
     */
    public B optPerplexityLimit(double value) {
        perplexityLimit = value;
        return self();
    }

    /** Checks what can be checked without a model. */
    MaskCoFTSettings settings() {
        checkAdaptation();
        Checks.require(
                kept == null || keptTotal == null,
                "kept and keptTotal are both given: choose the experts a layer, or those of all");
        Checks.require(kept == null || kept >= 1, "kept is %d: set topK or more", kept);
        Checks.require(
                keptTotal == null || keptTotal >= 1,
                "keptTotal is %d: set topK or more",
                keptTotal);
        Checks.require(estimator != null, "estimator is null: name one of MaskEstimator");
        Checks.require(maskSteps >= 0, "maskSteps is %d: set 0 or more", maskSteps);
        Checks.require(
                maskSamples >= estimator.minSamples(),
                "maskSamples is %d: the estimator (%s) needs %d masks",
                maskSamples,
                estimator,
                estimator.minSamples());
        Checks.require(
                maskLearningRate > 0 && Double.isFinite(maskLearningRate),
                "maskLearningRate is %s: it must be finite and above 0",
                maskLearningRate);
        Checks.require(
                temperature > 0 && Double.isFinite(temperature),
                "temperature is %s: it must be finite and above 0",
                temperature);
        Checks.require(
                loadWeight >= 0 && Double.isFinite(loadWeight),
                "loadWeight is %s: it must be finite and 0 or more",
                loadWeight);
        MaskSearch.check(estimator, loadWeight);
        Checks.require(
                softBeta >= 0, "softBeta is %s: it must be 0 or above, or infinity", softBeta);
        Checks.require(protectedTop >= 0, "protectedTop is %d: set 0 or more", protectedTop);
        Checks.require(
                cacheSize == null || cacheSize >= 1, "cacheSize is %d: set 1 or more", cacheSize);
        Checks.require(policy != null, "policy is null: name an eviction policy");
        Checks.require(
                !(perplexityLimit <= 0),
                "perplexityLimit is %s: it must be above 0",
                perplexityLimit);
        Checks.require(betas != null && !betas.isEmpty(), "betas is empty: at least one is tried");
        for (Double beta : betas) {
            Checks.require(
                    beta != null && beta >= 0,
                    "betas has %s: each must be 0 or above, or infinity",
                    beta);
        }
        Checks.require(form != null, "form is null: name one of SelectionPrior.Form");
        return new MaskCoFTSettings(this);
    }
}
