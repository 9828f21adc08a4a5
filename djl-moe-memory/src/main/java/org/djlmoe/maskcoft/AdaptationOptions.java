package org.djlmoe.maskcoft;

import org.djlmoe.routing.MaskedWeights;

/**
 * The options of stage 2, shared by every builder that has it.
 *
 * @param <B> the builder itself
 */
public abstract class AdaptationOptions<B extends AdaptationOptions<B>> {

    int steps;
    double softShare = 1;
    int rank = 16;
    double alpha = 32;
    double learningRate = 1e-3;
    MaskedWeights weights = MaskedWeights.ALL;
    boolean halfExperts;
    long seed;

    AdaptationOptions(int steps) {
        this.steps = steps;
    }

    abstract B self();

    /**
     * Sets the adapters' rank and scaling numerator. Default: 16 and 32.
     *
     * @param r the rank, at least 1
     * @param a the numerator, finite, above 0
     * @return this builder
     */
    public B optAdapters(int r, double a) {
        rank = r;
        alpha = a;
        return self();
    }

    /**
     * Sets the highest learning rate of routers and adapters; it warms up over a twentieth of the
     * steps and falls to zero on a cosine. Default: 1e-3.
     *
     * @param value finite, above 0
     * @return this builder
     */
    public B optLearningRate(double value) {
        learningRate = value;
        return self();
    }

    /**
     * Sets where combine weights come from while a hard mask is in force. Default: all experts.
     *
     * @param value the rule
     * @return this builder
     */
    public B optWeights(MaskedWeights value) {
        weights = value;
        return self();
    }

    /**
     * Sets whether the experts' frozen weights are narrowed to BF16 before training and stay so:
     * half the memory, products in BF16 with F32 accumulation. Routers, adapters and everything
     * else are F32. Exact for weights that were BF16 in their checkpoint, otherwise rounded for
     * good. Default: false.
     *
     * @param value whether they are
     * @return this builder
     */
    public B optHalfExperts(boolean value) {
        halfExperts = value;
        return self();
    }

    /**
     * Sets the seed of masks and adapters. Default: 0.
     *
     * @param value the seed
     * @return this builder
     */
    public B optSeed(long value) {
        seed = value;
        return self();
    }

    void checkAdaptation() {
        Checks.require(steps >= 1, "steps is %d: set 1 or more", steps);
        Checks.require(
                learningRate > 0 && Double.isFinite(learningRate),
                "learningRate is %s: it must be finite and above 0",
                learningRate);
        Checks.require(
                softShare >= 0 && softShare <= 1,
                "softShare is %s: it must be from 0 to 1",
                softShare);
        Checks.require(rank >= 1, "The adapters' rank is %d: set 1 or more", rank);
        Checks.require(
                alpha > 0 && Double.isFinite(alpha),
                "The adapters' alpha is %s: it must be finite and above 0",
                alpha);
        Checks.require(weights != null, "weights is null: name one of MaskedWeights");
    }
}
