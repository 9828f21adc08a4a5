package org.djlmoe.vocab;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
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
import java.util.List;
import java.util.Random;
import java.util.stream.DoubleStream;
import java.util.stream.Stream;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Tape;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.vocab.RingDtpLoss.Reduction;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;
import org.junit.jupiter.params.provider.ValueSource;

class RingDtpLossTest {

    private static final int B = 3;
    private static final int S = 4;
    private static final int N = B * S;
    private static final int H = 5;
    private static final int V = 17;

    private NDManager manager;
    private final Random random = new Random(11);

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    /** Who collects gradients: the tape, or DJL's own collector. */
    private enum Collector {
        TAPE,
        STOCK
    }

    /** A batch, in the values that the arrays really hold. */
    private final class Problem {
        Shape lead = new Shape(B, S);
        double[] hidden = normal(N * H);
        double[] weight = normal(V * H);
        double[] bias;
        double[] weights;
        long[] labels = new long[N];
        DataType hiddenType = DataType.FLOAT32;
        DataType weightType = DataType.FLOAT32;
        DataType labelType = DataType.INT64;
        boolean freezeHidden;
        boolean freezeWeight;
        float[] upstream;
        final NaiveCrossEntropy naive = new NaiveCrossEntropy();
        RingDtpLoss.Builder loss = RingDtpLoss.builder();

        Problem() {
            for (int i = 0; i < N; i++) {
                labels[i] = i % 4 == 1 ? -100 : random.nextInt(V);
            }
        }

        NDArray array(double[] values, DataType type, Shape shape) {
            NDArray wide = manager.create(values, shape);
            return wide.toType(type, true);
        }

        double[] held(double[] values, DataType type) {
            return doubles(array(values, type, new Shape(values.length)));
        }

        NDList labels() {
            NDList list = new NDList(manager.create(labels, lead).toType(labelType, true));
            if (weights != null) {
                list.add(array(weights, DataType.FLOAT32, lead));
            }
            return list;
        }

        NDList predictions() {
            NDList list =
                    new NDList(
                            array(hidden, hiddenType, lead.add(H)),
                            array(weight, weightType, new Shape(weight.length / H, H)));
            if (bias != null) {
                list.add(array(bias, DataType.FLOAT32, new Shape(bias.length)));
            }
            return list;
        }

        long valid() {
            return Arrays.stream(labels).filter(l -> l != naive.ignored).count();
        }

        /** What must come out, for the mean. */
        NaiveCrossEntropy.Result expectedMean() {
            return expected(1.0 / Math.max(1, valid()), null);
        }

        NaiveCrossEntropy.Result expected(double scale, float[] upstream) {
            double[] factors = new double[labels.length];
            for (int i = 0; i < factors.length; i++) {
                factors[i] = scale * (weights == null ? 1 : (float) weights[i]);
                factors[i] *= upstream == null ? 1 : upstream[i];
            }
            return naive.compute(
                    held(hidden, hiddenType),
                    held(weight, weightType),
                    bias == null ? null : held(bias, DataType.FLOAT32),
                    labels,
                    factors);
        }

        Actual run(Collector kind) {
            return run(kind, loss.build());
        }

        Actual run(Collector kind, RingDtpLoss function) {
            NDList predictions = predictions();
            for (int i = 0; i < predictions.size(); i++) {
                if (!(i == 0 && freezeHidden) && !(i == 1 && freezeWeight)) {
                    predictions.get(i).setRequiresGradient(true);
                }
            }
            NDArray value;
            try (GradientCollector collector =
                    kind == Collector.TAPE
                            ? new Tape(manager, 1, () -> {})
                            : Engine.getEngine("PyTorch").newGradientCollector()) {
                value = function.evaluate(labels(), predictions);
                NDArray target =
                        upstream == null ? value : value.mul(manager.create(upstream, lead)).sum();
                collector.backward(target);
            }
            List<double[]> gradients = new ArrayList<>();
            for (NDArray input : predictions) {
                NDArray gradient = input.hasGradient() ? input.getGradient() : null;
                gradients.add(gradient == null ? null : doubles(gradient));
            }
            return new Actual(value, value.toFloatArray(), gradients);
        }
    }

