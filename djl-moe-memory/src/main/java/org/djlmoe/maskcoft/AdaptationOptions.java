package org.djlmoe.maskcoft;

import org.djlmoe.routing.MaskedWeights;

/**
 * The options of stage 2, shared by every builder that has it.
 *
 * @param <B> the builder itself
 */
public abstract class AdaptationOptions<B extends AdaptationOptions<B>> {

    /** What is set so far. */
    abstract AdaptationValues values();

    abstract B self();

    /**
     * Sets the adapters' rank and scaling numerator. Default: 16 and 32.
     *
     * @param r the rank, at least 1
     * @param a the numerator, finite, above 0
     * @return this builder
     */
    public B optAdapters(int r, double a) {
        values().rank = r;
        values().alpha = a;
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
        values().learningRate = value;
        return self();
    }

    /**
     * Sets where combine weights come from while a hard mask is in force. Default: all experts.
     *
     * @param value the rule
     * @return this builder
     */
    public B optWeights(MaskedWeights value) {
        values().weights = value;
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
        values().halfExperts = value;
        return self();
    }

    /**
     * Sets the seed of masks and adapters. Default: 0.
     *
     * @param value the seed
     * @return this builder
     */
    public B optSeed(long value) {
        values().seed = value;
        return self();
    }
}
