package org.djlmoe.examples.study;

import java.util.List;
import java.util.NoSuchElementException;
import org.djlmoe.cache.EvictionPolicy;

/** What is stored of a trained model: a file a unit. Plain data, written and read as JSON. */
final class Figures {

    private Figures() {}

    /** Loads a token of one replay. */
    record Load(int cache, String policy, double loads) {}

    /**
     * One strength of a prior.
     *
     * @param beta strength of the static prior; 0 under a hard mask and without prior
     * @param hard whether the mask is a hard one
     * @param lambda strength of the cache prior, 0 without one
     * @param validation perplexity of the validation text
     * @param validationLoads under the claims' cache and policy, on the validation text
     * @param perplexity of the test text
     * @param loads of the test text
     */
    record Point(
            double beta,
            boolean hard,
            double lambda,
            double validation,
            double validationLoads,
            double perplexity,
            List<Load> loads) {

        double loads(int cache, EvictionPolicy.Type policy) {
            return loads.stream()
                    .filter(l -> l.cache == cache && l.policy.equals(policy.jsonName()))
                    .findFirst()
                    .orElseThrow(
                            () ->
                                    new NoSuchElementException(
                                            "No loads of " + policy.jsonName() + " at " + cache))
                    .loads;
        }

        Curve.Spot spot(int cache, EvictionPolicy.Type policy) {
            return new Curve.Spot(loads(cache, policy), perplexity);
        }
    }

    /** Accuracy of one task. */
    record Task(String task, int questions, double accuracy) {}

    /**
     * Time per output token of an arm whose experts are loaded from a file.
     *
     * @param arm the arm
     * @param widened the factor on the width of its experts
     * @param millisPerToken mean time per output token
     * @param loadingShare share of it in which the computation stood still for loads
     * @param loadsPerToken loads that were made
     */
    record Timing(
            Arm arm,
            int widened,
            double millisPerToken,
            double loadingShare,
            double loadsPerToken) {}

    /**
     * The times of all arms of a seed, measured in turn.
     *
     * @param unit its name, which is that of its file
     * @param settings a text of all settings that it depends on
     * @param seed the seed
     * @param reads where loads came from
     * @param timings the times
     */
    record Times(String unit, String settings, long seed, String reads, List<Timing> timings) {

        /** Finds an arm's, or null. */
        Timing of(Arm arm, int widened) {
            return timings.stream()
                    .filter(t -> t.arm == arm && t.widened == widened)
                    .findFirst()
                    .orElse(null);
        }
    }

    /**
     * A sweep of one arm on one seed.
     *
     * @param arm the arm
     * @param points by strength
     * @param chosen which point the validation text chose
     * @param withinLimit whether that one kept the perplexity limit
     * @param other the chosen strength on the other language
     * @param tasks accuracies at the chosen strength, in the tasks' order; empty if not asked
     */
    record Series(
            Arm arm,
            List<Point> points,
            int chosen,
            boolean withinLimit,
            Point other,
            List<Task> tasks) {

        Point choice() {
            return points.get(chosen);
        }

        Curve curve(StudySettings settings) {
            return new Curve(
                    points.stream().map(p -> p.spot(settings.cache(), settings.policy())).toList());
        }
    }

    /**
     * All sweeps of one trained model.
     *
     * @param unit its name, which is that of its file
     * @param settings a text of all settings that it depends on
     * @param kept experts a layer that its mask keeps; 0 without mask
     * @param seed its seed; the base has that of the study's first
     * @param mask as {@code ExpertMask.toJson}, or null
     * @param series its sweeps
     */
    record Unit(
            String unit, String settings, int kept, long seed, String mask, List<Series> series) {}
}