    private record Actual(NDArray array, float[] loss, List<double[]> gradients) {}

    private double[] normal(int count) {
        return DoubleStream.generate(() -> (float) random.nextGaussian()).limit(count).toArray();
    }

    private static double[] doubles(NDArray array) {
        return array.toType(DataType.FLOAT64, true).toDoubleArray();
    }

    private static void assertClose(double[] expected, double[] actual, double tolerance) {
        assertEquals(expected.length, actual.length);
        double difference = 0;
        double norm = 0;
        for (int i = 0; i < expected.length; i++) {
            difference += (expected[i] - actual[i]) * (expected[i] - actual[i]);
            norm += expected[i] * expected[i];
        }
        double error = Math.sqrt(difference / Math.max(norm, 1e-30));
        assertTrue(error <= tolerance, () -> "relative error " + error);
    }

    private static void assertGradients(NaiveCrossEntropy.Result expected, Actual actual) {
        assertGradients(expected, actual, 1e-6);
    }

    private static void assertGradients(
            NaiveCrossEntropy.Result expected, Actual actual, double tolerance) {
        assertClose(expected.hidden(), actual.gradients.get(0), tolerance);
        assertClose(expected.weight(), actual.gradients.get(1), tolerance);
        if (actual.gradients.size() > 2) {
            assertClose(expected.bias(), actual.gradients.get(2), tolerance);
        }
    }

    private void assertMean(Problem problem, Collector collector) {
        NaiveCrossEntropy.Result expected = problem.expectedMean();
        Actual actual = problem.run(collector);
        assertEquals(expected.total(), actual.loss[0], 2e-6 * Math.abs(expected.total()));
        assertGradients(expected, actual);
    }

    /** The options, one by one and all at once. */
    private enum Option {
        PLAIN,
        BIAS,
        WEIGHTS,
        SMOOTHING,
        SCALE,
        SOFTCAP,
        Z_LOSS,
        IGNORE_INSIDE_VOCABULARY,
        FLOAT_LABELS,
        INT_LABELS,
        TWO_AXES,
        ALL
    }

    private Problem problem(Option option) {
        Problem p = new Problem();
        boolean all = option == Option.ALL;
        if (all || option == Option.BIAS) {
            p.bias = normal(V);
        }
        if (all || option == Option.WEIGHTS) {
            p.weights = new double[N];
            Arrays.setAll(p.weights, i -> new double[] {0, .5, 2, 1}[i * 7 / 3 % 4]);
        }
        if (all || option == Option.SMOOTHING) {
            p.naive.smoothing = .1;
            p.loss.optLabelSmoothing(.1);
        }
        if (all || option == Option.SCALE) {
            p.naive.scale = .0625;
            p.loss.optLogitScale(.0625);
        }
        if (all || option == Option.SOFTCAP) {
            p.naive.cap = 3;
            p.loss.optSoftcap(3);
        }
        if (all || option == Option.Z_LOSS) {
            p.naive.zLoss = .01;
            p.loss.optZLoss(.01);
        }
        if (all || option == Option.IGNORE_INSIDE_VOCABULARY) {
            p.naive.ignored = 2;
            p.loss.optIgnoreIndex(2);
            for (int i = 0; i < N; i++) {
                p.labels[i] = p.labels[i] == -100 ? 2 : p.labels[i];
            }
        }
        if (all || option == Option.FLOAT_LABELS) {
            p.labelType = DataType.FLOAT32;
        }
        if (option == Option.INT_LABELS) {
            p.labelType = DataType.INT32;
        }
        if (option == Option.TWO_AXES) {
            p.lead = new Shape(N);
        }
        return p;
    }

    private static Stream<Arguments> optionsAndBlocks() {
        return Arrays.stream(Option.values())
                .flatMap(
                        option ->
                                Stream.of(1, 3, N, N + 5)
                                        .map(block -> Arguments.of(option, block)));
    }

