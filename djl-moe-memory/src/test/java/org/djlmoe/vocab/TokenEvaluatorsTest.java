package org.djlmoe.vocab;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.evaluator.Accuracy;
import ai.djl.training.evaluator.Evaluator;
import ai.djl.training.evaluator.TopKAccuracy;
import ai.djl.training.loss.Loss;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.function.Function;
import java.util.stream.Stream;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Tape;
import org.djlmoe.vocab.RingDtpLoss.Reduction;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.MethodSource;
import org.junit.jupiter.params.provider.ValueSource;

class TokenEvaluatorsTest {

    private static final int N = 12;
    private static final int H = 5;
    private static final int V = 7;

    private NDManager manager;
    private final Random random = new Random(5);
    private final double[] hidden = normal(N * H);
    private final double[] weight = normal(V * H);
    private final double[] bias = normal(V);
    private final long[] labels = new long[N];

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        for (int i = 0; i < N; i++) {
            labels[i] = i % 4 == 1 ? -100 : best(i);
            if (i % 3 == 0) {
                labels[i] = random.nextInt(V);
            }
        }
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private double[] normal(int count) {
        return random.doubles(count, -1, 1).map(x -> (float) x).toArray();
    }

    private double logit(int token, int id) {
        double logit = bias[id];
        for (int i = 0; i < H; i++) {
            logit += hidden[token * H + i] * weight[id * H + i];
        }
        return 3 * Math.tanh(2 * logit / 3);
    }

    private int best(int token) {
        int best = 0;
        for (int id = 1; id < V; id++) {
            if (logit(token, id) > logit(token, best)) {
                best = id;
            }
        }
        return best;
    }

    private double[] reference(long[] labels) {
        double nll = 0;
        int correct = 0;
        int tokens = 0;
        for (int t = 0; t < N; t++) {
            if (labels[t] == -100) {
                continue;
            }
            double z = 0;
            for (int id = 0; id < V; id++) {
                z += Math.exp(logit(t, id));
            }
            nll += Math.log(z) - logit(t, (int) labels[t]);
            correct += best(t) == labels[t] ? 1 : 0;
            tokens++;
        }
        return new double[] {Math.exp(nll / tokens), (double) correct / tokens};
    }

    private static RingDtpLoss.Builder loss() {
        return RingDtpLoss.builder().optLogitScale(2).optSoftcap(3);
    }

    private NDArray array(double[] values, Shape shape) {
        float[] narrow = new float[values.length];
        for (int i = 0; i < narrow.length; i++) {
            narrow[i] = (float) values[i];
        }
        return manager.create(narrow, shape);
    }

    private NDList predictions() {
        return new NDList(
                array(hidden, new Shape(3, N / 3, H)),
                array(weight, new Shape(V, H)),
                array(bias, new Shape(V)));
    }

