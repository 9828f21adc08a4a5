package org.djlmoe.maskcoft;

import java.util.Arrays;
import java.util.SplittableRandom;

/**
 * A distribution over which n of E experts are kept, with a score for every one of them.
 *
 * <p>Experts are drawn one after the other without replacement, each with probability softmax(theta
 * / tau) among those that are left, and the first n are kept:
 *
 * <pre>log P(order) = sum over j of [theta[o_j] / tau - logsumexp(theta[e] / tau, e not yet drawn)]
 * </pre>
 *
 * Sorting theta + tau * Gumbel noise draws from it (R. D. Luce, 1959; R. L. Plackett, 1975). Every
 * expert stands in some of the sums, so the gradient of log P also credits those that were
 * <em>not</em> kept. A straight-through gradient gives them exactly zero, and an expert below the
 * cut stays there.
 *
 * <p>The gradient is that of the ordered prefix: its expectation is the gradient for the kept set,
 * with somewhat more variance, at O(n E) instead of a sum over n! orders.
 *
 * <p>Double precision throughout; immutable.
 */
public final class PlackettLuce {

    private final double[] scores;
    private final double tau;
    private final int n;

    /**
     * Makes the distribution of one layer.
     *
     * @param theta the mask logits, [experts], finite; copied
     * @param tau the temperature, above 0: towards 0 the top n of theta, towards infinity uniform
     * @param n how many are kept, 1 to the number of experts
     */
    public PlackettLuce(double[] theta, double tau, int n) {
        if (!(tau > 0) || Double.isInfinite(tau)) {
            throw new IllegalArgumentException(
                    "The temperature is " + tau + ": it must be finite and above 0");
        }
        if (n < 1 || n > theta.length) {
            throw new IllegalArgumentException(
                    "Cannot keep %d of %d experts".formatted(n, theta.length));
        }
        for (int e = 0; e < theta.length; e++) {
            if (!Double.isFinite(theta[e])) {
                throw new IllegalArgumentException("theta of expert " + e + " is " + theta[e]);
            }
        }
        this.tau = tau;
        this.n = n;
        scores = Arrays.stream(theta).map(t -> t / tau).toArray();
    }

    /**
     * Draws which experts are kept.
     *
     * @param random the only source of chance; E draws are taken from it
     * @return the n kept ids in the order in which they were drawn
     */
    public int[] sample(SplittableRandom random) {
        double[] noisy = new double[scores.length];
        for (int e = 0; e < noisy.length; e++) {
            noisy[e] = scores[e] + gumbel(random);
        }
        boolean[] taken = new boolean[noisy.length];
        int[] order = new int[n];
        for (int j = 0; j < n; j++) {
            int best = -1;
            for (int e = 0; e < noisy.length; e++) {
                if (!taken[e] && (best < 0 || noisy[e] > noisy[best])) {
                    best = e;
                }
            }
            taken[best] = true;
            order[j] = best;
        }
        return order;
    }

    /** Draws standard Gumbel noise. */
    static double gumbel(SplittableRandom random) {
        // The half step keeps the uniform number off 0, where the noise would be -infinity.
        double u = random.nextDouble() + 0x1p-54;
        return -Math.log(-Math.log(u));
    }

    /**
     * Returns the logarithm of the probability of an order.
     *
     * @param order n distinct ids, as drawn by {@link #sample}
     * @return log P, at most 0
     */
    public double logProbability(int[] order) {
        boolean[] drawn = check(order);
        double logP = 0;
        for (int expert : order) {
            logP += scores[expert] - logSumExp(drawn);
            drawn[expert] = true;
        }
        return logP;
    }

    /**
     * Returns the gradient of log P with respect to theta.
     *
     * @param order n distinct ids, as drawn by {@link #sample}
     * @return d log P / d theta, [experts]; it sums to 0
     */
    public double[] gradient(int[] order) {
        boolean[] drawn = check(order);
        double[] gradient = new double[scores.length];
        for (int expert : order) {
            double logSum = logSumExp(drawn);
            gradient[expert] += 1 / tau;
            for (int e = 0; e < scores.length; e++) {
                if (!drawn[e]) {
                    gradient[e] -= Math.exp(scores[e] - logSum) / tau;
                }
            }
            drawn[expert] = true;
        }
        return gradient;
    }

    private double logSumExp(boolean[] drawn) {
        double max = Double.NEGATIVE_INFINITY;
        for (int e = 0; e < scores.length; e++) {
            max = drawn[e] ? max : Math.max(max, scores[e]);
        }
        double sum = 0;
        for (int e = 0; e < scores.length; e++) {
            sum += drawn[e] ? 0 : Math.exp(scores[e] - max);
        }
        return max + Math.log(sum);
    }

    /** Returns a fresh array of marks. */
    private boolean[] check(int[] order) {
        boolean[] seen = new boolean[scores.length];
        if (order.length != n) {
            throw new IllegalArgumentException(
                    "An order of %d experts where %d are kept".formatted(order.length, n));
        }
        for (int e : order) {
            if (e < 0 || e >= seen.length || seen[e]) {
                throw new IllegalArgumentException(
                        "Expert %d is not one of 0..%d, or there twice"
                                .formatted(e, seen.length - 1));
            }
            seen[e] = true;
        }
        return new boolean[scores.length];
    }
}
