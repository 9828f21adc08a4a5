package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.stream.LongStream;
import org.djlmoe.routing.ExpertMask;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestReporter;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.MethodSource;

class MaskEstimatorTest {

    private static final double[][] THETA = {{0.3, -0.5, 0.2, 0}, {1, 0.1, 0.4, -0.2}};

    static List<MaskEstimator> estimators() {
        return List.of(
                MaskEstimator.plackettLuce(), MaskEstimator.gumbel(), MaskEstimator.dense(1));
    }

    private static MaskScores scores(MaskBudget budget, double tau, long seed) {
        return new MaskScores(THETA, tau, budget, seed);
    }

    /** Straight through, an expert below the cut stays there; scores of draws credit it. */
    @Test
    void toy_twoUsefulExpertsBelowTheCut_plackettLuceAdmitsBoth(TestReporter reporter) {
        // Nothing would be shown where the best mask drops one of them.
        assertTrue(LongStream.range(0, 100).allMatch(ToyMoe::bestMaskKeepsBoth));
        Map<String, Integer> shares = ToyMoe.shares();
        shares.forEach((name, n) -> reporter.publishEntry(name, n + " of 100"));
        int best = shares.get(MaskEstimator.plackettLuce().toString());
        assertTrue(best >= 95, shares.toString());
        assertTrue(shares.values().stream().allMatch(n -> n <= best), shares.toString());
    }

    @ParameterizedTest
    @MethodSource("estimators")
    void draw_anyBudget_keepsItAndDependsOnSeedStepAndSampleAlone(MaskEstimator estimator) {
        for (MaskBudget budget : List.of(MaskBudget.perLayer(2), new MaskBudget(1, 3))) {
            List<ExpertMask> masks = new ArrayList<>();
            for (int step = 0; step < 40; step++) {
                for (int i = 0; i < 2; i++) {
                    MaskSample drawn = estimator.draw(scores(budget, 1, 7), step, i);
                    MaskSample again = estimator.draw(scores(budget, 1, 7), step, i);
                    assertEquals(drawn.mask(), again.mask());
                    assertArrayEquals(drawn.credit(1), again.credit(1));
                    int total = drawn.mask().count(0) + drawn.mask().count(1);
                    assertEquals(budget.total(2), total);
                    for (int l = 0; l < 2; l++) {
                        assertTrue(drawn.mask().count(l) >= budget.floor());
                    }
                    masks.add(drawn.mask());
                }
            }
            assertTrue(masks.stream().distinct().count() > 5, "draws hardly differ");
            assertNotEquals(
                    masks,
                    masks(estimator, scores(budget, 1, 8)),
                    "another seed draws the same masks");
        }
    }

    private static List<ExpertMask> masks(MaskEstimator estimator, MaskScores scores) {
        List<ExpertMask> masks = new ArrayList<>();
        for (int step = 0; step < 40; step++) {
            for (int i = 0; i < 2; i++) {
                masks.add(estimator.draw(scores, step, i).mask());
            }
        }
        return masks;
    }