    @ParameterizedTest
    @MethodSource("optionsAndBlocks")
    void evaluate_meanUnderTape_lossAndGradientsOfTheFormula(Option option, int block) {
        Problem p = problem(option);
        p.loss.optBlockTokens(block);
        assertMean(p, Collector.TAPE);
    }

    @ParameterizedTest
    @EnumSource(Option.class)
    void evaluate_meanUnderStockCollector_lossAndGradientsOfTheFormula(Option option) {
        assertMean(problem(option), Collector.STOCK);
    }

    @ParameterizedTest
    @MethodSource("optionsAndBlocks")
    void evaluate_noneWithRandomUpstream_lossesAndGradientsOfTheFormula(Option option, int block) {
        Problem p = problem(option);
        p.loss.optBlockTokens(block).optReduction(Reduction.NONE);
        assertNone(p, Collector.TAPE);
    }

    @ParameterizedTest
    @EnumSource(Option.class)
    void evaluate_noneUnderStockCollector_lossesAndGradientsOfTheFormula(Option option) {
        Problem p = problem(option);
        p.loss.optReduction(Reduction.NONE);
        assertNone(p, Collector.STOCK);
    }

    private void assertNone(Problem p, Collector collector) {
        p.upstream = new float[N];
        for (int i = 0; i < N; i++) {
            p.upstream[i] = (float) random.nextGaussian();
        }
        Actual actual = p.run(collector);
        assertEquals(p.lead, actual.array.getShape());
        double[] losses = new double[N];
        Arrays.setAll(losses, i -> actual.loss[i]);
        assertClose(p.expected(1, null).losses(), losses, 1e-6);
        assertGradients(p.expected(1, p.upstream), actual);
    }

    @ParameterizedTest
    @EnumSource(Collector.class)
    void evaluate_sum_lossAndGradientsOfTheFormula(Collector collector) {
        Problem p = problem(Option.ALL);
        p.loss.optReduction(Reduction.SUM);
        NaiveCrossEntropy.Result expected = p.expected(1, null);
        Actual actual = p.run(collector);
        assertEquals(expected.total(), actual.loss[0], 2e-6 * expected.total());
        assertGradients(expected, actual);
    }

    @Test
    void evaluate_gradientModeOff_sameLoss() {
        Problem p = problem(Option.ALL);
        try (GradMode off = GradMode.off()) {
            float loss = p.loss.build().evaluate(p.labels(), p.predictions()).getFloat();
            assertEquals(p.expectedMean().total(), loss, 2e-6 * loss);
        }
    }

    @Test
    void backward_lossScaledBeforehand_gradientsScale() {
        Problem p = new Problem();
        RingDtpLoss loss = p.loss.build();
        NDList predictions = p.predictions();
        predictions.forEach(a -> a.setRequiresGradient(true));
        try (Tape tape = new Tape(manager, 1, () -> {})) {
            tape.backward(loss.evaluate(p.labels(), predictions).mul(-3));
        }
        NaiveCrossEntropy.Result expected = p.expected(-3.0 / p.valid(), null);
        assertClose(expected.weight(), doubles(predictions.get(1).getGradient()), 1e-6);
    }

    @Test
    void backward_hiddenFromOtherOperations_gradientReachesTheirLeaf() {
        Problem p = new Problem();
        NDList predictions = p.predictions();
        NDArray leaf = predictions.get(0).div(2);
        leaf.setRequiresGradient(true);
        try (Tape tape = new Tape(manager, 1, () -> {})) {
            NDList pair = new NDList(leaf.mul(2), predictions.get(1));
            tape.backward(p.loss.build().evaluate(p.labels(), pair));
        }
        double[] expected = p.expectedMean().hidden();
        double[] actual = doubles(leaf.getGradient());
        assertClose(Arrays.stream(expected).map(d -> 2 * d).toArray(), actual, 1e-6);
    }

    // -- what went wrong elsewhere ------------------------------------------------------------

