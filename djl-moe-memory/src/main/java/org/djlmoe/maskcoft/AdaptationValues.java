package org.djlmoe.maskcoft;

import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.routing.MaskedWeights;

/**
 * The options of stage 2, with their defaults: the one place where they are listed. A builder works
 * on an object of its own, and what it builds keeps a copy that nobody changes.
 */
class AdaptationValues implements Cloneable {

    int steps;
    double softShare = 1;
    int rank = 16;
    double alpha = 32;
    double learningRate = 1e-3;
    MaskedWeights weights = MaskedWeights.ALL;
    boolean halfExperts;
    long seed;

    AdaptationValues(int steps) {
        this.steps = steps;
    }

    AdaptationValues copy() {
        try {
            return (AdaptationValues) clone();
        } catch (CloneNotSupportedException e) {
            throw new AssertionError(e);
        }
    }

    /** All but the seed, by name. */
    Map<String, Object> byName() {
        Map<String, Object> named = new LinkedHashMap<>();
        named.put("steps", steps);
        named.put("softShare", softShare);
        named.put("rank", rank);
        named.put("alpha", alpha);
        named.put("learningRate", learningRate);
        named.put("weights", weights);
        named.put("halfExperts", halfExperts);
        return named;
    }

    /** Refuses what is out of range. */
    void check() {
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
