package org.djlmoe.kernel;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.dirtyMemory;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.GradientCollector;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.EnumMap;
import java.util.EnumSet;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.function.Function;
import org.djlmoe.kernel.ExpertKernels.Selection;
import org.djlmoe.kernel.ExpertKernels.Settings;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.reference.NaiveMoe;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class ExpertKernelsTest {

    private static final double BOUND = 1e-5;
    private static final Set<Weights> ADAPTERS =
            EnumSet.of(Weights.GATE_UP_A, Weights.GATE_UP_B, Weights.DOWN_A, Weights.DOWN_B);
    private static final Set<Weights> SHARED =
            EnumSet.of(Weights.SHARED_GATE_UP, Weights.SHARED_DOWN, Weights.SHARED_GATE);
    private static final Set<Weights> EXPERTS = EnumSet.of(Weights.GATE_UP, Weights.DOWN);

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    /** A layer with random weights, its input and the gradient of its output. */
    private static final class Layer {

        final NaiveMoe.Settings settings;
        final int tokens;
        final Map<Weights, double[]> weights = new EnumMap<>(Weights.class);
        double[] x;
        final double[] dy;
        NaiveMoe.Losses losses = NaiveMoe.Losses.NONE;

        Layer(NaiveMoe.Settings settings, int tokens, boolean norm, long seed) {
            this.settings = settings;
            this.tokens = tokens;
            Random random = new Random(seed);
            for (Weights w : Weights.values()) {
                if ((norm || w != Weights.NORM)
                        && (settings.rank() > 0 || !ADAPTERS.contains(w))
                        && (settings.shared() > 0 || !SHARED.contains(w))) {
                    weights.put(w, random(random, settings.size(w), 0.6));
                }
            }
            x = random(random, tokens * settings.hidden(), 1);
            dy = random(random, tokens * settings.hidden(), 1);
        }

        NaiveMoe.Result reference(Function<double[], int[]> select) {
            return NaiveMoe.run(settings, weights, select, losses, x, dy);
        }

        NaiveMoe.Result reference() {
            return reference(NaiveMoe.topK(settings.topK()));
        }

        Settings kernelSettings() {
            return new Settings(
                    settings.topK(),
                    settings.eps(),
                    settings.scale(),
                    settings.residual(),
                    settings.renormalize());
        }
    }

    /** What the kernels make of a layer. */
    private static final class Run {
        NDArray ids;
        NDArray combine;
        NDArray y;
        NDArray dx;
        NDArray balance;
        NDArray z;
        NDArray dcombine;
        final Map<Weights, NDArray> gradients = new EnumMap<>(Weights.class);
    }

    private static Layer layer(
            int tokens, int experts, int topK, int rank, boolean residual, boolean renormalize) {
        return new Layer(
                new NaiveMoe.Settings(6, 5, experts, topK, rank, 1e-5, 1.5, residual, renormalize),
                tokens,
                true,
                17L * tokens + 3L * experts + topK);
    }

    private Run run(Layer layer, int chunks, Set<Weights> frozen) {
        return run(
                layer, chunks, frozen, new Selection(TorchKernels.nothing(), false, 0), Map.of());
    }

    private Run run(
            Layer layer,
            int chunks,
            Set<Weights> frozen,
            Selection selection,
            Map<Weights, NDArray> given) {
        long rows = (layer.tokens + chunks - 1) / chunks;
        return run(layer, chunks, frozen, selection, given, rows);
    }

    /** With scratch that was made for chunks of so many rows. */
    private Run run(
            Layer layer,
            int chunks,
            Set<Weights> frozen,
            Selection selection,
            Map<Weights, NDArray> given,
            long rows) {
        Run run = new Run();
        List<NDArray> weights = new ArrayList<>();
        List<NDArray> gradients = new ArrayList<>();
        for (Weights w : Weights.values()) {
            double[] numbers = layer.weights.get(w);
            NDArray weight = TorchKernels.nothing();
            NDArray gradient = TorchKernels.nothing();
            if (numbers != null) {
                weight = given.getOrDefault(w, array(manager, numbers, layer.settings.shape(w)));
                if (!frozen.contains(w)) {
                    gradient = manager.zeros(new Shape(layer.settings.shape(w)));
                    run.gradients.put(w, gradient);
                }
            }
            weights.add(weight);
            gradients.add(gradient);
        }
        Settings settings = layer.kernelSettings();
        NDArray x = array(manager, layer.x, layer.tokens, layer.settings.hidden());
        NDArray g = array(manager, layer.dy, layer.tokens, layer.settings.hidden());
        dirtyMemory(manager);
        Shape routes = new Shape(layer.tokens, settings.topK());
        run.ids = manager.full(routes, -1, DataType.INT64);
        run.combine = manager.full(routes, Float.NaN);
        run.y = manager.full(x.getShape(), Float.NaN);
        run.dx = manager.full(x.getShape(), Float.NaN);
        run.dcombine = manager.full(routes, Float.NaN);
        NDArray mask = mask(layer.losses);
        NDArray sums = TorchKernels.nothing();
        if (layer.losses != NaiveMoe.Losses.NONE) {
            sums = manager.zeros(new Shape(2L * layer.settings.experts() + 2), DataType.FLOAT64);
        }
        ExpertScratch scratch = ExpertScratch.forward(manager, rows, settings.topK(), weights);
        for (int i = 0; i < chunks; i++) {
            ExpertKernels.route(
                    x,
                    i,
                    chunks,
                    weights,
                    settings,
                    selection,
                    mask,
                    sums,
                    run.ids,
                    run.combine,
                    scratch);
        }
        for (int i = 0; i < chunks; i++) {
            ExpertKernels.forward(
                    x, i, chunks, weights, settings, run.ids, run.combine, scratch, run.y);
        }
        scratch.close();
        dirtyMemory(manager);
        NDArray losses = TorchKernels.nothing();
        if (sums.size() > 0) {
            run.balance = manager.full(new Shape(), Float.NaN);
            run.z = manager.full(new Shape(), Float.NaN);
            ExpertKernels.routerLosses(sums, run.balance, run.z);
            losses =
                    ExpertKernels.routerLossGradients(
                            manager, sums, layer.losses.balance(), layer.losses.z());
        }
        scratch = ExpertScratch.backward(manager, rows, settings.topK(), weights);
        for (int i = 0; i < chunks; i++) {
            ExpertKernels.backward(
                    x,
                    i,
                    chunks,
                    g,
                    weights,
                    gradients,
                    settings,
                    losses,
                    mask,
                    selection.outside(),
                    run.ids,
                    run.combine,
                    scratch,
                    run.dx,
                    run.dcombine);
        }
        return run;
    }

    /** More rows than a block, and a last one that is not full. */
    @Test
    void route_scratchOfRoutingAlone_asWithThatOfAForwardPassInLessMemory() {
        Layer layer = layer(1300, 5, 2, 3, true, true);
        Run whole = run(layer, 1, Set.of());
        List<NDArray> weights = new ArrayList<>();
        for (Weights w : Weights.values()) {
            double[] numbers = layer.weights.get(w);
            weights.add(
                    numbers == null
                            ? TorchKernels.nothing()
                            : array(manager, numbers, layer.settings.shape(w)));
        }
        NDArray x = array(manager, layer.x, layer.tokens, layer.settings.hidden());
        NDArray ids = manager.full(whole.ids.getShape(), -1, DataType.INT64);
        NDArray combine = manager.full(whole.combine.getShape(), Float.NaN);
        try (ExpertScratch forward = ExpertScratch.forward(manager, layer.tokens, 2, weights);
                ExpertScratch routing =
                        ExpertScratch.routing(manager, layer.tokens, layer.settings.hidden())) {
            assertTrue(routing.bytes() < forward.bytes() / 2);
            ExpertKernels.route(
                    x,
                    0,
                    1,
                    weights,
                    layer.kernelSettings(),
                    new Selection(TorchKernels.nothing(), false, 0),
                    TorchKernels.nothing(),
                    TorchKernels.nothing(),
                    ids,
                    combine,
                    routing);
        }
        assertArrayEquals(whole.ids.toLongArray(), ids.toLongArray());
        assertArrayEquals(whole.combine.toFloatArray(), combine.toFloatArray(), 1e-6f);
    }

    private NDArray mask(NaiveMoe.Losses losses) {
        boolean[] counted = losses.counted();
        if (counted == null) {
            return TorchKernels.nothing();
        }
        double[] numbers = new double[counted.length];
        Arrays.setAll(numbers, t -> counted[t] ? 1 : 0);
        return array(manager, numbers, numbers.length);
    }

    private static void assertEqual(NaiveMoe.Result expected, Run run, double bound) {
        assertArrayEquals(flat(expected.ids()), run.ids.toLongArray(), "ids");
        double[] combine =
                Arrays.stream(expected.combine()).flatMapToDouble(Arrays::stream).toArray();
        assertClose(combine, run.combine, bound, "combine");
        assertClose(expected.y(), run.y, bound, "y");
        assertClose(expected.dx(), run.dx, bound, "dx");
        run.gradients.forEach(
                (w, gradient) ->
                        assertClose(expected.gradients().get(w), gradient, bound, w.toString()));
    }

    @ParameterizedTest
    @CsvSource({
        // chunks, k, norm, renormalize, balance, z, mask
        "1, 2, true, true, 0.7, 0, false",
        "3, 2, true, false, 0.7, 0, false",
        "1, 2, false, true, 0, 0.3, false",
        "4, 2, true, true, 0.7, 0.3, true",
        "2, 1, true, false, 0.7, 0.3, true",
        "2, 5, true, true, 0.7, 0.3, false",
        "14, 2, true, true, 0.7, 0.3, true"
    })
    void forwardAndBackward_routerLosses_valuesAndGradientsOfTheReference(
            int chunks,
            int topK,
            boolean norm,
            boolean renormalize,
            double balance,
            double z,
            boolean masked) {
        NaiveMoe.Settings settings =
                new NaiveMoe.Settings(6, 5, 5, topK, 0, 1e-5, 0, true, renormalize);
        Layer layer = new Layer(settings, 13, norm, 77L * chunks + topK);
        boolean[] counted = new boolean[13];
        for (int t = 0; t < 13; t++) {
            counted[t] = t % 5 != 1 && t < 10;
        }
        layer.losses = new NaiveMoe.Losses(balance, z, masked ? counted : null);
        NaiveMoe.Result expected = layer.reference();
        for (int block : new int[] {13, 2}) {
            Selection selection = new Selection(TorchKernels.nothing(), false, 0);
            Run run = run(layer, chunks, Set.of(), selection, Map.of(), block);
            assertEqual(expected, run, BOUND);
            assertEquals(expected.balanceLoss(), run.balance.getFloat(), 1e-5);
            assertEquals(expected.zLoss(), run.z.getFloat(), 1e-5 * expected.zLoss());
        }
    }

    /** Both losses of constant logits are known: no softmax may be taken twice. */
    @ParameterizedTest
    @CsvSource({"1, 0", "2, 0", "2, 3", "6, -2"})
    void routerLosses_constantLogits_kAndTheSquareOfLogE(int topK, double logit) {
        NaiveMoe.Settings settings = new NaiveMoe.Settings(6, 5, 6, topK, 0, 0, 0, true, false);
        Layer layer = new Layer(settings, 7, false, 3);
        Arrays.fill(layer.x, 1);
        double[] router = new double[6 * 6];
        Arrays.fill(router, logit / 6);
        layer.weights.put(Weights.ROUTER, router);
        layer.losses = new NaiveMoe.Losses(0.5, 0.5, null);
        Run run = run(layer, 2, Set.of());
        assertEqual(layer.reference(), run, BOUND);
        assertEquals(topK, run.balance.getFloat(), 1e-5 * topK);
        double lse = logit + Math.log(6);
        assertEquals(lse * lse, run.z.getFloat(), 1e-5 * lse * lse);
    }

    @Test
    void routerLosses_noTokenCounts_zeroWithoutGradient() {
        Layer layer = layer(5, 4, 2, 0, true, true);
        NaiveMoe.Result expected = layer.reference();
        layer.losses = new NaiveMoe.Losses(1, 1, new boolean[5]);
        Run run = run(layer, 2, Set.of());
        assertEqual(expected, run, BOUND);
        assertEquals(0, run.balance.getFloat());
        assertEquals(0, run.z.getFloat());
    }

    /** Padding may hold anything. */
    @Test
    void routerLosses_notANumberInPadding_theOthersCount() {
        Layer layer = layer(6, 4, 2, 0, true, true);
        layer.losses =
                new NaiveMoe.Losses(1, 1, new boolean[] {true, true, true, true, true, false});
        NaiveMoe.Result expected = layer.reference();
        Arrays.fill(layer.x, 30, 36, Double.NaN);
        Run run = run(layer, 1, Set.of());
        assertEquals(expected.balanceLoss(), run.balance.getFloat(), 1e-5);
        assertEquals(expected.zLoss(), run.z.getFloat(), 1e-5);
    }

    @ParameterizedTest
    @CsvSource({
        // tokens, chunks, S, norm, gated, rank, block
        "13, 1, 5, true, true, 0, 13",
        "13, 3, 9, true, true, 0, 5",
        "13, 2, 3, true, false, 3, 2",
        "13, 1, 9, false, true, 2, 4",
        "13, 4, 9, false, false, 0, 13",
        "1, 1, 4, true, true, 0, 1",
        "0, 1, 4, true, true, 0, 1",
        "2, 5, 4, true, true, 0, 1"
    })
    void forwardAndBackward_sharedExperts_equalTheReference(
            int tokens, int chunks, int shared, boolean norm, boolean gated, int rank, int block) {
        NaiveMoe.Settings settings =
                new NaiveMoe.Settings(6, 5, 4, 2, rank, 1e-5, 1.5, norm, true, shared);
        Layer layer = new Layer(settings, tokens, norm, 5L * tokens + shared);
        if (!gated) {
            layer.weights.remove(Weights.SHARED_GATE);
        }
        Selection selection = new Selection(TorchKernels.nothing(), false, 0);
        Run run = run(layer, chunks, Set.of(), selection, Map.of(), block);
        assertEqual(layer.reference(), run, BOUND);
    }

    @Test
    void backward_frozenSharedExperts_otherGradientsUnchanged() {
        NaiveMoe.Settings settings = new NaiveMoe.Settings(6, 5, 4, 2, 0, 1e-5, 0, true, true, 7);
        Layer layer = new Layer(settings, 9, true, 8);
        assertEqual(layer.reference(), run(layer, 2, SHARED), BOUND);
    }

    private static long[] flat(int[][] ids) {
        return Arrays.stream(ids).flatMapToInt(Arrays::stream).asLongStream().toArray();
    }

    @ParameterizedTest
    @CsvSource({
        // tokens, chunks, experts, k, rank, norm, residual, renormalize
        "0, 1, 4, 2, 0, true, true, true",
        "0, 3, 4, 2, 3, true, true, true",
        "1, 1, 4, 2, 0, true, true, true",
        "1, 3, 4, 2, 3, true, false, true",
        "2, 5, 4, 2, 0, false, true, false",
        "13, 1, 4, 2, 0, true, true, true",
        "13, 2, 4, 2, 0, true, true, true",
        "13, 3, 4, 2, 0, false, false, true",
        "13, 3, 4, 2, 0, true, true, false",
        "13, 14, 4, 2, 0, true, true, true",
        "12, 3, 5, 1, 0, true, true, false",
        "12, 2, 5, 5, 0, true, true, true",
        "12, 2, 5, 5, 0, true, true, false",
        "9, 1, 1, 1, 0, true, true, false",
        "13, 2, 5, 2, 3, true, true, true",
        "13, 3, 3, 2, 5, false, true, false",
        "13, 1, 4, 3, 1, true, false, true"
    })
    void forwardAndBackward_shapesAndChunks_equalTheReference(
            int tokens,
            int chunks,
            int experts,
            int topK,
            int rank,
            boolean norm,
            boolean residual,
            boolean renormalize) {
        Layer layer =
                new Layer(
                        new NaiveMoe.Settings(
                                6, 5, experts, topK, rank, 1e-5, 1.5, residual, renormalize),
                        tokens,
                        norm,
                        31L * tokens + chunks);
        assertEqual(layer.reference(), run(layer, chunks, Set.of()), BOUND);
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 3})
    void backward_expertsWithoutTokens_theirGradientsAreExactlyZero(int chunks) {
        Layer layer = layer(3, 8, 1, 2, true, false);
        NaiveMoe.Result expected = layer.reference();
        Run run = run(layer, chunks, Set.of());
        assertEqual(expected, run, BOUND);
        Set<Integer> used = new java.util.HashSet<>();
        Arrays.stream(expected.ids()).forEach(ids -> used.add(ids[0]));
        for (int e = 0; e < 8; e++) {
            if (!used.contains(e)) {
                for (Weights w : Weights.values()) {
                    if (EXPERTS.contains(w) || ADAPTERS.contains(w)) {
                        float[] slice = run.gradients.get(w).get(e).toFloatArray();
                        assertArrayEquals(new float[slice.length], slice, w + " of expert " + e);
                    }
                }
            }
        }
    }

    @ParameterizedTest
    @CsvSource({"1, 1", "1, 3", "2, 1", "2, 4"})
    void forwardAndBackward_allTokensOnOneExpert_equalTheReference(int topK, int chunks) {
        NaiveMoe.Settings settings =
                new NaiveMoe.Settings(6, 5, 5, topK, 0, 1e-5, 0, true, topK > 1);
        Layer layer = new Layer(settings, 11, false, 5);
        layer.x = Arrays.stream(layer.x).map(Math::abs).toArray();
        double[] router = new double[5 * 6];
        Arrays.fill(router, 2 * 6, 3 * 6, 0.25);
        layer.weights.put(Weights.ROUTER, router);
        Run run = run(layer, chunks, Set.of());
        assertEqual(layer.reference(), run, BOUND);
        // The others tie at zero: the lowest index comes second.
        long[] token = topK == 1 ? new long[] {2} : new long[] {2, 0};
        for (int t = 0; t < 11; t++) {
            assertArrayEquals(token, run.ids.get(t).toLongArray());
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void forwardAndBackward_uniformRouter_lowestIndicesAndFiniteGradients(boolean renormalize) {
        Layer layer = layer(7, 6, 3, 0, true, renormalize);
        layer.weights.put(Weights.ROUTER, new double[6 * 6]);
        Run run = run(layer, 2, Set.of());
        assertEqual(layer.reference(), run, BOUND);
        assertArrayEquals(new long[] {0, 1, 2}, run.ids.get(6).toLongArray());
        assertClose(
                new double[] {1, 1, 1},
                run.combine.get(6).mul(renormalize ? 3 : 6),
                1e-6,
                "combine");
    }

    /** Experts get more rows than go through them at a time, in pieces of unequal sizes. */
    @ParameterizedTest
    @CsvSource({"1, 1, 0", "2, 1, 0", "3, 2, 3", "5, 1, 2", "12, 3, 0"})
    void forwardAndBackward_blocksSmallerThanTheChunk_equalTheReference(
            int block, int chunks, int rank) {
        Layer layer = layer(23, 3, 2, rank, true, true);
        Selection selection = new Selection(TorchKernels.nothing(), false, 0);
        Run run = run(layer, chunks, Set.of(), selection, Map.of(), block);
        assertEqual(layer.reference(), run, BOUND);
    }

    /** The gradient that autograd sends back from a sum is one number without memory of its own. */
    @Test
    void backward_gradientWithoutStrides_equalsTheReference() {
        Layer layer = layer(13, 4, 2, 0, true, true);
        Arrays.fill(layer.dy, 1);
        Run run = run(layer, 2, EnumSet.allOf(Weights.class));
        NDArray g = manager.ones(new Shape(1, 1)).broadcast(13, 6);
        List<NDArray> weights = weights(layer);
        ExpertKernels.backward(
                array(manager, layer.x, 13, 6),
                0,
                1,
                g,
                weights,
                Collections.nCopies(8, TorchKernels.nothing()),
                layer.kernelSettings(),
                TorchKernels.nothing(),
                TorchKernels.nothing(),
                TorchKernels.nothing(),
                run.ids,
                run.combine,
                ExpertScratch.backward(manager, 13, 2, weights),
                run.dx,
                TorchKernels.nothing());
        assertClose(layer.reference().dx(), run.dx, BOUND, "dx");
    }

    private List<NDArray> weights(Layer layer) {
        List<NDArray> weights = new ArrayList<>();
        for (Weights w : Weights.values()) {
            double[] numbers = layer.weights.get(w);
            weights.add(
                    numbers == null
                            ? TorchKernels.nothing()
                            : array(manager, numbers, layer.settings.shape(w)));
        }
        return weights;
    }

    /** Rows that are grouped already: one expert a row, all of them with one combine weight. */
    @ParameterizedTest
    @ValueSource(ints = {2, 9})
    void forwardRowsAndBackwardRows_groupedRows_equalTheReference(int block) {
        Layer layer =
                new Layer(new NaiveMoe.Settings(6, 5, 4, 1, 2, 0, 1.5, false, false), 9, false, 21);
        // experts 0 to 3 get four rows, none, two and three
        int[] expert = {0, 0, 0, 0, 2, 2, 3, 3, 3};
        NaiveMoe.Result expected =
                layer.reference(
                        new Function<>() {
                            private int next;

                            @Override
                            public int[] apply(double[] logits) {
                                return new int[] {expert[next++]};
                            }
                        });
        List<NDArray> weights = weights(layer);
        List<NDArray> gradients = new ArrayList<>();
        weights.forEach(w -> gradients.add(w.size() == 0 ? w : manager.zeros(w.getShape())));
        double[] combine =
                Arrays.stream(expected.combine()).flatMapToDouble(Arrays::stream).toArray();
        NDArray alpha = array(manager, combine, 9, 1);
        long[] counts = {4, 0, 2, 3};
        NDArray rows = array(manager, layer.x, 9, 6);
        ExpertKernels.forwardRows(
                rows,
                counts,
                alpha,
                weights,
                layer.kernelSettings(),
                ExpertScratch.forward(manager, block, 1, weights));
        assertClose(expected.y(), rows, BOUND, "y");

        NDArray g = array(manager, layer.dy, 9, 6);
        NDArray dcombine = manager.full(new Shape(9), Float.NaN);
        ExpertKernels.backwardRows(
                array(manager, layer.x, 9, 6),
                g,
                counts,
                alpha,
                dcombine,
                weights,
                gradients,
                layer.kernelSettings(),
                ExpertScratch.backward(manager, block, 1, weights));
        for (Weights w : EnumSet.range(Weights.GATE_UP, Weights.DOWN_B)) {
            assertClose(
                    expected.gradients().get(w), gradients.get(w.ordinal()), BOUND, w.toString());
        }
        // Through the softmax of all experts, backward goes on to the router and to the rows.
        double[] router = layer.weights.get(Weights.ROUTER);
        double[] dx = g.toType(DataType.FLOAT64, true).toDoubleArray();
        for (int t = 0; t < 9; t++) {
            double[] p = softmax(router, layer.x, t);
            double d = dcombine.getFloat(t) * combine[t];
            for (int e = 0; e < 4; e++) {
                double dlogit = d * ((e == expert[t] ? 1 : 0) - p[e]);
                for (int h = 0; h < 6; h++) {
                    dx[6 * t + h] += dlogit * router[6 * e + h];
                }
            }
        }
        assertClose(expected.dx(), array(manager, dx, 9, 6), BOUND, "dx");
    }

    private static double[] softmax(double[] router, double[] x, int t) {
        double[] z = new double[4];
        for (int e = 0; e < 4; e++) {
            for (int h = 0; h < 6; h++) {
                z[e] += router[6 * e + h] * x[6 * t + h];
            }
        }
        double sum = Arrays.stream(z).map(Math::exp).sum();
        return Arrays.stream(z).map(v -> Math.exp(v) / sum).toArray();
    }

    @Test
    void blockRows_anyRouting_isTheEvenShareOfTheChunk() {
        assertEquals(1024, ExpertScratch.blockRows(4096, 4, 16));
        assertEquals(512, ExpertScratch.blockRows(4096, 2, 64));
        assertEquals(100, ExpertScratch.blockRows(100, 2, 64));
        assertEquals(4096, ExpertScratch.blockRows(4096, 4, 4));
        assertEquals(1, ExpertScratch.blockRows(0, 2, 4));
    }

    @Test
    void route_duplicatedRouterRows_lowerIndexFirst() {
        // Whole numbers: their sums are exact, so equal rows give equal logits in any order.
        NaiveMoe.Settings settings = new NaiveMoe.Settings(6, 5, 6, 3, 0, 0, 0, true, true);
        Layer layer = new Layer(settings, 40, false, 9);
        layer.x = Arrays.stream(layer.x).map(v -> Math.rint(2 * v)).toArray();
        double[] router = layer.weights.get(Weights.ROUTER);
        Arrays.setAll(router, i -> Math.rint(router[i % 18]));
        assertEqual(layer.reference(), run(layer, 2, Set.of()), BOUND);
    }

    @Test
    void route_logitsAThousandthApart_notATie() {
        NaiveMoe.Settings settings = new NaiveMoe.Settings(2, 3, 4, 1, 0, 0, 0, false, false);
        Layer layer = new Layer(settings, 1, false, 8);
        layer.x = new double[] {1, 0};
        layer.weights.put(Weights.ROUTER, new double[] {7, 0, 8, 0, 8.001, 0, 8.0005, 0});
        assertArrayEquals(new long[] {2}, run(layer, 1, Set.of()).ids.toLongArray());
    }

    @Test
    void backward_oneExpertRenormalized_routerGradientIsExactlyZero() {
        Layer layer = layer(11, 5, 1, 0, true, true);
        Run run = run(layer, 2, Set.of());
        assertEqual(layer.reference(), run, BOUND);
        assertArrayEquals(new float[5 * 6], run.gradients.get(Weights.ROUTER).toFloatArray());
    }

    @Test
    void backward_frozenBase_adapterGradientsAreThoseOfTheTrainedOne() {
        Layer layer = layer(13, 5, 2, 3, true, true);
        Set<Weights> frozen = EnumSet.complementOf(EnumSet.copyOf(ADAPTERS));
        Run run = run(layer, 2, frozen);
        assertEquals(ADAPTERS, run.gradients.keySet());
        assertEqual(layer.reference(), run, BOUND);
    }

    @Test
    void backward_frozenRouter_otherGradientsUnchanged() {
        Layer layer = layer(13, 5, 2, 0, true, true);
        assertEqual(layer.reference(), run(layer, 2, EnumSet.of(Weights.ROUTER)), BOUND);
    }

    @Test
    void backward_everythingFrozen_gradientOfTheInputAlone() {
        Layer layer = layer(13, 5, 2, 3, true, true);
        assertEqual(layer.reference(), run(layer, 2, EnumSet.allOf(Weights.class)), BOUND);
    }

    @Test
    void backward_gradientsThatHoldSomething_addedTo() {
        Layer layer = layer(13, 4, 2, 2, true, true);
        Run run = run(layer, 1, Set.of());
        List<NDArray> weights = weights(layer);
        ExpertKernels.backward(
                array(manager, layer.x, 13, 6),
                0,
                1,
                array(manager, layer.dy, 13, 6),
                weights,
                new ArrayList<>(run.gradients.values()),
                layer.kernelSettings(),
                TorchKernels.nothing(),
                TorchKernels.nothing(),
                TorchKernels.nothing(),
                run.ids,
                run.combine,
                ExpertScratch.backward(manager, 13, 2, weights),
                run.dx,
                TorchKernels.nothing());
        NaiveMoe.Result expected = layer.reference();
        run.gradients.forEach(
                (w, gradient) ->
                        assertClose(
                                expected.gradients().get(w), gradient.div(2), BOUND, w.toString()));
    }

    @ParameterizedTest
    @ValueSource(ints = {0, 3})
    void forwardAndBackward_bf16Experts_withinTheirPrecision(int rank) {
        Layer layer = layer(13, 5, 2, rank, true, true);
        TorchKernels half =
                TorchKernels.compile(
                        "half", "def half(self, x: Tensor) -> Tensor:\n  return x.to(dtype=15)\n");
        Map<Weights, NDArray> given = new EnumMap<>(Weights.class);
        for (Weights w : EXPERTS) {
            NDArray wide = array(manager, layer.weights.get(w), layer.settings.shape(w));
            given.put(w, half.call(manager, "half", wide).head());
        }
        Run run = run(layer, 2, EXPERTS, new Selection(TorchKernels.nothing(), false, 0), given);
        assertEqual(layer.reference(), run, 1e-2);
    }

    @ParameterizedTest
    @CsvSource({"true, 0", "false, 0", "true, 3"})
    void plain_recordedByAutograd_equalTheReference(boolean renormalize, int rank) {
        Layer layer = layer(13, 8, 2, rank, false, renormalize);
        NaiveMoe.Result expected = layer.reference();
        Map<Weights, NDArray> weights = new EnumMap<>(Weights.class);
        for (Weights w : Weights.values()) {
            double[] numbers = layer.weights.get(w);
            if (numbers == null) {
                weights.put(w, TorchKernels.nothing());
            } else {
                weights.put(w, array(manager, numbers, layer.settings.shape(w)));
                weights.get(w).setRequiresGradient(true);
            }
        }
        NDArray x = array(manager, layer.x, 13, 6);
        x.setRequiresGradient(true);
        Settings settings = layer.kernelSettings();
        try (GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            NDArray h = NormKernels.rmsNormPlain(x, weights.get(Weights.NORM), settings.eps());
            NDList chosen =
                    ExpertKernels.routePlain(
                            h,
                            weights.get(Weights.ROUTER),
                            settings,
                            new Selection(TorchKernels.nothing(), false, 0),
                            TorchKernels.nothing(),
                            TorchKernels.nothing());
            List<NDArray> list = new ArrayList<>(weights.values()).subList(2, 8);
            NDArray y = ExpertKernels.expertsPlain(h, chosen.get(0), chosen.get(1), list, settings);
            assertArrayEquals(flat(expected.ids()), chosen.get(0).toLongArray());
            assertClose(expected.y(), y, BOUND, "y");
            collector.backward(y.mul(array(manager, layer.dy, 13, 6)).sum());
        }
        assertClose(expected.dx(), x.getGradient(), BOUND, "dx");
        layer.weights.forEach(
                (w, numbers) ->
                        assertClose(
                                expected.gradients().get(w),
                                weights.get(w).getGradient(),
                                BOUND,
                                w.toString()));
    }
}
