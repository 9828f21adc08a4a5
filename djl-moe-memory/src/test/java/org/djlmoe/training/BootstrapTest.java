package org.djlmoe.training;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.djlmoe.training.Bootstrap.Interval;
import org.junit.jupiter.api.Test;

class BootstrapTest {

    @Test
    void ofMeans_equalValues_anIntervalOfNoWidth() {
        Interval interval =
                Bootstrap.ofMeans(List.of(new double[] {2, 2}, new double[] {4}), 50, 0.95, 1);
        assertEquals(new Interval(3, 3), interval);
    }

    @Test
    void ofMeans_sameSeed_sameInterval() {
        List<double[]> groups = List.of(new Random(1).doubles(30).toArray());
        Interval first = Bootstrap.ofMeans(groups, 500, 0.95, 7);
        assertEquals(first, Bootstrap.ofMeans(groups, 500, 0.95, 7));
        assertNotEquals(first, Bootstrap.ofMeans(groups, 500, 0.95, 8));
    }

    /** Against the normal interval of the mean, which many values approach. */
    @Test
    void ofMeans_manyValues_aboutTwoStandardErrorsEachWay() {
        double[] values = new Random(2).doubles(400).map(v -> v < 0.3 ? 1 : 0).toArray();
        double mean = Arrays.stream(values).average().orElseThrow();
        double error = Math.sqrt(mean * (1 - mean) / values.length);
        Interval interval = Bootstrap.ofMeans(List.of(values), 4000, 0.95, 3);
        assertEquals(mean - 1.96 * error, interval.low(), 0.15 * error);
        assertEquals(mean + 1.96 * error, interval.high(), 0.15 * error);
        // Two independent groups: the mean of both varies less by the square root of two.
        Interval both = Bootstrap.ofMeans(List.of(values, values), 4000, 0.95, 3);
        assertEquals(
                (interval.high() - interval.low()) / Math.sqrt(2),
                both.high() - both.low(),
                0.15 * error);
    }

    @Test
    void ofMeans_nothingToDrawFrom_refused() {
        List<double[]> one = List.of(new double[] {1});
        for (List<double[]> groups : List.of(List.<double[]>of(), List.of(new double[0]))) {
            assertThrows(
                    IllegalArgumentException.class, () -> Bootstrap.ofMeans(groups, 9, 0.9, 1));
        }
        assertThrows(IllegalArgumentException.class, () -> Bootstrap.ofMeans(one, 0, 0.9, 1));
        assertThrows(IllegalArgumentException.class, () -> Bootstrap.ofMeans(one, 9, 1, 1));
    }
}