    /** With a shared budget log P is that of the floors and the pool: its gradient is unbiased. */
    @Test
    void plackettLuce_sharedBudget_meanGradientIsThatOfTheEnumeratedLoss() {
        MaskBudget budget = new MaskBudget(1, 2);
        double h = 1e-5;
        double[][] exact = new double[2][3];
        double[][] theta = {{0.3, -0.5, 0.2}, {0.8, 0.1, -0.2}};
        for (int l = 0; l < 2; l++) {
            for (int e = 0; e < 3; e++) {
                double[][] up = {theta[0].clone(), theta[1].clone()};
                double[][] down = {theta[0].clone(), theta[1].clone()};
                up[l][e] += h;
                down[l][e] -= h;
                exact[l][e] = (expectedLoss(up) - expectedLoss(down)) / (2 * h);
            }
        }
        MaskEstimator estimator = MaskEstimator.plackettLuce();
        MaskScores scores = new MaskScores(theta, 1, budget, 3);
        int steps = 60_000;
        double[][] sum = new double[2][3];
        double[][] squares = new double[2][3];
        for (int step = 0; step < steps; step++) {
            List<MaskSample> samples = new ArrayList<>();
            List<MaskOutcome> outcomes = new ArrayList<>();
            for (int i = 0; i < 3; i++) {
                samples.add(estimator.draw(scores, step, i));
                outcomes.add(MaskOutcome.of(loss(samples.get(i).mask())));
            }
            double[][] g = estimator.gradient(samples, outcomes);
            for (int l = 0; l < 2; l++) {
                for (int e = 0; e < 3; e++) {
                    sum[l][e] += g[l][e];
                    squares[l][e] += g[l][e] * g[l][e];
                }
            }
        }
        double largest = 0;
        for (int l = 0; l < 2; l++) {
            for (int e = 0; e < 3; e++) {
                double mean = sum[l][e] / steps;
                double error = Math.sqrt((squares[l][e] / steps - mean * mean) / steps);
                assertEquals(exact[l][e], mean, 4 * error, "layer " + l + " expert " + e);
                largest = Math.max(largest, Math.abs(mean) / error);
            }
        }
        assertTrue(largest > 20, "too noisy to tell: " + largest);
    }

    private static double loss(ExpertMask mask) {
        double loss = 2;
        for (int l = 0; l < 2; l++) {
            for (int e = 0; e < 3; e++) {
                loss += mask.isKept(l, e) ? 0 : (1 + l) * (0.5 + 0.7 * e * e);
            }
            loss += mask.count(l) == 3 ? 0.4 : 0;
        }
        return loss;
    }

    /** Over first draws of both layers and ordered pairs from the four experts left. */
    private static double expectedLoss(double[][] theta) {
        double expected = 0;
        for (int a = 0; a < 3; a++) {
            for (int b = 0; b < 3; b++) {
                double p = share(theta[0], a) * share(theta[1], b);
                List<int[]> left = new ArrayList<>();
                for (int e = 0; e < 3; e++) {
                    if (e != a) {
                        left.add(new int[] {0, e});
                    }
                    if (e != b) {
                        left.add(new int[] {1, e});
                    }
                }
                double[] pool = left.stream().mapToDouble(at -> theta[at[0]][at[1]]).toArray();
                PlackettLuce pl = new PlackettLuce(pool, 1, 2);
                for (int[] order : PlackettLuceTest.orders(4, 2)) {
                    boolean[][] kept = new boolean[2][3];
                    kept[0][a] = true;
                    kept[1][b] = true;
                    for (int i : order) {
                        kept[left.get(i)[0]][left.get(i)[1]] = true;
                    }
                    expected += p * Math.exp(pl.logProbability(order)) * loss(ExpertMask.of(kept));
                }
            }
        }
        return expected;
    }

    private static double share(double[] theta, int e) {
        return Math.exp(theta[e]) / Arrays.stream(theta).map(Math::exp).sum();
    }

    /** Which layer gets the shared places is learnt: the second one's experts matter more. */
    @Test
    void learning_sharedBudget_placesGoToTheLayerThatNeedsThem() {
        MaskLearning learning =
                MaskLearning.builder()
                        .setNumLayers(2)
                        .setNumExperts(6)
                        .setBudget(MaskBudget.total(8, 2, 2))
                        .setTopK(2)
                        .build();
        for (int step = 0; step < 80; step++) {
            List<MaskSample> samples = learning.propose(step);
            double[] losses =
                    samples.stream()
                            .mapToDouble(
                                    s ->
                                            0.05 * (6 - s.mask().count(0))
                                                    + 0.4 * (6 - s.mask().count(1)))
                            .toArray();
            learning.update(samples, losses);
        }
        assertEquals(2, learning.mask().count(0), learning.mask().toString());
        assertEquals(6, learning.mask().count(1), learning.mask().toString());
    }

