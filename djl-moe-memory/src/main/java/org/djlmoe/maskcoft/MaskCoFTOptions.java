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

    private MaskCoFTValues values = new MaskCoFTValues();

    MaskCoFTOptions() {}

    @Override
    MaskCoFTValues values() {
        return values;
    }

    /**
     * Takes over all options of finished settings; what is called after it changes them.
     *
     * @param settings the settings
     * @return this builder
     */
    public B optSettings(MaskCoFTSettings settings) {
        values = settings.values().copy();
        return self();
    }

    /**
     * Sets how many experts a layer keeps. Default: three quarters of them.
     *
     * @param value from the experts that a token uses to all
     * @return this builder
     */
    public B optKept(int value) {
        values.kept = value;
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
        values.keptTotal = value;
        return self();
    }

    /**
     * Sets how the mask's gradient is estimated. Default: Plackett-Luce.
     *
     * @param value the estimator
     * @return this builder
     */
    public B optEstimator(MaskEstimator value) {
        values.estimator = value;
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
        values.maskSteps = value;
        return self();
    }

    /**
     * Sets the sampled masks an update. Default: 6.
     *
     * @param value at least 2, or 1 where the estimator runs backward
     * @return this builder
     */
    public B optMaskSamples(int value) {
        values.maskSamples = value;
        return self();
    }

    /**
     * Sets how far Adam moves the mask logits an update, roughly. Default: 0.1.
     *
     * @param value finite, above 0
     * @return this builder
     */
    public B optMaskLearningRate(double value) {
        values.maskLearningRate = value;
        return self();
    }

    /**
     * Sets how far sampled masks stray from the best one. Default: 1.
     *
     * @param value finite, above 0, in the unit of the mask logits
     * @return this builder
     */
    public B optTemperature(double value) {
        values.temperature = value;
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
        values.loadWeight = value;
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
        values.protectedTop = value;
        return self();
    }

    /**
     * Sets the beta of the soft prior that the last training steps run under. Default: 1.5.
     *
     * @param value 0 or above, or infinity
     * @return this builder
     */
    public B optSoftBeta(double value) {
        values.softBeta = value;
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
        values.softShare = value;
        return self();
    }

    /**
     * Sets the training steps. Default: 200.
     *
     * @param value at least 1
     * @return this builder
     */
    public B optSteps(int value) {
        values.steps = value;
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
        this.values.betas = values;
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
        values.form = value;
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
        values.cacheSize = value;
        return self();
    }

    /**
     * Sets the policy of that cache. Default: keep the most frequent by lifetime counts.
     *
     * @param value the setting
     * @return this builder
     */
    public B optPolicy(EvictionPolicy.Type value) {
        values.policy = value;
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
        values.perplexityLimit = value;
        return self();
    }

    /** Checks what can be checked without a model. */
    MaskCoFTSettings settings() {
        values.check();
        return new MaskCoFTSettings(values.copy());
    }
}
