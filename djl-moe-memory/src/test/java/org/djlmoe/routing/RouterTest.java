package org.djlmoe.routing;

import static org.djlmoe.reference.Numbers.array;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.ParameterStore;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import net.jqwik.api.Arbitraries;
import net.jqwik.api.Arbitrary;
import net.jqwik.api.Combinators;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.Provide;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.reference.Numbers;
import org.junit.jupiter.api.Test;

/**
 * The tensor version of the selection, the bounded one and the one for autograd, against {@link
 * SelectionPrior#select}.
 */
class RouterTest {

    private static final int TOKENS = 6;

    /** A router whose logits are its inputs: the identity, without norm. */
    private record Case(
            SelectionPrior prior, boolean[] kept, int topK, boolean renormalize, double[] logits) {

        int experts() {
            return kept.length;
        }

        double[] token(int t) {
            return Arrays.copyOfRange(logits, t * experts(), (t + 1) * experts());
        }
    }

    @Property(tries = 150, seed = "11")
    void select_anyPrior_idsOfSelectionPriorAndUnbiasedCombineWeights(@ForAll("cases") Case c) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = router(manager, c);
            router.setPrior(c.kept, c.prior);
            NDArray x = array(manager, c.logits, TOKENS, c.experts());
            NDList plain = router.forward(new ParameterStore(manager, false), new NDList(x), false);
            NDList bounded = route(router, manager, x);
            for (int t = 0; t < TOKENS; t++) {
                int[] ids = c.prior.select(c.token(t), c.kept, c.topK);
                long[] expected = Arrays.stream(ids).asLongStream().toArray();
                assertArrayEquals(expected, bounded.get(0).get(t).toLongArray(), () -> "" + c);
                assertArrayEquals(expected, plain.get(0).get(t).toLongArray(), () -> "" + c);
                float[] combine = Numbers.floats(combine(c.token(t), ids, c.renormalize));
                assertArrayEquals(combine, bounded.get(1).get(t).toFloatArray(), 2e-6f);
                assertArrayEquals(combine, plain.get(1).get(t).toFloatArray(), 2e-6f);
            }
        }
    }

    @Provide
    Arbitrary<Case> cases() {
        Arbitrary<Integer> experts = Arbitraries.integers().between(1, 9);
        return Combinators.combine(
                        experts, Arbitraries.longs(), Arbitraries.integers().between(0, 3))
                .as(RouterTest::random);
    }

    /** Everything from one seed; a third of the logits are whole numbers, and so full of ties. */
    private static Case random(int experts, long seed, int protect) {
        Random random = new Random(seed);
        int topK = 1 + random.nextInt(experts);
        double spread = random.nextInt(3) == 0 ? 300 : 2;
        boolean whole = random.nextInt(3) == 0;
        double[] logits = new double[TOKENS * experts];
        Arrays.setAll(
                logits,
                i -> {
                    double z = random.nextGaussian() * spread;
                    return whole ? Math.rint(z) : (float) z;
                });
        boolean[] kept = new boolean[experts];
        for (int e = 0; e < experts; e++) {
            kept[e] = random.nextBoolean();
        }
        double[] strengths = {0, 0.125, 0.75, 3, 1e6, Double.POSITIVE_INFINITY};
        double beta = strengths[random.nextInt(strengths.length)];
        if (Double.isInfinite(beta)) {
            for (int e = 0, n = 0; n < topK && e < experts; e++) {
                kept[e] = kept[e] || experts - e <= topK - n;
                n += kept[e] ? 1 : 0;
            }
        }
        SelectionPrior.Form form =
                SelectionPrior.Form.values()[random.nextInt(SelectionPrior.Form.values().length)];
        SelectionPrior prior =
                new SelectionPrior(form, beta, Double.isInfinite(beta) ? 0 : protect, 2.5);
        return new Case(prior, kept, topK, random.nextBoolean(), logits);
    }

    /** From the unbiased softmax; in logarithms, because all chosen probabilities may underflow. */
    private static double[] combine(double[] logits, int[] ids, boolean renormalize) {
        double[] chosen = Arrays.stream(ids).mapToDouble(e -> logits[e]).toArray();
        double total = logSumExp(renormalize ? chosen : logits);
        return Arrays.stream(chosen).map(z -> Math.exp(z - total)).toArray();
    }

    private static double logSumExp(double[] z) {
        double max = Arrays.stream(z).max().orElseThrow();
        return max + Math.log(Arrays.stream(z).map(v -> Math.exp(v - max)).sum());
    }

    private static Router router(NDManager manager, Case c) {
        Router router = new Router(c.experts(), c.experts(), c.topK, c.renormalize, 0.02);
        router.initialize(manager, DataType.FLOAT32, new Shape(-1, c.experts()));
        NDArray identity = manager.eye(c.experts());
        identity.copyTo(router.weight().getArray());
        return router;
    }

    private static NDList route(Router router, NDManager manager, NDArray x) {
        List<NDArray> weights = new ArrayList<>();
        weights.add(TorchKernels.nothing());
        weights.add(router.weight().getArray());
        Shape routes = new Shape(x.getShape().get(0), router.topK());
        NDArray ids = manager.create(routes, DataType.INT64);
        NDArray combine = manager.create(routes);
        ExpertKernels.Settings settings =
                new ExpertKernels.Settings(router.topK(), 0, 0, false, router.renormalizes());
        ExpertScratch scratch =
                ExpertScratch.routing(manager, x.getShape().get(0), x.getShape().get(1));
        for (int i = 0; i < 2; i++) {
            ExpertKernels.route(
                    x,
                    i,
                    2,
                    weights,
                    settings,
                    router.selection(manager),
                    TorchKernels.nothing(),
                    TorchKernels.nothing(),
                    ids,
                    combine,
                    scratch);
        }
        return new NDList(ids, combine);
    }

    @Test
    void setPrior_strengthZeroOnUnderflowingProbabilities_theRoutersOwnChoice() {
        Case c =
                new Case(
                        SelectionPrior.probability(0),
                        new boolean[] {true, false, true},
                        2,
                        true,
                        new double[] {-900, -899, 0});
        assertSelects(c, 2, 1);
    }

    @Test
    void setPrior_hardMaskInProbabilityFormOnUnderflowingProbabilities_rankedByLogits() {
        Case c =
                new Case(
                        SelectionPrior.probability(Double.POSITIVE_INFINITY),
                        new boolean[] {true, true, false},
                        1,
                        true,
                        new double[] {-900, -899, 0});
        assertSelects(c, 1);
    }

    @Test
    void setPrior_twoProtected_theyKeepTheRoutersOrder() {
        Case c =
                new Case(
                        SelectionPrior.additive(100).withProtectedTop(2),
                        new boolean[] {false, true, false, true},
                        3,
                        true,
                        new double[] {1, 2, 3, 2});
        assertSelects(c, 2, 1, 3);
    }

    private static void assertSelects(Case c, long... expected) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = router(manager, c);
            router.setPrior(c.kept, c.prior);
            NDArray x = array(manager, c.logits, 1, c.experts());
            assertArrayEquals(expected, route(router, manager, x).get(0).toLongArray());
        }
    }

    @Test
    void forward_allChosenProbabilitiesUnderflow_combineWeightsAreFinite() {
        Case c =
                new Case(
                        SelectionPrior.hardMask(),
                        new boolean[] {true, true, false},
                        2,
                        true,
                        new double[] {-900, -900, 0});
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = router(manager, c);
            router.setPrior(c.kept, c.prior);
            NDArray x = array(manager, c.logits, 1, 3);
            assertArrayEquals(
                    new float[] {0.5f, 0.5f}, route(router, manager, x).get(1).toFloatArray());
        }
    }

    @Test
    void clearPrior_afterAPrior_theRoutersOwnChoiceAgain() {
        Case c =
                new Case(
                        SelectionPrior.hardMask(),
                        new boolean[] {true, false, true},
                        2,
                        true,
                        new double[] {1, 3, 2});
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = router(manager, c);
            NDArray x = array(manager, c.logits, 1, 3);
            router.setPrior(c.kept, c.prior);
            assertArrayEquals(new long[] {2, 0}, route(router, manager, x).get(0).toLongArray());
            router.clearPrior();
            assertArrayEquals(new long[] {1, 2}, route(router, manager, x).get(0).toLongArray());
        }
    }

    /** The documented order: logits, softmax, balancing bias, forbidden ones out. */
    @Property(tries = 100, seed = "12")
    void select_balancingBiasAndAnyPrior_inTheDocumentedOrder(@ForAll("cases") Case given) {
        double scale =
                Arrays.stream(given.logits).map(Math::abs).max().orElseThrow() > 20 ? 0.01 : 1;
        double[] logits = Arrays.stream(given.logits).map(z -> (float) (z * scale)).toArray();
        Case c = new Case(given.prior, given.kept, given.topK, given.renormalize, logits);
        double[] bias = new double[c.experts()];
        // no two alike, so that no tie hides which was added
        Arrays.setAll(bias, e -> (float) (0.3 * Math.sin(7 * e + 1)));
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router =
                    new Router(c.experts(), c.experts(), c.topK, c.renormalize, 0.02, 0.001);
            router.initialize(manager, DataType.FLOAT32, new Shape(-1, c.experts()));
            manager.eye(c.experts()).copyTo(router.weight().getArray());
            array(manager, bias, c.experts()).copyTo(router.balanceBias().getArray());
            router.setPrior(c.kept, c.prior);
            NDArray x = array(manager, c.logits, TOKENS, c.experts());
            NDList plain = router.forward(new ParameterStore(manager, false), new NDList(x), false);
            NDList bounded = route(router, manager, x);
            for (int t = 0; t < TOKENS; t++) {
                int[] ids = balanced(c, c.token(t), bias);
                long[] expected = Arrays.stream(ids).asLongStream().toArray();
                assertArrayEquals(expected, bounded.get(0).get(t).toLongArray(), () -> "" + c);
                assertArrayEquals(expected, plain.get(0).get(t).toLongArray(), () -> "" + c);
                // The bias is no part of the combine weights.
                float[] combine = Numbers.floats(combine(c.token(t), ids, c.renormalize));
                assertArrayEquals(combine, bounded.get(1).get(t).toFloatArray(), 2e-6f);
            }
        }
    }

    private static int[] balanced(Case c, double[] z, double[] bias) {
        boolean probability =
                c.prior.form() == SelectionPrior.Form.PROBABILITY && !c.prior.isHardMask();
        boolean scaled = c.prior.form() == SelectionPrior.Form.SCALED && !c.prior.isHardMask();
        double[] raised = z.clone();
        for (int e = 0; e < z.length; e++) {
            if (c.prior.isHardMask()) {
                raised[e] = c.kept[e] ? z[e] : Double.NEGATIVE_INFINITY;
            } else if (!probability && c.kept[e]) {
                raised[e] += c.prior.beta() * (scaled ? c.prior.logitRange() : 1);
            }
        }
        double total = logSumExp(raised);
        double[] rank = new double[z.length];
        for (int e = 0; e < z.length; e++) {
            rank[e] = Math.exp(raised[e] - total) + bias[e];
            rank[e] += probability && c.kept[e] ? c.prior.beta() : 0;
            rank[e] = Double.isInfinite(raised[e]) ? Double.NEGATIVE_INFINITY : rank[e];
        }
        int protect = c.prior.beta() == 0 ? 0 : Math.min(c.prior.protectedTop(), c.topK);
        List<Integer> order = new ArrayList<>();
        order.addAll(descending(z).subList(0, protect));
        descending(rank).stream().filter(e -> !order.contains(e)).forEach(order::add);
        return order.subList(0, c.topK).stream().mapToInt(e -> e).toArray();
    }

    private static List<Integer> descending(double[] scores) {
        return java.util.stream.IntStream.range(0, scores.length)
                .boxed()
                .sorted((a, b) -> Double.compare(scores[b], scores[a]))
                .toList();
    }

    @Test
    void updateBalanceBias_loadsOfSeveralPasses_movesByTheRateOnceAndStartsAnew() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = new Router(4, 4, 2, true, 0.02, 0.125);
            router.initialize(manager, DataType.FLOAT32, new Shape(-1, 4));
            router.addLoad(new long[] {5, 0, 3, 0});
            router.addLoad(new long[] {0, 4, 1, 3});
            router.updateBalanceBias(); // mean 4
            float[] moved = {-0.125f, 0, 0, 0.125f};
            assertArrayEquals(moved, router.balanceBias().getArray().toFloatArray());
            router.updateBalanceBias();
            assertArrayEquals(moved, router.balanceBias().getArray().toFloatArray());
            router.addLoad(new long[] {0, 8, 4, 4});
            router.updateBalanceBias();
            assertArrayEquals(
                    new float[] {0, -0.125f, 0, 0.125f},
                    router.balanceBias().getArray().toFloatArray());
            assertFalse(router.balanceBias().requiresGradient());
        }
    }

    @Test
    void updateBalanceBias_rateZero_biasRanksAndStays() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = new Router(4, 4, 1, false, 0.02, true, 0);
            router.initialize(manager, DataType.FLOAT32, new Shape(-1, 4));
            manager.eye(4).copyTo(router.weight().getArray());
            NDArray x = array(manager, new double[] {1, 0.9, 0, 0}, 1, 4);
            assertArrayEquals(new long[] {1, 0, 0, 0}, load(router, manager, x));
            float[] loaded = {-0.5f, 0, 0.125f, -0.0f};
            manager.create(loaded).copyTo(router.balanceBias().getArray());
            assertArrayEquals(new long[] {0, 1, 0, 0}, load(router, manager, x));
            router.addLoad(new long[] {9, 0, 0, 0});
            router.updateBalanceBias();
            assertArrayEquals(loaded, router.balanceBias().getArray().toFloatArray());
        }
        IllegalArgumentException e =
                assertThrows(
                        IllegalArgumentException.class,
                        () -> new Router(4, 4, 2, true, 0.02, false, 0.1));
        assertTrue(e.getMessage().contains("no balancing bias"), e.getMessage());
    }

    /** What the bias is for: a router that sends everything to two experts spreads it. */
    @Test
    void updateBalanceBias_skewedRouter_loadEvensOut() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = new Router(4, 4, 1, false, 0.02, 0.01);
            router.initialize(manager, DataType.FLOAT32, new Shape(-1, 4));
            manager.eye(4).copyTo(router.weight().getArray());
            Random random = new Random(4);
            double[] logits = new double[64 * 4];
            Arrays.setAll(logits, i -> random.nextGaussian() + (i % 4 == 2 ? 3 : 0));
            NDArray x = array(manager, logits, 64, 4);
            long[] first = load(router, manager, x);
            assertTrue(first[2] > 55, () -> Arrays.toString(first));
            for (int step = 0; step < 150; step++) {
                router.addLoad(load(router, manager, x));
                router.updateBalanceBias();
            }
            long[] last = load(router, manager, x);
            assertTrue(Arrays.stream(last).max().orElse(0) <= 24, () -> Arrays.toString(last));
        }
    }

    private static long[] load(Router router, NDManager manager, NDArray x) {
        long[] load = new long[router.experts()];
        for (long id : route(router, manager, x).get(0).toLongArray()) {
            load[(int) id]++;
        }
        return load;
    }

    @Test
    void newRouter_withoutBalancing_noBiasAndNothingToUpdate() {
        Router router = new Router(4, 4, 2, true, 0.02);
        assertNull(router.balanceBias());
        router.addLoad(new long[] {8, 0, 0, 0});
        router.updateBalanceBias();
        assertEquals(1, router.getParameters().size());
    }

    @Test
    void statistics_ofNoTokens_evenAndZero() {
        RoutingStatistics s = RoutingStatistics.of(new double[2 * 4 + 2]);
        assertEquals(0, s.tokens());
        assertEquals(0, s.balanceLoss());
        assertEquals(0, s.zLoss());
        assertEquals(1, s.maxOverMean());
        assertEquals(0, s.entropy());
        assertEquals(4, s.idleExperts());
    }

    @Test
    void setPrior_hardMaskWithTooFewKept_clearError() {
        Router router = new Router(4, 4, 2, true, 0.02);
        IllegalArgumentException e =
                assertThrows(
                        IllegalArgumentException.class,
                        () ->
                                router.setPrior(
                                        new boolean[] {false, true, false, false},
                                        SelectionPrior.hardMask()));
        assertTrue(e.getMessage().contains("topK = 2"), e.getMessage());
        assertThrows(
                IllegalArgumentException.class,
                () -> router.setPrior(new boolean[3], SelectionPrior.additive(1)));
    }

    @Test
    void newRouter_topKOutOfRange_clearError() {
        assertThrows(IllegalArgumentException.class, () -> new Router(4, 4, 0, true, 0.02));
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> new Router(4, 4, 5, true, 0.02));
        assertTrue(e.getMessage().contains("number of experts, 4"), e.getMessage());
    }

    @Test
    void forward_observer_seesTheIds() {
        Case c =
                new Case(
                        SelectionPrior.additive(0),
                        new boolean[3],
                        2,
                        true,
                        new double[] {1, 3, 2, 5, 5, 5});
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = router(manager, c);
            List<long[]> seen = new ArrayList<>();
            router.setObserver(ids -> seen.add(ids.toLongArray()));
            router.forward(
                    new ParameterStore(manager, false),
                    new NDList(array(manager, c.logits, 2, 3)),
                    false);
            assertEquals(1, seen.size());
            assertArrayEquals(new long[] {1, 2, 0, 1}, seen.get(0));
        }
    }
}