    /** s' = s (1 - s) / tau at the distance to a threshold half-way between kept and dropped. */
    @Test
    void straightThrough_withoutNoise_slopesOfTheSigmoid() {
        MaskSample sample =
                new StraightThrough(false, 0).draw(scores(MaskBudget.perLayer(2), 0.5, 0), 0, 0);
        assertArrayEquals(new int[] {0, 2}, sample.mask().experts(0));
        double b = 0.1;
        for (int e = 0; e < 4; e++) {
            double s = 1 / (1 + Math.exp(-(THETA[0][e] - b) / 0.5));
            assertEquals(s * (1 - s) / 0.5, sample.credit(0)[e], 1e-12);
        }
        // Nothing dropped, nothing to learn.
        MaskSample all =
                new StraightThrough(false, 0).draw(scores(MaskBudget.perLayer(4), 0.5, 0), 0, 0);
        assertArrayEquals(new double[4], all.credit(0));
    }

    @Test
    void straightThrough_gradient_isTheMeanOfFactorsTimesSlopes() {
        MaskEstimator gumbel = MaskEstimator.gumbel();
        MaskScores scores = scores(MaskBudget.perLayer(2), 1, 4);
        List<MaskSample> samples = List.of(gumbel.draw(scores, 0, 0), gumbel.draw(scores, 0, 1));
        double[][] first = {{1, 2, 3, 4}, {0, 0, 0, 0}};
        double[][] second = {{0, 0, 0, -4}, {5, 0, 0, 0}};
        double[][] g =
                gumbel.gradient(
                        samples, List.of(new MaskOutcome(1, first), new MaskOutcome(9, second)));
        double[] a = samples.get(0).credit(0);
        double[] b = samples.get(1).credit(0);
        assertEquals((4 * a[3] - 4 * b[3]) / 2, g[0][3], 1e-12);
        assertEquals(a[1], g[0][1], 1e-12);
        assertEquals(2.5 * samples.get(1).credit(1)[0], g[1][0], 1e-12);
        assertEquals(0, g[1][2]);
    }

    @Test
    void learning_straightThroughWithLossesAlone_refused() {
        MaskLearning learning =
                MaskLearning.builder()
                        .setNumLayers(1)
                        .setNumExperts(4)
                        .setKept(2)
                        .setTopK(1)
                        .optSamples(1)
                        .optEstimator(MaskEstimator.gumbel())
                        .build();
        IllegalArgumentException e =
                assertThrows(
                        IllegalArgumentException.class,
                        () -> learning.update(learning.propose(0), new double[] {1}));
        assertTrue(e.getMessage().contains("d loss / d factor"), e.getMessage());
        double[][] broken = {{1, Double.NaN, 0, 0}};
        assertThrows(
                IllegalArgumentException.class,
                () -> learning.update(learning.propose(0), List.of(new MaskOutcome(1, broken))));
        assertArrayEquals(new double[4], learning.theta()[0]);
    }

    @Test
    void budget_outOfRange_refused() {
        assertThrows(IllegalArgumentException.class, () -> MaskBudget.total(3, 2, 2));
        assertThrows(IllegalArgumentException.class, () -> new MaskBudget(0, 4));
        assertThrows(IllegalArgumentException.class, () -> new MaskBudget(2, 9).check(2, 2, 6));
        assertThrows(IllegalArgumentException.class, () -> MaskBudget.perLayer(1).check(2, 2, 6));
        assertThrows(IllegalArgumentException.class, () -> ExpertMask.topN(new double[2][6], 2, 9));
        assertThrows(IllegalArgumentException.class, () -> MaskEstimator.dense(0));
        // Equal scores: every layer's lowest ids, then the lower layer's.
        ExpertMask mask = MaskBudget.total(7, 2, 2).top(new double[2][6]);
        assertArrayEquals(new int[] {0, 1, 2, 3, 4}, mask.experts(0));
        assertArrayEquals(new int[] {0, 1}, mask.experts(1));
    }
}