    @ParameterizedTest
    @EnumSource(Collector.class)
    void evaluate_allLabelsIgnored_zeroWithZeroGradientsThatConnect(Collector collector) {
        Problem p = problem(Option.BIAS);
        Arrays.fill(p.labels, -100);
        Actual actual = p.run(collector);
        assertEquals(0f, actual.loss[0]);
        for (double[] gradient : actual.gradients) {
            assertArrayEquals(new double[gradient.length], gradient);
        }
    }

    @ParameterizedTest
    @EnumSource(Collector.class)
    void evaluate_noneAndAllLabelsIgnored_zeros(Collector collector) {
        Problem p = new Problem();
        Arrays.fill(p.labels, -100);
        p.loss.optReduction(Reduction.NONE);
        p.upstream = new float[N];
        Arrays.fill(p.upstream, 1);
        Actual actual = p.run(collector);
        assertArrayEquals(new float[N], actual.loss);
        assertArrayEquals(new double[V * H], actual.gradients.get(1));
    }

    @ParameterizedTest
    @EnumSource(Collector.class)
    void evaluate_oneSampleOfTheBatchMasked_othersCount(Collector collector) {
        Problem p = new Problem();
        Arrays.fill(p.labels, 0, S, -100);
        assertMean(p, collector);
    }

