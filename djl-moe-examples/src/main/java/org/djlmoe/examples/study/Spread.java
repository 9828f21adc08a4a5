package org.djlmoe.examples.study;

import java.util.Arrays;
import java.util.Locale;

/**
 * Mean and sample standard deviation of a figure over seeds.
 *
 * @param mean the mean
 * @param deviation the sample standard deviation, 0 for one seed
 * @param count how many seeds
 */
public record Spread(double mean, double deviation, int count) {

    /**
     * Computes both.
     *
     * @param values a value a seed, at least one
     * @return the spread
     */
    public static Spread of(double... values) {
        double mean =
                Arrays.stream(values)
                        .average()
                        .orElseThrow(() -> new IllegalArgumentException("No value to average"));
        double squares = Arrays.stream(values).map(v -> (v - mean) * (v - mean)).sum();
        return new Spread(
                mean,
                values.length < 2 ? 0 : Math.sqrt(squares / (values.length - 1)),
                values.length);
    }

    /** Writes mean and deviation, the latter if there are seeds to differ. */
    @Override
    public String toString() {
        return count < 2
                ? String.format(Locale.ROOT, "%.3f", mean)
                : String.format(Locale.ROOT, "%.3f ± %.3f", mean, deviation);
    }
}
