package org.djlmoe.examples.study;

import java.util.Arrays;
import java.util.Locale;

/**
 * A figure of two arms on the same seeds, compared seed by seed; less is better.
 *
 * @param wins in how many seeds the first arm has strictly less
 * @param seeds how many seeds both arms have
 * @param difference first less second
 * @param relative first / second - 1
 */
public record Paired(int wins, int seeds, Spread difference, Spread relative) {

    /**
     * Compares.
     *
     * @param first a value a seed
     * @param second the same seeds in the same order
     * @return the comparison
     * @throws IllegalArgumentException if there are not as many values, or none
     */
    public static Paired of(double[] first, double[] second) {
        if (first.length != second.length || first.length == 0) {
            throw new IllegalArgumentException(
                    "Pairs take as many values of each, at least one: there are %d and %d"
                            .formatted(first.length, second.length));
        }
        double[] difference = new double[first.length];
        double[] relative = new double[first.length];
        Arrays.setAll(difference, i -> first[i] - second[i]);
        Arrays.setAll(relative, i -> first[i] / second[i] - 1);
        return new Paired(
                (int) Arrays.stream(difference).filter(d -> d < 0).count(),
                first.length,
                Spread.of(difference),
                Spread.of(relative));
    }

    /**
     * Writes the relative difference in percent, with its deviation if there are seeds to differ.
     *
     * @return such as {@code -16.5 % ± 0.4}
     */
    public String percent() {
        String mean = String.format(Locale.ROOT, "%+.1f %%", 100 * relative.mean());
        return seeds < 2
                ? mean
                : mean + String.format(Locale.ROOT, " ± %.1f", 100 * relative.deviation());
    }
}