    @Test
    void evaluate_emptyBatch_zero() {
        Problem p = new Problem();
        p.lead = new Shape(0);
        p.hidden = new double[0];
        p.labels = new long[0];
        Actual actual = p.run(Collector.TAPE);
        assertEquals(0f, actual.loss[0]);
        assertArrayEquals(new double[V * H], actual.gradients.get(1));
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 12})
    void evaluate_halfPrecisionInputs_weightGradientAccumulatesInSinglePrecision(int block) {
        Problem p = new Problem();
        p.hiddenType = DataType.FLOAT16;
        p.weightType = DataType.FLOAT16;
        p.loss.optBlockTokens(block);
        NaiveCrossEntropy.Result expected = p.expectedMean();
        Actual actual = p.run(Collector.TAPE);
        assertEquals(expected.total(), actual.loss[0], 2e-6 * expected.total());
        // one rounding to half precision, at the end
        assertGradients(expected, actual, 3e-4);
    }

    @ParameterizedTest
    @EnumSource(Collector.class)
    void evaluate_hiddenAndWeightOfDifferentTypes_gradientsInTheirTypes(Collector collector) {
        Problem p = new Problem();
        p.hiddenType = DataType.FLOAT16;
        NaiveCrossEntropy.Result expected = p.expectedMean();
        Actual actual = p.run(collector);
        assertClose(expected.hidden(), actual.gradients.get(0), 3e-4);
        assertClose(expected.weight(), actual.gradients.get(1), 1e-6);
    }

    @Test
    void evaluate_brainFloatInputs_gradientReachesTheLeafInSinglePrecision() {
        Problem p = new Problem();
        TorchKernels narrow =
                TorchKernels.compile(
                        "narrow", "def f(self, x: Tensor) -> Tensor:\n    return x.to(dtype=15)\n");
        // numbers that eight bits hold exactly
        Arrays.setAll(p.hidden, i -> Math.rint(8 * p.hidden[i]) / 8);
        Arrays.setAll(p.weight, i -> Math.rint(8 * p.weight[i]) / 8);
        NDList wide = p.predictions();
        wide.get(0).setRequiresGradient(true);
        NaiveCrossEntropy.Result expected = p.expectedMean();
        float loss;
        try (Tape tape = new Tape(manager, 1, () -> {})) {
            NDArray hidden = narrow.record(manager, "f", wide.get(0)).head();
            NDArray frozen = narrow.call(manager, "f", wide.get(1)).head();
            NDArray value = p.loss.build().evaluate(p.labels(), new NDList(hidden, frozen));
            tape.backward(value);
            loss = value.getFloat();
        }
        assertEquals(expected.total(), loss, 2e-6 * expected.total());
        // one rounding to eight bits, where the gradient leaves in the input's type
        assertClose(expected.hidden(), doubles(wide.get(0).getGradient()), 3e-3);
    }

    @Test
    void evaluate_manyBlocks_neitherLossNorGradientsDrift() {
        Problem p = large(4096);
        p.loss.optBlockTokens(32);
        NaiveCrossEntropy.Result expected = p.expectedMean();
        Actual actual = p.run(Collector.TAPE);
        assertEquals(expected.total(), actual.loss[0], 1e-6 * expected.total());
        assertGradients(expected, actual, 3e-6);
    }

    private Problem large(int n) {
        Problem p = new Problem();
        p.lead = new Shape(n);
        p.hidden = normal(n * H);
        p.labels = random.longs(n, 0, V).toArray();
        return p;
    }

    @Test
    void evaluate_largeLogitsWithSoftcap_boundedLogits() {
        Problem p = new Problem();
        Arrays.setAll(p.weight, i -> 100 * p.weight[i]);
        p.naive.cap = 30;
        p.loss.optSoftcap(30);
        NaiveCrossEntropy.Result expected = p.expectedMean();
        Actual actual = p.run(Collector.TAPE);
        assertEquals(expected.total(), actual.loss[0], 1e-5 * expected.total());
        assertTrue(actual.loss[0] < 60 + Math.log(V));
        // at the bound the slope 1 - tanh^2 is a small difference of large numbers
        assertGradients(expected, actual, 1e-4);
    }

    @Test
    void logits_scaleAndSoftcap_thoseOfTheLoss() {
        RingDtpLoss loss = RingDtpLoss.builder().optSoftcap(30).optLogitScale(2).build();
        NDArray hidden = manager.create(new float[] {62}, new Shape(1, 1));
        NDArray weight = manager.create(new float[] {1, 0}, new Shape(2, 1));
        float[] logits = loss.logits(new NDList(hidden, weight)).toFloatArray();
        assertEquals(30 * Math.tanh(124 / 30.0), logits[0], 1e-5);
        assertTrue(logits[0] < 30);
        assertEquals(0, logits[1]);
    }

    @Test
    void evaluate_hugeLogits_noOverflow() {
        Problem p = new Problem();
        Arrays.setAll(p.weight, i -> 1e4 * p.weight[i]);
        assertMean(p, Collector.TAPE);
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 5, 64})
    void getZLoss_anyBlockSize_meanSquaredLogSumExp(int block) {
        Problem p = problem(Option.Z_LOSS);
        p.loss.optBlockTokens(block);
        RingDtpLoss loss = p.loss.build();
        NaiveCrossEntropy.Result expected = p.expectedMean();
        for (Collector collector : Collector.values()) {
            p.run(collector, loss);
            assertEquals(expected.zLoss(), loss.getZLoss(), 2e-6 * expected.zLoss());
        }
    }

    @Test
    void getZLoss_nothingEvaluated_clearError() {
        assertThrows(IllegalStateException.class, () -> RingDtpLoss.builder().build().getZLoss());
    }

    @Test
    void evaluate_constantLogits_logOfTheVocabulary() {
        Problem p = new Problem();
        Arrays.fill(p.weight, 0);
        assertEquals(Math.log(V), p.run(Collector.TAPE).loss[0], 1e-6);
    }

    @ParameterizedTest
    @EnumSource(Collector.class)
    void evaluate_accumulationWithNormalizer_gradientOfTheWholeStep(Collector collector) {
        // micro-batches with 1 and 7 valid tokens
        Problem whole = new Problem();
        whole.lead = new Shape(8);
        whole.hidden = normal(8 * H);
        whole.labels = random.longs(8, 0, V).toArray();
        Problem first = part(whole, 0, 1);
        Problem second = part(whole, 1, 8);
        RingDtpLoss loss = RingDtpLoss.builder().optNormalizer(() -> 8).build();
        assertEquals(7, loss.validTokens(second.labels().head()));

        Actual a = first.run(collector, loss);
        Actual b = second.run(collector, loss);

        NaiveCrossEntropy.Result expected = whole.expectedMean();
        assertEquals(expected.total(), a.loss[0] + b.loss[0], 2e-6 * expected.total());
        double[] sum = new double[V * H];
        Arrays.setAll(sum, i -> a.gradients.get(1)[i] + b.gradients.get(1)[i]);
        assertClose(expected.weight(), sum, 1e-6);
    }

    private Problem part(Problem whole, int from, int to) {
        Problem part = new Problem();
        part.lead = new Shape(to - from);
        part.weight = whole.weight;
        part.hidden = Arrays.copyOfRange(whole.hidden, from * H, to * H);
        part.labels = Arrays.copyOfRange(whole.labels, from, to);
        return part;
    }

    @ParameterizedTest
    @ValueSource(doubles = {0, -1})
    void evaluate_normalizerNotPositive_clearError(double normalizer) {
        Problem p = new Problem();
        p.loss.optNormalizer(() -> normalizer);
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> p.run(Collector.TAPE));
        assertTrue(e.getMessage().contains("normalizer"), e.getMessage());
    }

    @Test
    void evaluate_ignoredLabelAboveTheVocabulary_noAccess() {
        Problem p = new Problem();
        p.naive.ignored = 255;
        p.loss.optIgnoreIndex(255).optReduction(Reduction.NONE);
        Arrays.setAll(p.labels, i -> i % 3 == 0 ? 255 : i);
        assertNone(p, Collector.TAPE);
    }

    @Test
    void evaluate_smoothingWeightsAndIgnoredMinusOne_noAccess() {
        Problem p = problem(Option.WEIGHTS);
        p.naive.smoothing = .2;
        p.naive.ignored = -1;
        p.loss.optIgnoreIndex(-1).optLabelSmoothing(.2);
        Arrays.setAll(p.labels, i -> i % 3 == 0 ? -1 : i);
        assertMean(p, Collector.TAPE);
    }

    @ParameterizedTest
    @ValueSource(longs = {-4, V, Integer.MAX_VALUE})
    void evaluate_labelOutOfRange_errorNamesPositionAndValue(long label) {
        Problem p = new Problem();
        p.loss.optIgnoreIndex(-1);
        Arrays.setAll(p.labels, i -> i == 0 ? -1 : 3);
        p.labels[6] = label;
        for (Collector collector : Collector.values()) {
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, () -> p.run(collector));
            assertTrue(e.getMessage().contains("[1, 2]"), e.getMessage());
            assertTrue(e.getMessage().contains("Label " + label + " "), e.getMessage());
        }
        // after an error all works as before
        p.labels[6] = 3;
        p.naive.ignored = -1;
        assertMean(p, Collector.TAPE);
    }

    @Test
    void evaluate_fractionalLabel_errorNamesIt() {
        Problem p = new Problem();
        NDList labels = p.labels();
        labels.set(0, labels.head().toType(DataType.FLOAT32, true).add(.5f));
        try (GradMode off = GradMode.off()) {
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () -> p.loss.build().evaluate(labels, p.predictions()));
            assertTrue(e.getMessage().contains(".5 at position [0, 0]"), e.getMessage());
        }
    }

    @Test
    void evaluate_shapesThatDoNotFit_clearErrors() {
        Problem p = new Problem();
        RingDtpLoss loss = p.loss.build();
        NDList good = p.predictions();
        NDArray strip = good.get(1).get(":, :3");
        assertRefused(loss, p.labels(), new NDList(good.get(0), strip), "do not fit");
        assertRefused(loss, p.labels(), new NDList(good.get(0)), "hidden, weight");
        assertRefused(
                loss,
                p.labels(),
                new NDList(good.get(0), good.get(1), manager.ones(new Shape(V - 1))),
                "bias");
        assertRefused(loss, new NDList(manager.ones(new Shape(N))), good, "Labels of shape");
        assertRefused(
                loss,
                new NDList(p.labels().head(), manager.ones(new Shape(N))),
                good,
                "Weights of shape");
    }

    private static void assertRefused(RingDtpLoss loss, NDList labels, NDList in, String part) {
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> loss.evaluate(labels, in));
        assertTrue(e.getMessage().contains(part), e.getMessage());
    }

    @Test
    void build_optionOutOfRange_clearError() {
        List<RingDtpLoss.Builder> bad =
                List.of(
                        RingDtpLoss.builder().optLabelSmoothing(1),
                        RingDtpLoss.builder().optLabelSmoothing(Double.NaN),
                        RingDtpLoss.builder().optLogitScale(0),
                        RingDtpLoss.builder().optSoftcap(-1),
                        RingDtpLoss.builder().optZLoss(-1),
                        RingDtpLoss.builder().optBlockTokens(0),
                        RingDtpLoss.builder().optReduction(Reduction.SUM).optNormalizer(() -> 1));
        bad.forEach(b -> assertThrows(IllegalArgumentException.class, b::build));
    }

    @ParameterizedTest
    @EnumSource(Reduction.class)
    void evaluate_frozenWeightOrHidden_otherGradientOnly(Reduction reduction) {
        Problem p = new Problem();
        p.loss.optReduction(reduction);
        if (reduction == Reduction.NONE) {
            p.upstream = new float[N];
            Arrays.fill(p.upstream, 1);
        }
        double scale = reduction == Reduction.MEAN ? 1.0 / p.valid() : 1;
        NaiveCrossEntropy.Result expected = p.expected(scale, null);

        p.freezeWeight = true;
        Actual actual = p.run(Collector.TAPE);
        assertNull(actual.gradients.get(1));
        assertClose(expected.hidden(), actual.gradients.get(0), 1e-6);

        p.freezeWeight = false;
        p.freezeHidden = true;
        actual = p.run(Collector.TAPE);
        assertNull(actual.gradients.get(0));
        assertClose(expected.weight(), actual.gradients.get(1), 1e-6);
    }

    // -- the second evaluation ----------------------------------------------------------------

    @ParameterizedTest
    @EnumSource(Reduction.class)
    void evaluate_secondTimeWithoutGradients_remembered(Reduction reduction) {
        Problem p = new Problem();
        RingDtpLoss loss = p.loss.optReduction(reduction).build();
        NDList labels = p.labels();
        NDList predictions = p.predictions();
        predictions.forEach(a -> a.setRequiresGradient(true));
        float[] first;
        try (Tape tape = new Tape(manager, 1, () -> {})) {
            first = loss.evaluate(labels, predictions).toFloatArray();
        }
        try (GradMode off = GradMode.off()) {
            // out of the reach of version counts, so that a computation would show
            Marker.overwriteBehindTheBack(predictions.get(0));
            assertArrayEquals(first, loss.evaluate(labels, predictions).toFloatArray());
            assertEquals(
                    reduction == Reduction.NONE ? p.lead : new Shape(),
                    loss.evaluate(labels, predictions).getShape());
        }
    }

    @Test
    void evaluate_weightChangedInPlaceMeanwhile_computedAnew() {
        Problem p = new Problem();
        RingDtpLoss loss = p.loss.build();
        NDList labels = p.labels();
        NDList predictions = p.predictions();
        try (GradMode off = GradMode.off()) {
            loss.evaluate(labels, predictions);
            predictions.get(1).muli(0);
            assertEquals(Math.log(V), loss.evaluate(labels, predictions).getFloat(), 1e-6);
        }
    }

    @Test
    void evaluate_normalizerChangedMeanwhile_computedAnew() {
        Problem p = new Problem();
        double[] divisor = {2};
        RingDtpLoss loss = p.loss.optNormalizer(() -> divisor[0]).build();
        NDList labels = p.labels();
        NDList predictions = p.predictions();
        try (GradMode off = GradMode.off()) {
            float halves = loss.evaluate(labels, predictions).getFloat();
            Marker.overwriteBehindTheBack(predictions.get(0));
            assertEquals(halves, loss.evaluate(labels, predictions).getFloat());
        }
        predictions = p.predictions();
        try (GradMode off = GradMode.off()) {
            float halves = loss.evaluate(labels, predictions).getFloat();
            divisor[0] = 8;
            float eighths = loss.evaluate(labels, predictions).getFloat();
            assertEquals(halves / 4, eighths, 1e-6 * halves);
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void backward_noneAndWeightsClosedOrChangedMeanwhile_gradientsOfTheOldOnes(boolean closed) {
        Problem p = new Problem();
        p.weights = random.doubles(N, 0.5, 2).toArray();
        RingDtpLoss loss = p.loss.optReduction(Reduction.NONE).build();
        NDList labels = p.labels();
        NDList predictions = p.predictions();
        predictions.forEach(a -> a.setRequiresGradient(true));
        try (Tape tape = new Tape(manager, 1, () -> {})) {
            NDArray value = loss.evaluate(labels, predictions);
            if (closed) {
                labels.get(1).close();
            } else {
                labels.get(1).muli(0);
            }
            tape.backward(value.sum());
        }
        NaiveCrossEntropy.Result expected = p.expected(1, null);
        assertClose(expected.hidden(), doubles(predictions.get(0).getGradient()), 1e-6);
        assertClose(expected.weight(), doubles(predictions.get(1).getGradient()), 1e-6);
    }

    @Test
    void evaluate_otherBatchBetween_computedAnew() {
        Problem p = new Problem();
        RingDtpLoss loss = p.loss.build();
        NDList labels = p.labels();
        NDList predictions = p.predictions();
        Problem other = new Problem();
        try (GradMode off = GradMode.off()) {
            float first = loss.evaluate(labels, predictions).getFloat();
            float second = loss.evaluate(other.labels(), other.predictions()).getFloat();
            assertEquals(other.expectedMean().total(), second, 1e-5);
            assertEquals(first, loss.evaluate(labels, predictions).getFloat());
        }
    }

    @Test
    void evaluate_anotherLabelsArray_computedAnew() {
        Problem p = new Problem();
        RingDtpLoss loss = p.loss.build();
        NDList predictions = p.predictions();
        try (GradMode off = GradMode.off()) {
            float first = loss.evaluate(p.labels(), predictions).getFloat();
            Arrays.fill(p.labels, 1);
            float second = loss.evaluate(p.labels(), predictions).getFloat();
            assertEquals(p.expectedMean().total(), second, 1e-5);
            assertTrue(Math.abs(first - second) > 1e-3);
        }
    }

    // -- accumulators -------------------------------------------------------------------------

    @Test
    void accumulator_batchesWithDifferentCounts_meanOverTokens() {
        Problem a = new Problem();
        Problem b = new Problem();
        Arrays.fill(b.labels, 1, N, -100);
        b.labels[0] = 3;
        Problem none = new Problem();
        Arrays.fill(none.labels, -100);
        RingDtpLoss loss = RingDtpLoss.builder().build();
        loss.addAccumulator("x");
        assertTrue(Float.isNaN(loss.getAccumulator("x")));
        loss.updateAccumulator("x", none.labels(), none.predictions());
        assertEquals(0f, loss.getAccumulator("x"));
        loss.updateAccumulators(new String[] {"x", "unknown"}, a.labels(), a.predictions());
        loss.updateAccumulator("x", b.labels(), b.predictions());
        double total = a.expected(1, null).total() + b.expected(1, null).total();
        assertEquals(total / (a.valid() + 1), loss.getAccumulator("x"), 1e-5);
        loss.resetAccumulator("x");
        assertTrue(Float.isNaN(loss.getAccumulator("x")));
        assertThrows(IllegalArgumentException.class, () -> loss.getAccumulator("y"));
    }

    @Test
    void accumulator_sum_meanOverBatches() {
        Problem a = new Problem();
        Problem b = new Problem();
        RingDtpLoss loss = RingDtpLoss.builder().optReduction(Reduction.SUM).build();
        loss.addAccumulator("x");
        loss.updateAccumulator("x", a.labels(), a.predictions());
        loss.updateAccumulator("x", b.labels(), b.predictions());
        double total = a.expected(1, null).total() + b.expected(1, null).total();
        assertEquals(total / 2, loss.getAccumulator("x"), 1e-4);
    }
}
