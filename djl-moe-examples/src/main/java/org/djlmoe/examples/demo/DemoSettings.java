package org.djlmoe.examples.demo;

import org.djlmoe.examples.text.Language;

/**
 * How long the demonstration runs.
 *
 * @param language the language to fine-tune on
 * @param seed decides everything random
 * @param batch rows a training batch
 * @param sequence tokens a row
 * @param steps training steps of each way of fine-tuning
 * @param maskSteps updates of the mask
 * @param maskSamples sampled masks an update
 * @param learningRate highest learning rate
 * @param validationRows rows that beta is chosen on
 * @param testRows rows that figures are reported on
 * @param cacheSize experts a layer that the replayed cache holds
 */
public record DemoSettings(
        Language language,
        long seed,
        int batch,
        int sequence,
        int steps,
        int maskSteps,
        int maskSamples,
        double learningRate,
        int validationRows,
        int testRows,
        int cacheSize) {

    /** Rows at a time when nothing trains. */
    static final int EVALUATION_BATCH = 16;

    /** Rank and scaling numerator of the adapters. */
    static final int RANK = 16;

    /** See {@link #RANK}. */
    static final double ALPHA = 32;

    /**
     * Returns the settings of a full or a quick run.
     *
     * @param quick whether it should end in two minutes
     * @param seed decides everything random
     * @return the settings
     */
    public static DemoSettings of(boolean quick, long seed) {
        return quick
                ? new DemoSettings(Language.GERMAN, seed, 8, 256, 40, 10, 6, 2e-3, 24, 48, 4)
                : new DemoSettings(Language.GERMAN, seed, 8, 256, 200, 40, 6, 2e-3, 64, 160, 4);
    }
}
