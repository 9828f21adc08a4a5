package org.djlmoe.examples.study;

import java.util.List;
import java.util.stream.LongStream;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.examples.text.Language;

/**
 * What a study compares, and how long it may run.
 *
 * @param language the language to fine-tune on
 * @param otherLanguage one that was not fine-tuned on
 * @param seeds of batches, masks and adapters; all arms run on each
 * @param batch rows a training batch
 * @param sequence tokens a row
 * @param steps training steps of every fine-tuned arm
 * @param maskSteps updates of the learned mask
 * @param maskSamples sampled masks an update
 * @param learningRate highest learning rate
 * @param rank of the adapters; alpha is twice that
 * @param softBeta the prior of the last training steps under a mask
 * @param softShare the part of the steps that run under it
 * @param protectedTop how many of the router's own first choices no prior displaces
 * @param validationRows rows that strengths are chosen on
 * @param testRows rows that figures are reported on
 * @param taskItems questions a task
 * @param kept experts a layer that the main masks keep
 * @param keptSweep other numbers to keep, for the learned and the most-frequent mask
 * @param keptSeeds how many of the seeds the sweep runs on
 * @param cache experts a layer in the cache that claims are about
 * @param caches all cache sizes that loads are counted for
 * @param policy the eviction policy that claims are about
 * @param betas strengths of static priors, infinity for the hard mask
 * @param lambdas strengths of cache priors
 * @param timedSeeds how many of the seeds have their decoding timed
 * @param timedTexts texts that are decoded for it
 * @param widen the factor on the experts' width that makes loading dominate
 */
public record StudySettings(
        Language language,
        Language otherLanguage,
        List<Long> seeds,
        int batch,
        int sequence,
        int steps,
        int maskSteps,
        int maskSamples,
        double learningRate,
        int rank,
        double softBeta,
        double softShare,
        int protectedTop,
        int validationRows,
        int testRows,
        int taskItems,
        int kept,
        List<Integer> keptSweep,
        int keptSeeds,
        int cache,
        List<Integer> caches,
        EvictionPolicy.Type policy,
        List<Double> betas,
        List<Double> lambdas,
        int timedSeeds,
        int timedTexts,
        int widen) {

    /** Rows at a time when nothing trains. */
    static final int EVALUATION_BATCH = 16;

    /** Copies and checks. */
    public StudySettings {
        seeds = List.copyOf(seeds);
        keptSweep = List.copyOf(keptSweep);
        caches = List.copyOf(caches);
        betas = List.copyOf(betas);
        lambdas = List.copyOf(lambdas);
        if (seeds.isEmpty() || seeds.stream().distinct().count() < seeds.size()) {
            throw new IllegalArgumentException("A study needs distinct seeds, not " + seeds);
        }
        if (!caches.contains(cache)) {
            throw new IllegalArgumentException(
                    "The cache of the claims, %d, is none of %s".formatted(cache, caches));
        }
        if (betas.isEmpty() || lambdas.isEmpty()) {
            throw new IllegalArgumentException("A study needs strengths to try");
        }
    }

    /**
     * Returns the settings for the demo's base model: eight experts, top-2.
     *
     * @param quick whether it should end in a few minutes, with figures of little weight
     * @param firstSeed the first seed; the others follow it
     * @param seeds how many seeds
     * @param steps training steps
     * @return the settings
     */
    public static StudySettings of(boolean quick, long firstSeed, int seeds, int steps) {
        return new StudySettings(
                Language.GERMAN,
                Language.FRENCH,
                LongStream.range(firstSeed, firstSeed + seeds).boxed().toList(),
                8,
                256,
                steps,
                quick ? 10 : 40,
                6,
                2e-3,
                16,
                RECIPE_BETA,
                RECIPE_SHARE,
                RECIPE_PROTECTED,
                quick ? 16 : 64,
                quick ? 32 : 160,
                quick ? 10 : 50,
                6,
                quick ? List.of() : List.of(4, 5, 7),
                1,
                4,
                List.of(2, 4, 6),
                EvictionPolicy.Type.LFU_LIFETIME,
                quick
                        ? List.of(0.5, 1.0, 2.0)
                        : List.of(0.0, 0.5, 1.0, 1.5, 2.0, Double.POSITIVE_INFINITY),
                quick ? List.of(0.1, 0.3) : List.of(0.0, 0.1, 0.2, 0.3, 0.45),
                quick ? 1 : 2,
                quick ? 2 : 8,
                4);
    }

    /** The defaults of MaskCoFT. */
    private static final double RECIPE_BETA = 1.5;

    private static final double RECIPE_SHARE = 1;
    private static final int RECIPE_PROTECTED = 0;
}
