package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.SplittableRandom;
import org.junit.jupiter.api.Test;

class PlackettLuceTest {

    private static final double[] THETA = {0.3, -1.2, 0.8, 0.1};

    @Test
    void logProbability_ofAllOrders_sumsToOne() {
        PlackettLuce pl = new PlackettLuce(THETA, 0.7, 2);
        double sum = orders(4, 2).stream().mapToDouble(o -> Math.exp(pl.logProbability(o))).sum();
        assertEquals(1, sum, 1e-12);
    }

    /** exp(5000) is infinite, the probability is not. */
    @Test
    void logProbability_extremeTheta_staysFinite() {
        PlackettLuce pl = new PlackettLuce(new double[] {5000, -5000, 0}, 1, 2);
        assertEquals(0, pl.logProbability(new int[] {0, 2}), 1e-12);
        assertEquals(-10000, pl.logProbability(new int[] {1, 0}), 1e-9);
        for (double g : pl.gradient(new int[] {1, 0})) {
            assertTrue(Double.isFinite(g));
        }
    }

    @Test
    void gradient_matchesFiniteDifferences() {
        double h = 1e-5;
        for (int n = 1; n <= 4; n++) {
            for (int[] order : orders(4, n)) {
                double[] gradient = new PlackettLuce(THETA, 0.7, n).gradient(order);
                assertEquals(0, Arrays.stream(gradient).sum(), 1e-12);
                for (int e = 0; e < 4; e++) {
                    double[] up = THETA.clone();
                    double[] down = THETA.clone();
                    up[e] += h;
                    down[e] -= h;
                    double slope =
                            (new PlackettLuce(up, 0.7, n).logProbability(order)
                                            - new PlackettLuce(down, 0.7, n).logProbability(order))
                                    / (2 * h);
                    assertEquals(slope, gradient[e], 1e-8);
                }
            }
        }
    }

    /** Gumbel noise draws what logProbability says. */
    @Test
    void sample_frequencies_matchProbabilities() {
        PlackettLuce pl = new PlackettLuce(THETA, 0.7, 2);
        SplittableRandom random = new SplittableRandom(1);
        Map<String, Integer> count = new HashMap<>();
        int draws = 100_000;
        for (int i = 0; i < draws; i++) {
            count.merge(Arrays.toString(pl.sample(random)), 1, Integer::sum);
        }
        for (int[] order : orders(4, 2)) {
            double p = Math.exp(pl.logProbability(order));
            double sigma = Math.sqrt(p * (1 - p) / draws);
            double seen = count.getOrDefault(Arrays.toString(order), 0) / (double) draws;
            assertEquals(p, seen, 4 * sigma, Arrays.toString(order));
        }
    }

    @Test
    void constructor_badValues_areRefused() {
        assertThrows(IllegalArgumentException.class, () -> new PlackettLuce(THETA, 0, 2));
        assertThrows(IllegalArgumentException.class, () -> new PlackettLuce(THETA, Double.NaN, 2));
        assertThrows(IllegalArgumentException.class, () -> new PlackettLuce(THETA, 1, 0));
        assertThrows(IllegalArgumentException.class, () -> new PlackettLuce(THETA, 1, 5));
        assertThrows(
                IllegalArgumentException.class,
                () -> new PlackettLuce(new double[] {0, Double.NaN}, 1, 1));
        PlackettLuce pl = new PlackettLuce(THETA, 1, 2);
        assertThrows(IllegalArgumentException.class, () -> pl.gradient(new int[] {1}));
        assertThrows(IllegalArgumentException.class, () -> pl.gradient(new int[] {1, 1}));
        assertThrows(IllegalArgumentException.class, () -> pl.logProbability(new int[] {1, 4}));
    }

    /** All ordered choices of n out of experts. */
    static List<int[]> orders(int experts, int n) {
        List<int[]> orders = new ArrayList<>();
        orders.add(new int[0]);
        for (int j = 0; j < n; j++) {
            List<int[]> longer = new ArrayList<>();
            for (int[] head : orders) {
                for (int e = 0; e < experts; e++) {
                    int next = e;
                    if (Arrays.stream(head).noneMatch(h -> h == next)) {
                        int[] order = Arrays.copyOf(head, j + 1);
                        order[j] = e;
                        longer.add(order);
                    }
                }
            }
            orders = longer;
        }
        return orders;
    }
}
