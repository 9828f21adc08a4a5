package org.djlmoe.maskcoft;

import java.util.Arrays;
import java.util.SplittableRandom;
import org.djlmoe.routing.ExpertMask;

/**
 * What masks are drawn from: a logit theta per expert and layer, how far draws stray, and how many
 * experts are kept. The randomness of a draw comes from (seed, step, sample, layer) alone.
 *
 * @param theta mask logits, [layers, experts], finite
 * @param temperature tau, above 0, in the unit of theta
 * @param budget how many experts are kept
 * @param seed decides every draw
 */
public record MaskScores(double[][] theta, double temperature, MaskBudget budget, long seed) {

    /** Checks the logits and copies them. */
    public MaskScores {
        if (!(temperature > 0) || Double.isInfinite(temperature)) {
            throw new IllegalArgumentException(
                    "temperature is " + temperature + ": it must be finite and above 0");
        }
        theta = Arrays.stream(theta).map(double[]::clone).toArray(double[][]::new);
        for (int l = 0; l < theta.length; l++) {
            if (!Arrays.stream(theta[l]).allMatch(Double::isFinite)) {
                throw new IllegalArgumentException(
                        "theta of layer " + l + " is not finite: " + Arrays.toString(theta[l]));
            }
        }
    }

    /** The mask logits, [layers, experts]; a copy. */
    @Override
    public double[][] theta() {
        return Arrays.stream(theta).map(double[]::clone).toArray(double[][]::new);
    }

    int layers() {
        return theta.length;
    }

    int experts() {
        return theta[0].length;
    }

    /** Layer may be the number of layers, for what the layers draw together. */
    SplittableRandom random(int step, int sample, int layer) {
        return new SplittableRandom(mix(mix(mix(mix(seed) + step) + sample) + layer));
    }

    /** The mask of the logits themselves. */
    ExpertMask top() {
        return budget.top(theta);
    }

    /**
     * The 64-bit finaliser of MurmurHash3 by A. Appleby, after a Weyl increment so that 0 moves.
     */
    private static long mix(long z) {
        z += 0x9e3779b97f4a7c15L;
        z = (z ^ (z >>> 33)) * 0xff51afd7ed558ccdL;
        z = (z ^ (z >>> 33)) * 0xc4ceb9fe1a85ec53L;
        return z ^ (z >>> 33);
    }
}
