package org.djlmoe.serving;

import java.util.Arrays;
import java.util.BitSet;
import java.util.SplittableRandom;

/**
 * Draws tokens from logits: repetition penalty, temperature, top-k, top-p, in this order.
 *
 * <p>Of equal logits the lower id counts as the likelier. The seed alone decides: the same logits
 * give the same tokens.
 */
final class Sampler {

    private final GenerationSettings settings;
    private final SplittableRandom random;
    private final BitSet seen = new BitSet();

    Sampler(GenerationSettings settings) {
        this.settings = settings;
        random = new SplittableRandom(settings.seed());
    }

    /** Hears a token of the text, prompt or not. */
    void see(int token) {
        seen.set(token);
    }

    /**
     * Draws the next token.
     *
     * @param logits [V], not changed
     * @throws IllegalStateException if one of them is not a number
     */
    int next(float[] logits) {
        float[] z = penalized(logits);
        if (settings.temperature() == 0) {
            return best(z);
        }
        int[] order = likeliest(z);
        double[] p = new double[order.length];
        double sum = 0;
        for (int i = 0; i < p.length; i++) {
            p[i] = Math.exp(((double) z[order[i]] - z[order[0]]) / settings.temperature());
            sum += p[i];
        }
        int kept = nucleus(p, sum);
        double mass = 0;
        for (int i = 0; i < kept; i++) {
            mass += p[i];
        }
        double draw = random.nextDouble() * mass;
        for (int i = 0; i < kept; i++) {
            draw -= p[i];
            if (draw < 0) {
                return order[i];
            }
        }
        // Rounding may leave a rest.
        return order[kept - 1];
    }

    private float[] penalized(float[] logits) {
        float[] z = new float[logits.length];
        for (int i = 0; i < z.length; i++) {
            if (Float.isNaN(logits[i]) || logits[i] == Float.POSITIVE_INFINITY) {
                throw new IllegalStateException(
                        "The logit of token " + i + " is " + logits[i] + ": the model is broken");
            }
            z[i] = logits[i];
            if (settings.repetitionPenalty() != 1 && seen.get(i)) {
                double penalty = settings.repetitionPenalty();
                z[i] = (float) (z[i] > 0 ? z[i] / penalty : z[i] * penalty);
            }
        }
        return z;
    }

    private static int best(float[] z) {
        int best = 0;
        for (int i = 1; i < z.length; i++) {
            if (z[i] > z[best]) {
                best = i;
            }
        }
        return best;
    }

    /** The first topK ids, or all, by falling logit. */
    private int[] likeliest(float[] z) {
        // Once a token over the whole vocabulary: numbers sort several times faster than objects.
        long[] keys = new long[z.length];
        for (int i = 0; i < keys.length; i++) {
            keys[i] = ((long) ~ordered(z[i]) << 32) | i;
        }
        Arrays.sort(keys);
        int n = settings.topK() == 0 ? z.length : Math.min(settings.topK(), z.length);
        return Arrays.stream(keys, 0, n).mapToInt(key -> (int) key).toArray();
    }

    /** A whole number that is less for one float than for another where that is. */
    private static int ordered(float value) {
        int bits = Float.floatToIntBits(value);
        return bits ^ bits >> 31 & Integer.MAX_VALUE;
    }

    /** How many of the likeliest reach topP; at least one. */
    private int nucleus(double[] p, double sum) {
        double reached = 0;
        for (int i = 0; i < p.length; i++) {
            reached += p[i] / sum;
            if (reached >= settings.topP()) {
                return i + 1;
            }
        }
        return p.length;
    }
}
