package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.function.Consumer;
import java.util.stream.IntStream;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.maskcoft.PriorSweep.Point;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.Router;
import org.djlmoe.routing.RoutingObserver;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;
import org.djlmoe.training.LogitRanges;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.MethodSource;
import org.junit.jupiter.params.provider.ValueSource;

class MaskCoFTTest {

    private static final int EXPERTS = 5;
    private static final StageListener SILENT = (step, steps, tokens, loss) -> {};

    @TempDir Path folder;

    private static LanguageModel model() {
        MoeConfig config =
                MoeConfig.builder()
                        .setVocabSize(19)
                        .setHiddenSize(16)
                        .setIntermediateSize(12)
                        .setNumLayers(2)
                        .setNumHeads(2)
                        .setNumExperts(EXPERTS)
                        .setTopK(2)
                        .optInitializerRange(0.3)
                        .build();
        return LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, 11);
    }

    /** A stream in which a token mostly decides the next one. */
    private static PackedTokens text() {
        Random random = new Random(5);
        int[] stream = new int[16 * 60 + 1];
        for (int i = 1; i < stream.length; i++) {
            stream[i] = random.nextInt(10) == 0 ? random.nextInt(19) : (stream[i - 1] * 7 + 3) % 19;
        }
        return PackedTokens.of(stream, 16);
    }

    private static Map<String, float[]> weights(LanguageModel model) {
        Map<String, float[]> weights = new LinkedHashMap<>();
        model.decoder()
                .namedParameters()
                .forEach((name, p) -> weights.put(name, p.getArray().toFloatArray()));
        return weights;
    }

    private static CoAdaptation.Builder adaptation(LanguageModel model) {
        return CoAdaptation.builder()
                .setModel(model)
                .setBatches(text().batches(4, 1))
                .setSteps(30)
                .optAdapters(3, 6)
                .optLearningRate(1e-2);
    }

    private static double loss(LanguageModel model) {
        return Evaluation.of(model, text().sequential(20), t -> {}).loss();
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void coAdaptation_control_movesAdaptersAndRoutersOnly(boolean routers) {
        try (LanguageModel model = model()) {
            Map<String, float[]> before = weights(model);
            double first = loss(model);
            float[] losses = adaptation(model).optTrainRouters(routers).build().run(SILENT);

            assertEquals(30, losses.length);
            assertTrue(loss(model) < first - 0.05, first + " -> " + loss(model));
            Map<String, float[]> after = weights(model);
            before.forEach(
                    (name, w) -> {
                        boolean moved = !Arrays.equals(w, after.get(name));
                        assertEquals(routers && name.endsWith("mlp.gate.weight"), moved, name);
                    });
            after.keySet().removeAll(before.keySet());
            assertEquals(2 * 4, after.size());
            after.forEach(
                    (name, w) -> {
                        boolean zero = true;
                        for (float v : w) {
                            zero &= v == 0;
                        }
                        assertFalse(zero, name + " did not train");
                    });
        }
    }

    @Test
    void coAdaptation_freshAdapters_lossIsBitEqualToTheBase() {
        try (LanguageModel model = model()) {
            double before = model.loss(text().batches(4, 1).at(0));
            float first = adaptation(model).setSteps(1).build().run(SILENT)[0];
            assertEquals((float) before, first);
        }
    }

    @Test
    void coAdaptation_failsHalfway_modelHasNoAdaptersAndRunsAgain() {
        try (LanguageModel model = model()) {
            CoAdaptation control = adaptation(model).setSteps(3).optTrainRouters(false).build();
            double before = loss(model);
            assertThrows(
                    ArithmeticException.class,
                    () ->
                            control.run(
                                    (step, steps, tokens, loss) -> {
                                        throw new ArithmeticException("halfway");
                                    }));
            model.decoder().moeBlocks().forEach(l -> assertNull(l.experts().adapters()));
            assertEquals(before, loss(model));
            float[] again = control.run(SILENT);
            try (LanguageModel fresh = model()) {
                assertArrayEquals(
                        adaptation(fresh).setSteps(3).optTrainRouters(false).build().run(SILENT),
                        again);
            }
        }
    }

    @Test
    void coAdaptation_oneLayerHasAdapters_keepsThemAndDetachesItsOwn() {
        try (LanguageModel model = model()) {
            List<MoeBlock> layers = model.decoder().moeBlocks();
            layers.get(1).experts().attachAdapters(2, 4);
            assertThrows(IllegalStateException.class, () -> adaptation(model).build().run(SILENT));
            assertNull(layers.get(0).experts().adapters());
            assertNotNull(layers.get(1).experts().adapters());
        }
    }

    @Test
    void evaluation_anObserverIsThere_comesBackAfterwards() {
        try (LanguageModel model = model()) {
            RoutingObserver own = ids -> {};
            Router first = model.decoder().moeBlocks().get(0).router();
            first.setObserver(own);
            loss(model);
            assertSame(own, first.observer());
            assertNull(model.decoder().moeBlocks().get(1).router().observer());
        }
    }

    @Test
    void evaluation_emptyText_clearError() {
        try (LanguageModel model = model()) {
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () -> Evaluation.of(model, List.of(), t -> {}));
            assertTrue(e.getMessage().contains("empty"), e.getMessage());
        }
    }

    @Test
    void mergeAdapters_afterTraining_sameLossAsUnmerged() {
        try (LanguageModel model = model()) {
            double base = loss(model);
            adaptation(model).build().run(SILENT);
            double unmerged = loss(model);
            model.decoder().moeBlocks().forEach(layer -> layer.experts().mergeAdapters());
            assertEquals(unmerged, loss(model), 1e-5 * unmerged);
            assertTrue(Math.abs(base - unmerged) > 1e-3);
            assertTrue(model.decoder().adapterParameters().isEmpty());
        }
    }

    @Test
    void coAdaptation_mask_droppedExpertsGetNothing() {
        ExpertMask mask = ExpertMask.random(2, EXPERTS, 3, 4);
        try (LanguageModel model = model()) {
            adaptation(model).optMask(mask).build().run(SILENT);
            for (int layer = 0; layer < 2; layer++) {
                float[] b =
                        weights(model)
                                .get("model.layers." + layer + ".mlp.experts.down_proj.lora_B");
                int slab = b.length / EXPERTS;
                for (int e = 0; e < EXPERTS; e++) {
                    float[] of = Arrays.copyOfRange(b, e * slab, (e + 1) * slab);
                    boolean trained = !Arrays.equals(of, new float[slab]);
                    assertEquals(mask.isKept(layer, e), trained, layer + " " + e);
                }
            }
            new ExpertPrior(mask, SelectionPrior.hardMask()).apply(model.decoder());
            long[][] usage = Evaluation.of(model, text().sequential(20), t -> {}).trace().usage();
            for (int layer = 0; layer < 2; layer++) {
                for (int e = 0; e < EXPERTS; e++) {
                    assertTrue(mask.isKept(layer, e) || usage[layer][e] == 0);
                }
            }
        }
    }

    @Test
    void run_wholeRecipe_isRepeatableAndUsesTheChosenPrior() {
        try (LanguageModel one = model();
                LanguageModel two = model()) {
            MaskCoFT.Result a = recipe(one).run((stage, step, steps, tokens, loss) -> {});
            MaskCoFT.Result b = recipe(two).run((stage, step, steps, tokens, loss) -> {});

            assertArrayEquals(a.losses(), b.losses());
            assertEquals(a.mask(), b.mask());
            assertEquals(a.prior(), b.prior());
            assertEquals(4, a.mask().count(0));
            assertEquals(3, a.sweep().points().size());
            assertTrue(a.sweep().withinLimit());
        }
    }

    static List<MaskEstimator> estimators() {
        return List.of(
                MaskEstimator.plackettLuce(), MaskEstimator.gumbel(), MaskEstimator.dense(1));
    }

    @ParameterizedTest
    @MethodSource("estimators")
    void run_everyEstimator_learnsAndLeavesTheModelAsItWas(MaskEstimator estimator) {
        try (LanguageModel model = model()) {
            model.train(path -> path.endsWith("norm.weight"));
            Map<String, float[]> before = weights(model);
            MaskLearning learning =
                    MaskLearning.builder()
                            .setNumLayers(2)
                            .setNumExperts(EXPERTS)
                            .setBudget(MaskBudget.total(7, 2, 2))
                            .setTopK(2)
                            .optEstimator(estimator)
                            .optSamples(3)
                            .build();
            double[] losses = new double[5];
            ExpertMask mask =
                    MaskSearch.run(
                            model,
                            text().batches(4, 1),
                            learning,
                            5,
                            (step, steps, tokens, loss) -> losses[step - 1] = loss);
            assertEquals(7, mask.count(0) + mask.count(1));
            assertTrue(Arrays.stream(losses).allMatch(v -> v > 0.5 && v < 6));
            // Dropped experts are credited too, though not by every estimator.
            assertTrue(Arrays.stream(learning.theta()[0]).anyMatch(t -> t != 0));
            Map<String, float[]> after = weights(model);
            assertEquals(before.keySet(), after.keySet());
            before.forEach((name, w) -> assertArrayEquals(w, after.get(name), name));
            model.decoder()
                    .namedParameters()
                    .forEach(
                            (name, p) ->
                                    assertEquals(
                                            name.endsWith("norm.weight"), p.requiresGradient()));
            try (LanguageModel fresh = model()) {
                assertEquals(loss(fresh), loss(model));
            }
        }
    }

    @Test
    void maskBlocks_oneStepOfSamples_gradientIsTheirMeanAndAnOptimizerMovesTheta() {
        try (LanguageModel model = model()) {
            MaskBlocks masks =
                    MaskBlocks.builder()
                            .setLayers(model.decoder().moeBlocks())
                            .setManager(model.manager())
                            .setBudget(MaskBudget.perLayer(3))
                            .optEstimator(MaskEstimator.dense(2))
                            .optSamples(2)
                            .optScale(10)
                            .build();
            model.train(path -> path.endsWith("mask_logits"));
            double[][] start = {{0, 0.1, 0.2, 0.3, 0.4}, {0.5, 0, 0, 0.25, 0}};
            masks.setTheta(start);
            assertEquals(0.3, masks.theta()[0][3], 1e-6);
            TokenBatch batch = text().batches(4, 1).at(0);
            Optimizer sgd = Optimizer.sgd().setLearningRateTracker(Tracker.fixed(1f)).build();
            double[][] mean = new double[2][EXPERTS];
            try (LanguageModelTrainer trainer = new LanguageModelTrainer(model, sgd, 0)) {
                for (int i = 0; i < 2; i++) {
                    masks.draw(3, i);
                    trainer.accumulate(batch);
                    double[][] one = masks.takeGradients();
                    for (int l = 0; l < 2; l++) {
                        for (int e = 0; e < EXPERTS; e++) {
                            mean[l][e] += one[l][e];
                        }
                    }
                }
                masks.draw(3, 0);
                trainer.accumulate(batch);
                ExpertMask last = masks.draw(3, 1);
                assertEquals(last, masks.draw(3, 1));
                trainer.step(batch);
                for (int l = 0; l < 2; l++) {
                    for (int e = 0; e < EXPERTS; e++) {
                        assertEquals(-10 * mean[l][e], masks.theta()[l][e] - start[l][e], 1e-5);
                    }
                }
            }
            masks.detach();
            assertTrue(model.decoder().maskParameters().isEmpty());
            assertThrows(
                    IllegalArgumentException.class,
                    () ->
                            MaskBlocks.builder()
                                    .setLayers(model.decoder().moeBlocks())
                                    .setManager(model.manager())
                                    .setBudget(MaskBudget.perLayer(3))
                                    .optEstimator(MaskEstimator.plackettLuce())
                                    .build());
        }
    }

    /** With loads in its loss, the search prefers masks that load less. */
    @Test
    void run_loadWeight_masksLossIncludesLoads() {
        try (LanguageModel model = model();
                LanguageModel same = model()) {
            double[] plain =
                    recipe(model).run((stage, step, steps, tokens, loss) -> {}).maskLosses();
            double[] loaded =
                    recipe(same, b -> b.optLoadWeight(10))
                            .run((stage, step, steps, tokens, loss) -> {})
                            .maskLosses();
            assertTrue(loaded[0] > plain[0] + 1, plain[0] + " " + loaded[0]);
        }
    }

    @Test
    void run_keptTotalAndDenseEstimatorInProbabilityForm_prior() throws IOException {
        try (LanguageModel model = model()) {
            MaskCoFT.Result result =
                    recipe(
                                    model,
                                    b ->
                                            b.optKeptTotal(7)
                                                    .optEstimator(MaskEstimator.dense(1))
                                                    .optWeights(MaskedWeights.KEPT)
                                                    .optForm(SelectionPrior.Form.PROBABILITY)
                                                    .optBetas(List.of(0.25)))
                            .run((stage, step, steps, tokens, loss) -> {});
            assertEquals(7, result.mask().count(0) + result.mask().count(1));
            assertEquals(
                    SelectionPrior.probability(0.25).withProtectedTop(0), result.prior().prior());
            result.save(folder);
            assertEquals(result.prior(), ExpertPrior.load(folder));
            assertTrue(Arrays.deepEquals(result.theta(), ExpertPrior.loadTheta(folder)));
        }
    }

    private static Arguments bad(String setting, Consumer<MaskCoFT.Builder> mistake) {
        return Arguments.of(setting, mistake);
    }

    static List<Arguments> mistakes() {
        return List.of(
                bad("kept", b -> b.optKept(0)),
                bad("kept", b -> b.optKept(1)),
                bad("kept", b -> b.optKept(EXPERTS + 1)),
                bad("kept", b -> b.optKeptTotal(3)),
                bad("kept", b -> b.optKeptTotal(2 * EXPERTS + 1)),
                bad("both", b -> b.optKept(3).optKeptTotal(6)),
                bad("estimator", b -> b.optEstimator(null)),
                bad("loadWeight", b -> b.optLoadWeight(-1)),
                bad("loadWeight", b -> b.optLoadWeight(1).optEstimator(MaskEstimator.gumbel())),
                bad("temperature", b -> b.optTemperature(0)),
                bad("maskLearningRate", b -> b.optMaskLearningRate(0)),
                bad("weights", b -> b.optWeights(null)),
                bad("form", b -> b.optForm(null)),
                bad("maskSteps", b -> b.optMaskSteps(-1)),
                bad("maskSamples", b -> b.optMaskSamples(1)),
                bad("steps", b -> b.optSteps(0)),
                bad("learningRate", b -> b.optLearningRate(0)),
                bad("learningRate", b -> b.optLearningRate(Double.NaN)),
                bad("learningRate", b -> b.optLearningRate(Double.POSITIVE_INFINITY)),
                bad("softBeta", b -> b.optSoftBeta(-1)),
                bad("softShare", b -> b.optSoftShare(1.5)),
                bad("softShare", b -> b.optSoftShare(Double.NaN)),
                bad("cacheSize", b -> b.optCacheSize(1)),
                bad("cacheSize", b -> b.optCacheSize(0)),
                bad("policy", b -> b.optPolicy(null)),
                bad("perplexityLimit", b -> b.optPerplexityLimit(0)),
                bad("betas", b -> b.optBetas(List.of())),
                bad("betas", b -> b.optBetas(List.of(1.0, -0.5))),
                bad("betas", b -> b.optBetas(List.of(Double.NaN))),
                bad("rank", b -> b.optAdapters(0, 1)),
                bad("alpha", b -> b.optAdapters(1, 0)),
                bad("alpha", b -> b.optAdapters(1, Double.POSITIVE_INFINITY)),
                bad("model", b -> b.setModel(null)));
    }

    @ParameterizedTest
    @MethodSource("mistakes")
    void build_settingOutOfRange_errorNamesIt(String setting, Consumer<MaskCoFT.Builder> mistake) {
        try (LanguageModel model = model()) {
            MaskCoFT.Builder builder =
                    MaskCoFT.builder()
                            .setModel(model)
                            .setBatches(text().batches(4, 1))
                            .setValidation(text().sample(20, 10));
            builder.build();
            mistake.accept(builder);
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, builder::build);
            assertTrue(e.getMessage().contains(setting), e.getMessage());
        }
    }

    @Test
    void run_adaptersAttached_refusedBeforeAnyStep() {
        try (LanguageModel model = model()) {
            model.decoder().moeBlocks().get(1).experts().attachAdapters(2, 4);
            MaskCoFT recipe = recipe(model);
            assertThrows(
                    IllegalStateException.class,
                    () ->
                            recipe.run(
                                    (stage, step, steps, tokens, loss) -> {
                                        throw new AssertionError(stage);
                                    }));
        }
    }

    @Test
    void run_noMaskSteps_keepsTheExpertsMostUsed() {
        try (LanguageModel model = model()) {
            long[][] usage = Evaluation.of(model, text().sample(20, 10), t -> {}).trace().usage();
            MaskCoFT.Result result =
                    recipe(model, b -> b.optMaskSteps(0).optKept(2).optSteps(1))
                            .run((stage, step, steps, tokens, loss) -> {});
            assertEquals(0, result.maskLosses().length);
            for (int l = 0; l < usage.length; l++) {
                long[] ofLayer = usage[l];
                long least =
                        Arrays.stream(result.mask().experts(l))
                                .mapToLong(e -> ofLayer[e])
                                .min()
                                .orElseThrow();
                long[] sorted = Arrays.stream(usage[l]).sorted().toArray();
                assertEquals(sorted[EXPERTS - 2], least);
            }
        }
    }

    private static MaskCoFT recipe(LanguageModel model) {
        return recipe(model, b -> {});
    }

    private static MaskCoFT recipe(LanguageModel model, Consumer<MaskCoFT.Builder> change) {
        MaskCoFT.Builder builder =
                MaskCoFT.builder()
                        .setModel(model)
                        .setBatches(text().batches(4, 1))
                        .setValidation(text().sample(20, 10))
                        .optMaskSteps(4)
                        .optMaskSamples(3)
                        .optSteps(6)
                        .optAdapters(2, 4)
                        .optBetas(List.of(0.0, 1.0, Double.POSITIVE_INFINITY))
                        .optSeed(9);
        change.accept(builder);
        return builder.build();
    }

    @Test
    void prior_betaZeroAndInfinity_areTheRouterAndTheHardMask() {
        ExpertMask mask = ExpertMask.random(2, EXPERTS, 3, 4);
        try (LanguageModel model = model()) {
            double router = loss(model);
            new ExpertPrior(mask, SelectionPrior.additive(0)).apply(model.decoder());
            assertEquals(router, loss(model));
            new ExpertPrior(mask, SelectionPrior.additive(Double.POSITIVE_INFINITY))
                    .apply(model.decoder());
            double hard = loss(model);
            new ExpertPrior(mask, SelectionPrior.hardMask()).apply(model.decoder());
            assertEquals(hard, loss(model));
            ExpertPrior.clear(model.decoder());
            assertEquals(router, loss(model));
        }
    }

    @Test
    void choose_pointsWithinTheLimit_fewestLoads() {
        List<Point> points = List.of(point(1, 4.0, 3.0), point(2, 4.1, 2.0), point(4, 4.3, 1.0));
        PriorSweep sweep = PriorSweep.choose(points, 4.2);
        assertEquals(points.get(1), sweep.chosen());
        assertTrue(sweep.withinLimit());
    }

    @Test
    void choose_noneWithinTheLimit_fewestLoadsNearTheLowestPerplexityAndSaysSo() {
        List<Point> points = List.of(point(1, 4.3, 3.0), point(2, 4.1, 2.5), point(4, 4.2, 1.0));
        PriorSweep sweep = PriorSweep.choose(points, 4.0);
        assertEquals(points.get(1), sweep.chosen());
        assertFalse(sweep.withinLimit());
        List<Point> flat = List.of(point(1, 4.10, 3.0), point(2, 4.13, 2.5), point(4, 4.2, 1.0));
        assertEquals(flat.get(1), PriorSweep.choose(flat, 4.0).chosen());
        assertThrows(IllegalArgumentException.class, () -> PriorSweep.choose(List.of(), 4));
    }

    private static Point point(double beta, double perplexity, double loads) {
        return new Point(SelectionPrior.additive(beta), perplexity, loads);
    }

    @ParameterizedTest
    @ValueSource(doubles = {0, 1.5, Double.POSITIVE_INFINITY})
    void expertPrior_saveAndLoad_sameAgain(double beta) throws IOException {
        assertNull(ExpertPrior.load(folder));
        ExpertPrior prior =
                new ExpertPrior(ExpertMask.random(3, EXPERTS, 2, 1), SelectionPrior.additive(beta));
        prior.save(folder);
        assertEquals(prior, ExpertPrior.load(folder));
    }

    @Test
    void expertPrior_rangesWeightsAndTheta_comeBack() throws IOException {
        ExpertMask mask = ExpertMask.random(2, EXPERTS, 3, 1);
        ExpertPrior scaled =
                new ExpertPrior(mask, SelectionPrior.scaled(0.5, 1))
                        .withLogitRanges(List.of(2.0, 8.5));
        double[][] theta = {{0.1, -1e-300, Math.PI, 4, 5}, {5, 4, 3, 2, -1}};
        scaled.save(folder, theta);
        assertEquals(scaled, ExpertPrior.load(folder));
        assertTrue(Arrays.deepEquals(theta, ExpertPrior.loadTheta(folder)));

        ExpertPrior hard =
                new ExpertPrior(mask, SelectionPrior.hardMask()).withWeights(MaskedWeights.KEPT);
        hard.save(folder);
        assertEquals(hard, ExpertPrior.load(folder));
        assertNull(ExpertPrior.loadTheta(folder));
        ExpertPrior.delete(folder);
        assertNull(ExpertPrior.load(folder));
        assertEquals(0, folder.toFile().list().length);
        assertThrows(IllegalArgumentException.class, () -> hard.withLogitRanges(List.of(1.0)));
        assertThrows(IllegalArgumentException.class, () -> scaled.withWeights(MaskedWeights.KEPT));
        assertThrows(
                IllegalArgumentException.class, () -> scaled.withLogitRanges(List.of(1.0, 0.0)));
    }

    /** D by a router whose logits are known: those of the norm's output. */
    @Test
    void logitRanges_measured_areThoseOfTheRoutersLogits() {
        try (LanguageModel model = model()) {
            List<Double> ranges = LogitRanges.measure(model, text().sequential(20));
            Router router = model.decoder().moeBlocks().get(1).router();
            List<double[]> rows = new ArrayList<>();
            router.setLogitObserver(
                    logits -> {
                        float[] z = logits.toFloatArray();
                        for (int at = 0; at < z.length; at += EXPERTS) {
                            double[] row = new double[EXPERTS];
                            for (int e = 0; e < EXPERTS; e++) {
                                row[e] = z[at + e];
                            }
                            rows.add(row);
                        }
                    });
            List<int[]> chosen = new ArrayList<>();
            router.setObserver(
                    ids -> {
                        long[] flat = ids.toLongArray();
                        for (int at = 0; at < flat.length; at += 2) {
                            chosen.add(new int[] {(int) flat[at], (int) flat[at + 1]});
                        }
                    });
            // Not by an evaluation, which sets observers of its own.
            text().sequential(20).forEach(model::loss);
            assertEquals(rows.size(), chosen.size());
            assertEquals(
                    SelectionPrior.meanLogitRange(rows.toArray(double[][]::new)),
                    ranges.get(1),
                    1e-9);
            // They are the logits that the router ranks by.
            for (int t = 0; t < rows.size(); t++) {
                int[] own = SelectionPrior.additive(0).select(rows.get(t), new boolean[EXPERTS], 2);
                assertArrayEquals(own, chosen.get(t));
            }
            router.setLogitObserver(null);
            router.setObserver(null);
            MaskCoFT.Result result =
                    recipe(model, b -> b.optForm(SelectionPrior.Form.SCALED).optBetas(List.of(0.5)))
                            .run((stage, step, steps, tokens, loss) -> {});
            assertEquals(SelectionPrior.Form.SCALED, result.prior().prior().form());
            assertEquals(2, result.prior().logitRanges().stream().distinct().count());
            assertEquals(
                    LogitRanges.measure(model, text().sample(20, 10)),
                    result.prior().logitRanges());
        }
    }

    /** One beta means the same in layers of different scale. */
    @Test
    void expertPrior_scaledWithOneRangePerLayer_isAdditiveOfEachLayersOwnStrength() {
        ExpertMask mask = ExpertMask.random(2, EXPERTS, 3, 4);
        try (LanguageModel model = model()) {
            List<MoeBlock> layers = model.decoder().moeBlocks();
            new ExpertPrior(mask, SelectionPrior.scaled(0.25, 1))
                    .withLogitRanges(List.of(2.0, 8.0))
                    .apply(model.decoder());
            double scaled = loss(model);
            layers.get(0).router().setPrior(mask.kept(0), SelectionPrior.additive(0.5));
            layers.get(1).router().setPrior(mask.kept(1), SelectionPrior.additive(2));
            assertEquals(scaled, loss(model));
        }
    }

    /** A loader that knows nothing but softmax scores and an added array ranks as we do. */
    @Test
    void selectionBias_addedToSoftmaxScores_ranksAsThePrior() throws IOException {
        ExpertMask mask = ExpertMask.random(2, EXPERTS, 3, 4);
        ExpertPrior prior =
                new ExpertPrior(mask, SelectionPrior.probability(0.125).withProtectedTop(0));
        prior.save(folder);
        try (SafetensorsReader file =
                SafetensorsReader.open(folder.resolve("maskcoft.safetensors"))) {
            Random random = new Random(3);
            for (int l = 0; l < 2; l++) {
                FloatBuffer bias = FloatBuffer.allocate(EXPERTS);
                file.readF32("model.layers." + l + ".mlp.gate.e_score_correction_bias", 0, bias);
                assertArrayEquals(prior.selectionBias(l), bias.array());
                for (int t = 0; t < 100; t++) {
                    double[] z = random.doubles(EXPERTS, -1, 1).toArray();
                    double total = Arrays.stream(z).map(Math::exp).sum();
                    double[] scores = new double[EXPERTS];
                    Arrays.setAll(scores, e -> Math.exp(z[e]) / total + bias.get(e));
                    int[] own = ExpertMask.topN(new double[][] {scores}, 2).experts(0);
                    int[] selected = prior.prior().select(z, mask.kept(l), 2);
                    Arrays.sort(selected);
                    assertArrayEquals(own, selected);
                }
            }
        }
        assertThrows(
                IllegalStateException.class,
                () -> prior.withPrior(SelectionPrior.additive(1)).selectionBias(0));
        float[] hard = prior.withPrior(SelectionPrior.hardMask()).selectionBias(0);
        assertEquals(
                EXPERTS - 3,
                IntStream.range(0, EXPERTS)
                        .filter(e -> hard[e] == Float.NEGATIVE_INFINITY)
                        .count());
    }

    @Test
    void expertPrior_fileWithoutLogitRange_isOne() throws IOException {
        Files.writeString(
                folder.resolve(ExpertPrior.FILE),
                "{\"mask\": [[1, 0], [2, 1]], \"experts\": 3, \"form\": \"additive\","
                        + " \"beta\": 1.5, \"protected_top\": 1}");
        ExpertPrior prior = ExpertPrior.load(folder);
        assertEquals(SelectionPrior.additive(1.5), prior.prior());
        assertArrayEquals(new int[] {0, 1}, prior.mask().experts(0));
        assertArrayEquals(new int[] {1, 2}, prior.mask().experts(1));
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "",
                "[]",
                "{}",
                "{\"mask\": [[9]], \"experts\": 2, \"form\": \"additive\", \"beta\": 1,"
                        + " \"protected_top\": 1, \"logit_range\": 1}",
                "{\"mask\": [[0, 1, 0]], \"experts\": 2, \"form\": \"additive\", \"beta\": 1,"
                        + " \"protected_top\": 1, \"logit_range\": 1}",
                "{\"mask\": [[0]], \"experts\": -2, \"form\": \"additive\", \"beta\": 1,"
                        + " \"protected_top\": 1, \"logit_range\": 1}",
                "{\"mask\": [[-1]], \"experts\": 2, \"form\": \"additive\", \"beta\": 1,"
                        + " \"protected_top\": 1, \"logit_range\": 1}",
                "{\"mask\": [[0]], \"experts\": 2, \"form\": \"loud\", \"beta\": 1,"
                        + " \"protected_top\": 1, \"logit_range\": 1}"
            })
    void expertPrior_brokenFile_errorNamesIt(String text) throws IOException {
        Files.writeString(folder.resolve(ExpertPrior.FILE), text);
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> ExpertPrior.load(folder));
        assertNotNull(e.getMessage());
        assertTrue(e.getMessage().contains(ExpertPrior.FILE), e.getMessage());
    }
}
