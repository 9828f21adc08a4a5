package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.function.Consumer;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.maskcoft.PriorSweep.Point;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.Router;
import org.djlmoe.routing.RoutingObserver;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
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

    private static Arguments bad(String setting, Consumer<MaskCoFT.Builder> mistake) {
        return Arguments.of(setting, mistake);
    }

    static List<Arguments> mistakes() {
        return List.of(
                bad("kept", b -> b.optKept(0)),
                bad("kept", b -> b.optKept(1)),
                bad("kept", b -> b.optKept(EXPERTS + 1)),
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
