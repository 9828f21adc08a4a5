package org.djlmoe.training;

import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;

/**
 * Percentile bootstrap (B. Efron, 1979) of a mean of group means: within each group, as many values
 * as there are are drawn with replacement. It says how far a mean would move on other items of the
 * same kind; with few items (below about 20 a group) it is too narrow.
 */
public final class Bootstrap {

    private Bootstrap() {}

    /**
     * An interval.
     *
     * @param low its lower end
     * @param high its upper end
     */
    public record Interval(double low, double high) {}

    /**
     * Computes the interval of the mean of the groups' means.
     *
     * @param groups at least one, each with at least one value
     * @param resamples how many times to draw, at least 1
     * @param level the share of the draws that lies inside, between 0 and 1
     * @param seed decides every draw
     * @return the interval
     */
    public static Interval ofMeans(List<double[]> groups, int resamples, double level, long seed) {
        if (groups.isEmpty() || groups.stream().anyMatch(g -> g.length == 0)) {
            throw new IllegalArgumentException("A bootstrap needs at least one value a group");
        }
        if (resamples < 1 || !(level > 0 && level < 1)) {
            throw new IllegalArgumentException(
                    "A bootstrap needs a resample and a level between 0 and 1, not %d and %s"
                            .formatted(resamples, level));
        }
        SplittableRandom random = new SplittableRandom(seed);
        double[] means = new double[resamples];
        for (int i = 0; i < resamples; i++) {
            for (double[] group : groups) {
                double sum = 0;
                for (int j = 0; j < group.length; j++) {
                    sum += group[random.nextInt(group.length)];
                }
                means[i] += sum / group.length / groups.size();
            }
        }
        Arrays.sort(means);
        return new Interval(quantile(means, (1 - level) / 2), quantile(means, 1 - (1 - level) / 2));
    }

    private static double quantile(double[] sorted, double q) {
        double at = q * (sorted.length - 1);
        int low = (int) Math.floor(at);
        int high = Math.min(low + 1, sorted.length - 1);
        return sorted[low] + (at - low) * (sorted[high] - sorted[low]);
    }
}
