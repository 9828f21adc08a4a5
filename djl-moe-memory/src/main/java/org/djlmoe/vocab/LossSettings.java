package org.djlmoe.vocab;

import org.djlmoe.kernel.VocabKernels;

/** What stays the same from batch to batch. */
record LossSettings(
        long ignoreIndex,
        RingDtpLoss.Reduction reduction,
        VocabKernels.Terms terms,
        int blockTokens) {

    /**
     * Returns what every token's loss is multiplied with.
     *
     * @param tokens the number of tokens that count
     * @param normalizer what a mean divides by, or NaN for the number of tokens
     */
    double scale(long tokens, double normalizer) {
        if (reduction != RingDtpLoss.Reduction.MEAN) {
            return 1;
        }
        if (tokens == 0) {
            return 0;
        }
        if (Double.isNaN(normalizer)) {
            return 1.0 / tokens;
        }
        if (!(normalizer > 0)) {
            throw new IllegalArgumentException(
                    "The normalizer is "
                            + normalizer
                            + " for a batch of "
                            + tokens
                            + " valid tokens; it must be the number of valid tokens of the step");
        }
        return 1 / normalizer;
    }
}
