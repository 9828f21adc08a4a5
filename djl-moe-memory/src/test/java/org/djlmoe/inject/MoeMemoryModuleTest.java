package org.djlmoe.inject;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.TrainingConfig;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import com.google.inject.AbstractModule;
import com.google.inject.Guice;
import com.google.inject.Injector;
import com.google.inject.Key;
import com.google.inject.Module;
import com.google.inject.ProvisionException;
import com.google.inject.util.Modules;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.UnaryOperator;
import java.util.stream.IntStream;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.maskcoft.MaskCoFTSettings;
import org.djlmoe.maskcoft.MaskCoFTStages;
import org.djlmoe.maskcoft.MaskEstimator;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;
import org.djlmoe.vocab.RingDtpLoss;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class MoeMemoryModuleTest {

    private static final TokenBatch BATCH =
            new TokenBatch(
                    2,
                    8,
                    IntStream.range(0, 16).map(i -> i * 7 % 31).toArray(),
                    IntStream.range(0, 16).map(i -> (i + 1) * 7 % 31).toArray());

    private static MoeConfig config(int layers) {
        return MoeConfig.builder()
                .setVocabSize(31)
                .setHiddenSize(8)
                .setIntermediateSize(16)
                .setNumLayers(layers)
                .setNumHeads(2)
                .setNumExperts(4)
                .setTopK(2)
                .build();
    }

    private static MoeMemorySettings.Builder settings() {
        return MoeMemorySettings.builder()
                .setModel(config(2))
                .setLearningRate(Tracker.fixed(1e-2f))
                .optWeightDecay(0.1)
                .optSeed(3);
    }

    private static MoeMemoryModule module() {
        return new MoeMemoryModule(settings().build());
    }

    @Test
    void optimizer_stateInFiles_sameLossesAndABadFolderIsRefused(@TempDir Path folder) {
        assertArrayEquals(train(module()), train(with(b -> b.optStateDirectory(folder))));
        ProvisionException e =
                assertThrows(
                        ProvisionException.class,
                        () -> train(with(b -> b.optStateDirectory(folder.resolve("none")))));
        assertTrue(e.getMessage().contains("none"), e.getMessage());
    }

    /** Trains two steps with what an injector makes; the loss before each and after both. */
    private static float[] train(Module module) {
        Injector injector = Guice.createInjector(module);
        try (LanguageModel model = injector.getInstance(LanguageModel.class);
                Trainer trainer = injector.getInstance(Trainer.class)) {
            float[] losses = new float[3];
            for (int step = 0; step < 2; step++) {
                losses[step] = step(trainer);
            }
            losses[2] = (float) model.loss(BATCH);
            if (injector.getInstance(Optimizer.class) instanceof OffloadStreamAdamW ours) {
                ours.close();
            }
            return losses;
        }
    }

    private static float step(Trainer trainer) {
        float value;
        try (NDManager scope = trainer.getManager().newSubManager()) {
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDList out = trainer.forward(new NDList(BATCH.toInputs(scope)));
                NDArray loss = trainer.getLoss().evaluate(new NDList(BATCH.toTargets(scope)), out);
                value = loss.getFloat();
                collector.backward(loss);
            }
        }
        trainer.step();
        return value;
    }

    /** The injector's pieces do what the same pieces do when made by hand. */
    @Test
    void injector_twoSteps_equalsHandMade() {
        float[] injected = train(module());
        float[] byHand = new float[3];
        try (LanguageModel model =
                        LanguageModel.create(config(2), LanguageModel.Chunks.DEFAULT, 3);
                OffloadStreamAdamW optimizer =
                        OffloadStreamAdamW.builder()
                                .setLearningRateTracker(Tracker.fixed(1e-2f))
                                .optWeightDecay(0.1)
                                .build();
                LanguageModelTrainer trainer = new LanguageModelTrainer(model, optimizer, 3)) {
            byHand[0] = trainer.step(BATCH);
            byHand[1] = trainer.step(BATCH);
            byHand[2] = (float) model.loss(BATCH);
        }
        for (int i = 0; i < 3; i++) {
            assertEquals(byHand[i], injected[i], 1e-6f, "loss " + i);
        }
        assertTrue(injected[1] < injected[0] && injected[2] < injected[1]);
    }

    @Test
    void injector_everyPiece_isOneAndBelongsToTheOthers() {
        Injector injector = Guice.createInjector(module());
        try (LanguageModel model = injector.getInstance(LanguageModel.class);
                OffloadStreamAdamW optimizer = injector.getInstance(OffloadStreamAdamW.class);
                BoundedTrainer trainer = injector.getInstance(BoundedTrainer.class)) {
            assertSame(model, injector.getInstance(LanguageModel.class));
            assertSame(model.decoder(), injector.getInstance(MoeDecoder.class));
            assertSame(model.model(), injector.getInstance(Model.class));
            assertSame(optimizer, injector.getInstance(Optimizer.class));
            RingDtpLoss loss = injector.getInstance(RingDtpLoss.class);
            assertSame(loss, injector.getInstance(Loss.class));
            assertSame(trainer, injector.getInstance(Trainer.class));
            assertSame(model.model(), trainer.getModel());
            TrainingConfig config = injector.getInstance(TrainingConfig.class);
            assertSame(loss, config.getLossFunction());
            assertSame(optimizer, config.getOptimizer());
            assertEquals(config(2), injector.getInstance(MoeConfig.class));
        }
    }

    @Test
    void settings_ofTheLossAndTheStep_haveTheirEffect() {
        float[] plain = train(module());
        assertNotEquals(plain[0], firstLoss(b -> b.optLabelSmoothing(0.2)), 1e-4f);
        assertNotEquals(plain[0], firstLoss(b -> b.optZLoss(0.1)), 1e-4f);
        assertNotEquals(plain[0], firstLoss(b -> b.optSeed(4)), 1e-6f);
        // Adam's update does not change with the gradient's scale, unless epsilon outweighs it.
        assertNotEquals(plain[2], train(with(b -> b.optClipNorm(1e-7)))[2], 1e-4f);
        assertNotEquals(plain[2], train(with(b -> b.optWeightDecay(5)))[2], 1e-4f);
        assertNotEquals(plain[2], train(with(b -> b.optBalance(1)))[2], 1e-6f);
        // How the work is cut, not what is computed.
        assertEquals(plain[2], train(with(b -> b.optChunkTokens(3)))[2], 1e-5f);
    }

    private static Module with(UnaryOperator<MoeMemorySettings.Builder> change) {
        return new MoeMemoryModule(change.apply(settings()).build());
    }

    private static float firstLoss(UnaryOperator<MoeMemorySettings.Builder> change) {
        return train(with(change))[0];
    }

    @Test
    void prior_hardMask_keepsTheOthersOut() {
        ExpertMask mask = ExpertMask.random(2, 4, 2, 1);
        Injector injector =
                Guice.createInjector(
                        with(b -> b.optPrior(new ExpertPrior(mask, SelectionPrior.hardMask()))));
        try (LanguageModel model = injector.getInstance(LanguageModel.class)) {
            long[] counts = new long[4];
            model.decoder()
                    .moeBlocks()
                    .get(1)
                    .router()
                    .setObserver(
                            ids -> {
                                for (long id : ids.toLongArray()) {
                                    counts[(int) id]++;
                                }
                            });
            model.loss(BATCH);
            for (int e = 0; e < 4; e++) {
                assertEquals(mask.kept(1)[e] ? 16 : 0, counts[e], "expert " + e);
            }
        }
    }

    private static final MaskCoFTSettings RECIPE =
            MaskCoFTSettings.builder()
                    .optEstimator(MaskEstimator.dense(1))
                    .optKept(3)
                    .optMaskSteps(4)
                    .optSteps(6)
                    .optSoftShare(0.5)
                    .optLearningRate(1e-2)
                    .optAdapters(2, 4)
                    .optSeed(5)
                    .build();

    /** Stages, estimator, prior, budget and optimizer from one object. */
    @Test
    void maskCoFT_trainerGoesThroughTheStages_andOnlyWhatIsDueMoves() {
        Injector injector = Guice.createInjector(with(b -> b.optMaskCoFT(RECIPE)));
        MaskCoFTStages stages =
                injector.getInstance(new Key<Optional<MaskCoFTStages>>() {}).orElseThrow();
        try (LanguageModel model = injector.getInstance(LanguageModel.class);
                OffloadStreamAdamW optimizer = injector.getInstance(OffloadStreamAdamW.class);
                BoundedTrainer trainer = injector.getInstance(BoundedTrainer.class)) {
            List<MaskCoFTStages.Stage> seen = new ArrayList<>();
            for (int step = 0; step < 10; step++) {
                seen.add(stages.stage());
                Map<String, float[]> before = weights(model);
                trainer.notifyListeners(listener -> listener.onTrainingBatch(trainer, null));
                step(trainer);
                boolean mask = seen.get(step) == MaskCoFTStages.Stage.MASK;
                weights(model)
                        .forEach(
                                (name, w) -> {
                                    boolean due =
                                            mask
                                                    ? name.endsWith("mask_logits")
                                                    : name.endsWith("mlp.gate.weight")
                                                            || name.contains("lora_B");
                                    boolean moved = !Arrays.equals(w, before.get(name));
                                    // A moves from B's second step on.
                                    assertTrue(
                                            moved == due || (!mask && name.contains("lora_A")),
                                            name + " " + moved);
                                });
            }
            assertEquals(4, Collections.frequency(seen, MaskCoFTStages.Stage.MASK));
            assertEquals(3, Collections.frequency(seen, MaskCoFTStages.Stage.ADAPT));
            assertEquals(3, Collections.frequency(seen, MaskCoFTStages.Stage.ADAPT_SOFT));
            assertTrue(stages.isDone());
            assertEquals(3, stages.mask().count(1));
            double moved = 0;
            for (double t : stages.theta()[0]) {
                moved = Math.max(moved, Math.abs(t));
            }
            assertTrue(moved > 0.1 && moved < 0.6, "theta after 4 steps of 0.1: " + moved);
        }
        assertEquals(SelectionPrior.additive(2).withProtectedTop(0), stages.prior(2).prior());
        assertEquals(stages.mask(), stages.prior(2).mask());
        assertEquals(4, stages.theta()[1].length);
    }

    private static Map<String, float[]> weights(LanguageModel model) {
        Map<String, float[]> weights = new LinkedHashMap<>();
        model.decoder()
                .namedParameters()
                .forEach((name, p) -> weights.put(name, p.getArray().toFloatArray()));
        return weights;
    }

    /** Whoever replaces one piece gets it in all that is made from it. */
    @Test
    void override_ofOneBinding_reachesTheRest() {
        Optimizer sgd = Optimizer.sgd().setLearningRateTracker(Tracker.fixed(0f)).build();
        Module frozen = override(Optimizer.class, sgd);
        float[] losses = train(frozen);
        assertEquals(losses[0], losses[1]);
        assertEquals(losses[0], losses[2], 1e-6f);

        Loss other = RingDtpLoss.builder().optReduction(RingDtpLoss.Reduction.SUM).build();
        assertEquals(16 * losses[0], train(override(Loss.class, other))[0], 1e-3f);

        Injector deep = Guice.createInjector(override(MoeConfig.class, config(3)));
        try (LanguageModel model = deep.getInstance(LanguageModel.class)) {
            assertEquals(3, model.decoder().moeBlocks().size());
        }

        try (LanguageModel mine =
                LanguageModel.create(config(1), new LanguageModel.Chunks(16, 512), 9)) {
            Injector injector = Guice.createInjector(override(LanguageModel.class, mine));
            try (BoundedTrainer trainer = injector.getInstance(BoundedTrainer.class);
                    OffloadStreamAdamW ours = injector.getInstance(OffloadStreamAdamW.class)) {
                double before = mine.loss(BATCH);
                assertEquals(before, step(trainer), 1e-5);
                assertTrue(mine.loss(BATCH) < before);
            }
        }
    }

    private static <T> Module override(Class<T> type, T instance) {
        return Modules.override(module())
                .with(
                        new AbstractModule() {
                            @Override
                            protected void configure() {
                                bind(type).toInstance(instance);
                            }
                        });
    }

    @Test
    void settings_outOfRange_areNamed() {
        assertProblem("model is missing", b -> b.setModel(null));
        assertProblem("learningRate is missing", b -> b.setLearningRate(null));
        assertProblem("chunkTokens must be 1 or more, not 0", b -> b.optChunkTokens(0));
        assertProblem("weightDecay must be", b -> b.optWeightDecay(-1));
        assertProblem("clipNorm must be", b -> b.optClipNorm(0));
        assertProblem("clipNorm must be", b -> b.optClipNorm(Double.NaN));
        assertProblem("labelSmoothing must be", b -> b.optLabelSmoothing(1));
        assertProblem("zLoss must be", b -> b.optZLoss(Double.NaN));
        assertProblem("balance must be", b -> b.optBalance(-0.1));
        assertProblem(
                "maskCoFT has an estimator",
                b -> b.optMaskCoFT(MaskCoFTSettings.builder().build()));
        assertProblem(
                "prior and maskCoFT",
                b ->
                        b.optMaskCoFT(RECIPE)
                                .optPrior(
                                        new ExpertPrior(
                                                ExpertMask.all(2, 4), SelectionPrior.additive(1))));
        assertThrows(IllegalArgumentException.class, () -> new MoeMemoryModule(null));
    }

    private static void assertProblem(
            String problem, UnaryOperator<MoeMemorySettings.Builder> change) {
        IllegalArgumentException e =
                assertThrows(
                        IllegalArgumentException.class, () -> change.apply(settings()).build());
        assertTrue(e.getMessage().startsWith(problem), e::getMessage);
    }
}
