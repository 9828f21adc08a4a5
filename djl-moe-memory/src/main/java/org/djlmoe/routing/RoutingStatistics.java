package org.djlmoe.routing;

import java.util.Arrays;

/**
 * What a router did with the tokens of one forward pass; tokens that a mask excludes do not count.
 *
 * @param tokens N, the tokens that count
 * @param routes how many routes each expert got, [E]; together N k
 * @param balanceLoss E * sum f_e P_e, with f_e the routes to expert e a token and P_e its mean
 *     probability: k if the load or the probabilities are even; 0 without tokens
 * @param zLoss mean squared log-sum-exp of the logits; 0 without tokens
 */
public record RoutingStatistics(long tokens, long[] routes, double balanceLoss, double zLoss) {

    /** Copies the array. */
    public RoutingStatistics {
        routes = routes.clone();
    }

    /**
     * Computes statistics from a router's sums.
     *
     * @param sums [2 E + 2], as {@code ExpertKernels.route} makes them
     * @return the statistics
     */
    public static RoutingStatistics of(double[] sums) {
        int experts = (sums.length - 2) / 2;
        long[] routes = new long[experts];
        double product = 0;
        for (int e = 0; e < experts; e++) {
            routes[e] = Math.round(sums[experts + e]);
            product += sums[e] * sums[experts + e];
        }
        double tokens = sums[2 * experts + 1];
        double divisor = Math.max(1, tokens);
        return new RoutingStatistics(
                Math.round(tokens),
                routes,
                experts * product / (divisor * divisor),
                sums[2 * experts] / divisor);
    }

    @Override
    public long[] routes() {
        return routes.clone();
    }

    /**
     * Returns how unevenly the load is spread.
     *
     * @return routes of the busiest expert over the mean, from 1 to E; 1 without tokens
     */
    public double maxOverMean() {
        long total = total();
        long most = Arrays.stream(routes).max().orElse(0);
        return total == 0 ? 1 : (double) most * routes.length / total;
    }

    /**
     * Returns the entropy of the load.
     *
     * @return - sum s ln s over the experts' shares s of the routes, in nats: ln E if even, 0 if
     *     one expert gets everything; 0 without tokens
     */
    public double entropy() {
        double total = total();
        double entropy = 0;
        for (long r : routes) {
            entropy -= r == 0 ? 0 : r / total * Math.log(r / total);
        }
        return entropy;
    }

    /**
     * Returns the number of experts that got no token.
     *
     * @return 0 to E
     */
    public int idleExperts() {
        return (int) Arrays.stream(routes).filter(r -> r == 0).count();
    }

    private long total() {
        return Arrays.stream(routes).sum();
    }
}
