package org.djlmoe.cache;

import org.djlmoe.routing.TokenSelector;

/**
 * Chooses as the router would and measures D, the mean over tokens of the largest minus the
 * smallest logit of a layer: the unit of {@link CachePrior}. A static prior is left out of account.
 */
public final class LogitRange implements TokenSelector {

    private double sum;
    private long tokens;

    /** Makes one that has seen nothing. */
    public LogitRange() {
        // Nothing is known yet.
    }

    @Override
    public void select(double[] logits, double[] added, int[] chosen) {
        double least = Double.POSITIVE_INFINITY;
        double most = Double.NEGATIVE_INFINITY;
        for (double z : logits) {
            least = Math.min(least, z);
            most = Math.max(most, z);
        }
        sum += most - least;
        tokens++;
        TokenSelector.top(logits, logits, 0, chosen);
    }

    /**
     * Returns D.
     *
     * @return the mean range, in logits
     * @throws IllegalStateException if no token was seen
     */
    public double mean() {
        if (tokens == 0) {
            throw new IllegalStateException("No token to measure a range from");
        }
        return sum / tokens;
    }
}
