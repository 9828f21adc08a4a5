package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import org.djlmoe.routing.ExpertMask;
import org.junit.jupiter.api.Test;

class MaskLearningTest {

    private static MaskLearning.Builder builder() {
        return MaskLearning.builder().setNumLayers(2).setNumExperts(4).setKept(2).setTopK(1);
    }

    /** The mean estimate over many steps is the gradient of the enumerated expected loss. */
    @Test
    void gradient_meanOverSteps_isExactGradientOfExpectedLoss() {
        double[] theta = {0.3, -0.5, 0.2, 0};
        double[] exact = new double[4];
        double h = 1e-5;
        for (int e = 0; e < 4; e++) {
            double[] up = theta.clone();
            double[] down = theta.clone();
            up[e] += h;
            down[e] -= h;
            exact[e] = (expectedLoss(up) - expectedLoss(down)) / (2 * h);
        }
        for (int m : new int[] {2, 3}) {
            MaskLearning learning =
                    MaskLearning.builder()
                            .setNumLayers(1)
                            .setNumExperts(4)
                            .setKept(2)
                            .setTopK(2)
                            .optTheta(new double[][] {theta})
                            .optSamples(m)
                            .build();
            int steps = 100_000;
            double[] sum = new double[4];
            double[] squares = new double[4];
            for (int step = 0; step < steps; step++) {
                List<MaskSample> samples = learning.propose(step);
                double[] g = learning.gradient(samples, losses(samples))[0];
                for (int e = 0; e < 4; e++) {
                    sum[e] += g[e];
                    squares[e] += g[e] * g[e];
                }
            }
            for (int e = 0; e < 4; e++) {
                double mean = sum[e] / steps;
                double error = Math.sqrt((squares[e] / steps - mean * mean) / steps);
                assertEquals(exact[e], mean, 4 * error, "expert " + e + ", M = " + m);
                assertTrue(error < 0.01);
            }
        }
    }

    private static double expectedLoss(double[] theta) {
        PlackettLuce pl = new PlackettLuce(theta, 1, 2);
        return PlackettLuceTest.orders(4, 2).stream()
                .mapToDouble(o -> Math.exp(pl.logProbability(o)) * loss(o[0], o[1]))
                .sum();
    }

    private static double[] losses(List<MaskSample> samples) {
        return samples.stream()
                .mapToDouble(s -> loss(s.mask().experts(0)[0], s.mask().experts(0)[1]))
                .toArray();
    }

    /** A symmetric table without structure, and far from mean 0. */
    private static double loss(int a, int b) {
        double[][] table = {{0, 3.1, 2.2, 5.0}, {0, 0, 2.9, 3.3}, {0, 0, 0, 4.1}};
        return table[Math.min(a, b)][Math.max(a, b)];
    }

    /**
     * Two useful experts start just below the cut, where a straight-through gradient is zero. Both
     * come back, in a layer beside another one whose losses are noise to it.
     */
    @Test
    void update_usefulExpertsJustBelowTheCut_areReadmitted() {
        int readmitted = 0;
        for (int seed = 0; seed < 100; seed++) {
            double[] below = {0.1, 0.1, 0.1, 0, 0.1, 0, 0.1, 0.1};
            MaskLearning learning =
                    MaskLearning.builder()
                            .setNumLayers(2)
                            .setNumExperts(8)
                            .setKept(6)
                            .setTopK(2)
                            .optTheta(new double[][] {below, below})
                            .optSamples(6)
                            .optSeed(seed)
                            .build();
            assertFalse(learning.mask().isKept(0, 3) || learning.mask().isKept(0, 5));
            SplittableRandom noise = new SplittableRandom(seed);
            for (int step = 0; step < 60; step++) {
                List<MaskSample> samples = learning.propose(step);
                double batch = noise.nextDouble();
                double[] losses =
                        samples.stream()
                                .mapToDouble(s -> 4 + batch + toyLoss(s.mask(), noise))
                                .toArray();
                learning.update(samples, losses);
            }
            ExpertMask mask = learning.mask();
            readmitted += mask.isKept(0, 3) && mask.isKept(0, 5) ? 1 : 0;
        }
        assertTrue(readmitted >= 95, readmitted + " of 100");
    }

    /** In layer 0 dropping expert 3 or 5 costs 0.3 each; in layer 1 every expert costs a little. */
    private static double toyLoss(ExpertMask mask, SplittableRandom noise) {
        double loss = 0.1 * noise.nextDouble();
        loss += mask.isKept(0, 3) ? 0 : 0.3;
        loss += mask.isKept(0, 5) ? 0 : 0.3;
        for (int e = 0; e < 8; e++) {
            loss += mask.isKept(1, e) ? 0 : 0.02 * e;
        }
        return loss;
    }

    @Test
    void propose_sameSeedAndStep_sameMasks() {
        MaskLearning a = builder().optSeed(5).build();
        MaskLearning b = builder().optSeed(5).build();
        // Steps need not be proposed in order, nor one at a time.
        a.propose(0);
        assertEquals(masks(a.propose(7)), masks(b.propose(7)));
        assertNotEquals(masks(a.propose(7)), masks(a.propose(8)));
        assertNotEquals(masks(a.propose(7)), masks(builder().optSeed(6).build().propose(7)));
        for (int step = 0; step < 20; step++) {
            List<MaskSample> sa = a.propose(step);
            List<MaskSample> sb = b.propose(step);
            a.update(sa, losses(sa));
            b.update(sb, losses(sb));
        }
        assertTrue(Arrays.deepEquals(a.theta(), b.theta()));
    }