    private NDList labels(long[] values) {
        return new NDList(manager.create(values, new Shape(3, N / 3)));
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 3, N, N + 5})
    void evaluate_anyBlockSize_equalsTheReference(int block) {
        // what makes a loss differ from a likelihood must not show in either figure
        RingDtpLoss loss =
                loss().optBlockTokens(block)
                        .optLabelSmoothing(0.1)
                        .optZLoss(0.01)
                        .optReduction(Reduction.SUM)
                        .build();
        NDList weighted = labels(labels).addAll(new NDList(manager.full(new Shape(3, N / 3), 3f)));
        double[] expected = reference(labels);

        assertTrue(expected[1] > 0.2 && expected[1] < 0.95, "a test that decides nothing");
        assertEquals(
                expected[0],
                new Perplexity(loss).evaluate(weighted, predictions()).getFloat(),
                1e-5 * expected[0]);
        assertEquals(
                expected[1],
                new TokenAccuracy(loss).evaluate(weighted, predictions()).getFloat(),
                1e-7);
    }

    private enum Collector {
        TAPE,
        STOCK
    }

    @ParameterizedTest
    @EnumSource(Collector.class)
    void updateAccumulator_afterTheTrainingLoss_equalsTheReferenceAndLeavesGradients(
            Collector kind) {
        RingDtpLoss loss = loss().optBlockTokens(3).build();
        TokenAccuracy accuracy = new TokenAccuracy(loss);
        Perplexity perplexity = new Perplexity(loss);
        List<TokenEvaluator> both = List.of(accuracy, perplexity);
        both.forEach(e -> e.addAccumulator("train"));
        NDList in = predictions();
        in.forEach(a -> a.setRequiresGradient(true));
        NDList targets = labels(labels);
        float[] gradient = null;
        try (GradientCollector collector =
                kind == Collector.TAPE
                        ? new Tape(manager, 1, () -> {})
                        : Engine.getEngine("PyTorch").newGradientCollector()) {
            NDArray value = loss.evaluate(targets, in);
            collector.backward(value);
            gradient = in.get(1).getGradient().toFloatArray();
            both.forEach(e -> e.updateAccumulator("train", targets, in));
        }
        double[] expected = reference(labels);
        assertEquals(expected[0], perplexity.getAccumulator("train"), 1e-5 * expected[0]);
        assertEquals(expected[1], accuracy.getAccumulator("train"), 1e-7);
        assertArrayEquals(gradient, in.get(1).getGradient().toFloatArray());
    }

    @Test
    void updateAccumulator_afterTheLossOfTheSameBatch_computesNothingAgain() {
        RingDtpLoss loss = loss().build();
        TokenAccuracy accuracy = new TokenAccuracy(loss);
        NDList in = predictions();
        NDList targets = labels(labels);
        try (GradMode off = GradMode.off()) {
            loss.evaluate(targets, in);
        }
        VocabSegment.Scores first = loss.scores(targets, in);

        accuracy.addAccumulator("train");
        accuracy.updateAccumulator("train", targets, in);

        assertSame(first, loss.scores(targets, in));
    }

    @Test
    void getAccumulator_batchesOfDifferentSizes_weighsTokensNotBatches() {
        RingDtpLoss loss = loss().build();
        TokenAccuracy accuracy = new TokenAccuracy(loss);
        accuracy.addAccumulator("all");
        assertEquals(Float.NaN, accuracy.getAccumulator("all"));
        long[] one = new long[N];
        Arrays.fill(one, -100);
        one[4] = (best(4) + 1) % V;
        long[] rest = new long[N];
        for (int i = 0; i < N; i++) {
            rest[i] = best(i);
        }
        accuracy.updateAccumulator("all", labels(one), predictions());
        accuracy.updateAccumulator("all", labels(rest), predictions());

        assertEquals(N / (N + 1f), accuracy.getAccumulator("all"), 1e-7f);
        accuracy.resetAccumulator("all");
        assertEquals(Float.NaN, accuracy.getAccumulator("all"));
        assertThrows(IllegalArgumentException.class, () -> accuracy.getAccumulator("other"));
    }

    @Test
    void evaluate_allIgnored_isNaN() {
        long[] none = new long[N];
        Arrays.fill(none, -100);
        RingDtpLoss loss = loss().build();
        for (TokenEvaluator e : List.of(new TokenAccuracy(loss), new Perplexity(loss))) {
            assertEquals(Float.NaN, e.evaluate(labels(none), predictions()).getFloat());
        }
    }

    @Test
    void evaluate_equalLogits_predictsTheLowestId() {
        NDList in = predictions();
        in.set(1, manager.zeros(new Shape(V, H)));
        in.set(2, manager.zeros(new Shape(V)));
        long[] ids = new long[N];
        ids[3] = 1;
        RingDtpLoss loss = loss().build();

        assertEquals(
                (N - 1f) / N, new TokenAccuracy(loss).evaluate(labels(ids), in).getFloat(), 1e-7f);
        assertEquals(V, new Perplexity(loss).evaluate(labels(ids), in).getFloat(), 1e-5f);
    }

    @ParameterizedTest
    @EnumSource(Reduction.class)
    void evaluate_labelsWithALastAxisOfOne_areTheSameLabels(Reduction reduction) {
        RingDtpLoss loss = loss().optReduction(reduction).build();
        NDArray flat = manager.create(labels, new Shape(3, N / 3));
        NDArray expected = loss.evaluate(new NDList(flat), predictions());
        NDArray actual = loss.evaluate(new NDList(flat.expandDims(2)), predictions());

        assertArrayEquals(expected.toFloatArray(), actual.toFloatArray());
        assertEquals(
                new TokenAccuracy(loss).evaluate(new NDList(flat), predictions()).getFloat(),
                new TokenAccuracy(loss)
                        .evaluate(new NDList(flat.expandDims(2)), predictions())
                        .getFloat());
    }

    static Stream<Evaluator> stock() {
        return Stream.of(
                new Accuracy(),
                new TopKAccuracy(2),
                new Accuracy("mine", 2) {},
                Loss.softmaxCrossEntropyLoss());
    }

    private static void train(Loss loss, Evaluator evaluator) {
        try (Model model = Model.newInstance("refuse", "PyTorch")) {
            model.setBlock(VocabProjection.builder().setVocabSize(V).build());
            new BoundedTrainer(
                            model,
                            new DefaultTrainingConfig(loss)
                                    .optDevices(new Device[] {Device.cpu()})
                                    .addEvaluator(evaluator))
                    .close();
        }
    }

    @ParameterizedTest
    @MethodSource("stock")
    void boundedTrainer_evaluatorThatExpectsLogits_isRefusedNamingTheRightOne(Evaluator wrong) {
        RingDtpLoss loss = loss().build();
        String message =
                assertThrows(IllegalArgumentException.class, () -> train(loss, wrong)).getMessage();
        assertTrue(message.contains(wrong.getName()), message);
        assertTrue(message.contains("TokenAccuracy"), message);
    }

    @Test
    void boundedTrainer_evaluatorsThatFit_areAccepted() {
        RingDtpLoss loss = loss().build();
        Function<RingDtpLoss, Evaluator> perplexity = Perplexity::new;
        train(loss, perplexity.apply(loss));
        train(loss, new TokenAccuracy("accuracy", loss));
        // with logits in hand any evaluator will do
        train(Loss.softmaxCrossEntropyLoss(), new Accuracy());
    }
}