    /** Layers and samples with the same theta must not share their noise. */
    @Test
    void propose_layersAndSamples_drawIndependently() {
        MaskLearning learning =
                MaskLearning.builder()
                        .setNumLayers(2)
                        .setNumExperts(4)
                        .setKept(1)
                        .setTopK(1)
                        .optSamples(2)
                        .build();
        int steps = 8000;
        int layers = 0;
        int samples = 0;
        int inTime = 0;
        int before = -1;
        for (int step = 0; step < steps; step++) {
            List<MaskSample> s = learning.propose(step);
            int first = s.get(0).mask().experts(0)[0];
            layers += first == s.get(0).mask().experts(1)[0] ? 1 : 0;
            samples += first == s.get(1).mask().experts(0)[0] ? 1 : 0;
            inTime += first == before ? 1 : 0;
            before = first;
        }
        double sigma = Math.sqrt(0.25 * 0.75 / steps);
        for (int same : new int[] {layers, samples, inTime}) {
            assertEquals(0.25, same / (double) steps, 4 * sigma);
        }
    }

    @Test
    void propose_everyMask_keepsN() {
        for (MaskSample s : builder().setKept(3).build().propose(0)) {
            assertEquals(3, s.mask().count(0));
            assertEquals(3, s.mask().count(1));
        }
    }

    @Test
    void update_nonFiniteLosses_areDroppedAndCounted() {
        MaskLearning learning = builder().optSamples(4).build();
        MaskLearning reference = builder().optSamples(4).build();
        List<MaskSample> samples = learning.propose(0);
        learning.update(samples, new double[] {1, Double.NaN, 3, Double.POSITIVE_INFINITY});
        assertEquals(2, learning.droppedSamples());
        List<MaskSample> same = reference.propose(0);
        reference.update(List.of(same.get(0), same.get(2)), new double[] {1, 3});
        assertArrayEquals(reference.theta()[0], learning.theta()[0]);
        assertArrayEquals(reference.theta()[1], learning.theta()[1]);
    }

    @Test
    void update_fewerThanTwoFiniteLosses_isRefusedAndChangesNothing() {
        MaskLearning learning = builder().optSamples(3).build();
        List<MaskSample> samples = learning.propose(0);
        double[] losses = {1, Double.NaN, Double.NaN};
        String message =
                assertThrows(IllegalArgumentException.class, () -> learning.update(samples, losses))
                        .getMessage();
        assertTrue(message.contains("Only 1 of 3 losses are finite"), message);
        assertArrayEquals(new double[4], learning.theta()[0]);
        assertEquals(0, learning.droppedSamples());
        learning.update(samples, new double[] {1, 2, 3});
        assertEquals(1, learning.updates());
    }

    @Test
    void update_equalLosses_moveNothing() {
        MaskLearning learning = builder().build();
        learning.update(learning.propose(0), new double[] {2, 2, 2, 2, 2, 2, 2, 2});
        assertArrayEquals(new double[4], learning.theta()[0]);
    }

    @Test
    void update_staleSamples_areRefused() {
        MaskLearning learning = builder().build();
        List<MaskSample> samples = learning.propose(0);
        double[] losses = losses(samples);
        learning.update(samples, losses);
        assertThrows(IllegalArgumentException.class, () -> learning.update(samples, losses));
        assertThrows(
                IllegalArgumentException.class,
                () -> learning.update(learning.propose(1), new double[1]));
    }

    @Test
    void mask_equalTheta_keepsLowerIds() {
        assertArrayEquals(new int[] {0, 1}, builder().build().mask().experts(1));
    }

    @Test
    void build_initialUsage_standardisesLogCounts() {
        long[][] usage = {{0, 9, 99, 999}, {5, 5, 5, 5}};
        MaskLearning learning = builder().optInitialUsage(usage, 2).build();
        double[] theta = learning.theta()[0];
        assertEquals(0, Arrays.stream(theta).sum(), 1e-12);
        assertEquals(4, Arrays.stream(theta).map(t -> t * t).average().orElseThrow(), 1e-12);
        // log 1, 10, 100, 1000 are evenly spaced.
        assertEquals(theta[1] - theta[0], theta[3] - theta[2], 1e-12);
        assertArrayEquals(new double[4], learning.theta()[1]);
        assertEquals(ExpertMask.mostFrequent(usage, 2), learning.mask());
    }

    @Test
    void build_badSettings_areRefused() {
        assertRefused(builder().setKept(5), "Cannot keep 5");
        assertRefused(builder().setTopK(3), "topK (3)");
        assertRefused(builder().setTopK(0), "topK");
        assertRefused(builder().optSamples(1), "samples");
        assertRefused(builder().optTemperature(0), "temperature");
        assertRefused(builder().optLearningRate(Double.NaN), "learningRate");
        assertRefused(builder().optTheta(new double[1][4]), "1 layers");
        assertRefused(builder().optTheta(new double[2][3]), "3 experts");
        assertRefused(builder().optInitialUsage(new long[2][3], 1), "3 experts");
        assertRefused(
                builder().optInitialUsage(new long[][] {{-1, 0, 0, 0}, {0, 0, 0, 0}}, 1),
                "below 0");
        assertRefused(
                builder().optTheta(new double[2][4]).optInitialUsage(new long[2][4], 1), "both");
    }

    private static void assertRefused(MaskLearning.Builder builder, String word) {
        String message = assertThrows(IllegalArgumentException.class, builder::build).getMessage();
        assertTrue(message.contains(word), message);
    }

    private static List<ExpertMask> masks(List<MaskSample> samples) {
        return samples.stream().map(MaskSample::mask).toList();
    }
}
