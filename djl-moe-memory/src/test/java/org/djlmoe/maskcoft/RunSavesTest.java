package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Consumer;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.WarmupCosineTracker;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;
import org.djlmoe.training.TrainingCheckpoint;
import org.djlmoe.training.TrainingCheckpoints;
import org.djlmoe.training.TrainingState;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.MethodSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Fine-tuning that is killed and goes on is the fine-tuning that was not. */
class RunSavesTest {

    private static final int EXPERTS = 5;
    private static final int MASK_STEPS = 4;
    private static final int STEPS = 6;
    private static final StageListener SILENT = (step, steps, tokens, loss) -> {};

    @TempDir Path folder;

    /** What a kill is in a test. */
    private static final class Killed extends RuntimeException {
        private static final long serialVersionUID = 1L;
    }

    /** Kills after some steps. */
    private static final class Clock implements MaskCoFT.Listener, StageListener {
        private final List<String> seen = new ArrayList<>();
        private final int left;

        Clock(int steps) {
            left = steps;
        }

        @Override
        public void step(MaskCoFT.Stage stage, int step, int steps, long tokens, double loss) {
            seen.add(stage + " " + step + " " + Double.doubleToRawLongBits(loss));
            if (seen.size() > left) {
                throw new Killed();
            }
        }

        @Override
        public void step(int step, int steps, long tokens, double loss) {
            step(MaskCoFT.Stage.ADAPT, step, steps, tokens, loss);
        }
    }

    private static LanguageModel model(long seed) {
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
        return LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, seed);
    }

    private static LanguageModel model() {
        return model(11);
    }

    private static PackedTokens text(int factor) {
        return PackedTokens.of(
                IntStream.range(0, 16 * 40 + 1).map(i -> (i * i * factor + i) % 19).toArray(), 16);
    }

    private static PackedBatches batches(long seed) {
        return text(1).batches(4, seed);
    }

    private static MaskCoFT recipe(LanguageModel model, Consumer<MaskCoFT.Builder> more) {
        MaskCoFT.Builder builder =
                MaskCoFT.builder()
                        .setModel(model)
                        .setBatches(batches(1))
                        .setValidation(text(1).sample(10, 5))
                        .optMaskSteps(MASK_STEPS)
                        .optMaskSamples(3)
                        .optSteps(STEPS)
                        .optAdapters(3, 5)
                        .optLearningRate(1e-2)
                        .optBetas(List.of(0.5, 2.0))
                        .optSeed(3);
        more.accept(builder);
        return builder.build();
    }

    private static Map<String, float[]> weights(LanguageModel model) {
        Map<String, float[]> weights = new LinkedHashMap<>();
        // Half experts have no type that DJL would read.
        model.widenExperts();
        model.decoder()
                .namedParameters()
                .forEach((name, p) -> weights.put(name, p.getArray().toFloatArray()));
        return weights;
    }

    private static void assertSameWeights(LanguageModel expected, LanguageModel actual) {
        Map<String, float[]> weights = weights(actual);
        Map<String, float[]> same = weights(expected);
        assertEquals(same.keySet(), weights.keySet());
        assertTrue(weights.keySet().stream().anyMatch(name -> name.contains(".lora_")));
        same.forEach((name, w) -> assertArrayEquals(w, weights.get(name), name));
    }

    /** The last states hold the optimizers' and the learner's state: all files are equal. */
    private static void assertSameStates(TrainingCheckpoints expected, TrainingCheckpoints actual)
            throws IOException {
        TrainingCheckpoint one = expected.latest().orElseThrow();
        TrainingCheckpoint two = actual.latest().orElseThrow();
        assertEquals(one.state(), two.state());
        List<Path> files;
        try (Stream<Path> all = Files.list(one.folder())) {
            files = all.toList();
        }
        assertTrue(files.size() >= 4, files::toString);
        for (Path file : files) {
            Path other = two.folder().resolve(file.getFileName());
            assertEquals(-1, Files.mismatch(file, other), other::toString);
        }
    }

    private TrainingCheckpoints checkpoints(String name) {
        return new TrainingCheckpoints(folder.resolve(name), 2);
    }

    private static RunSaves saves(TrainingCheckpoints checkpoints) throws IOException {
        return RunSaves.every(2, checkpoints)
                .goingOnFrom(checkpoints.latest().orElse(null))
                .withSettings(Map.of("--mine", "1"));
    }

    private static Arguments variant(String name, Consumer<MaskCoFT.Builder> more) {
        return Arguments.of(name, more);
    }

    static List<Arguments> variants() {
        return List.of(
                variant("default", b -> {}),
                variant(
                        "hard, then soft; gumbel; one budget",
                        b ->
                                b.optEstimator(MaskEstimator.gumbel())
                                        .optKeptTotal(7)
                                        .optSoftShare(0.5)
                                        .optWeights(MaskedWeights.KEPT)),
                variant(
                        "dense; half experts",
                        b -> b.optEstimator(MaskEstimator.dense(1)).optHalfExperts(true)),
                variant(
                        "scaled; loads",
                        b ->
                                b.optForm(SelectionPrior.Form.SCALED)
                                        .optLoadWeight(0.3)
                                        .optSoftShare(0.3)),
                variant("no mask steps", b -> b.optMaskSteps(0)));
    }

    /**
     * Killed once after every step there is, between saves and right after one, in every stage; and
     * without saves it is the same run.
     */
    @ParameterizedTest(name = "{0}")
    @MethodSource("variants")
    void maskCoFT_killedAfterAnyStep_isTheUninterruptedRunToTheBit(
            String name, Consumer<MaskCoFT.Builder> more) throws IOException {
        TrainingCheckpoints whole = checkpoints("whole");
        Clock all = new Clock(Integer.MAX_VALUE);
        try (LanguageModel expected = model();
                LanguageModel unsaved = model()) {
            MaskCoFT.Result result = recipe(expected, more).run(all, saves(whole));
            assertArrayEquals(
                    result.losses(), recipe(unsaved, more).run((s, i, n, t, loss) -> {}).losses());
            int total = all.seen.size();
            for (int stop = 0; stop < total; stop++) {
                TrainingCheckpoints killed = checkpoints("killed" + stop);
                Clock before = new Clock(stop);
                try (LanguageModel first = model()) {
                    MaskCoFT recipe = recipe(first, more);
                    assertThrows(Killed.class, () -> recipe.run(before, saves(killed)));
                }
                Clock after = new Clock(Integer.MAX_VALUE);
                try (LanguageModel second = model()) {
                    MaskCoFT.Result again = recipe(second, more).run(after, saves(killed));
                    assertArrayEquals(result.losses(), again.losses());
                    assertArrayEquals(result.maskLosses(), again.maskLosses());
                    assertTrue(Arrays.deepEquals(result.theta(), again.theta()));
                    assertEquals(result.hard(), again.hard());
                    assertEquals(result.sweep(), again.sweep());
                    assertSameWeights(expected, second);
                    assertSameStates(whole, killed);
                }
                assertTrue(stop < 3 || after.seen.size() < total, "nothing was saved: " + stop);
                assertEquals(all.seen.subList(0, before.seen.size()), before.seen);
                assertEquals(
                        all.seen.subList(total - after.seen.size(), total), after.seen, "" + stop);
            }
        }
    }

    /** Never more than three steps at a time, so that a state that was loaded is saved again. */
    @Test
    void maskCoFT_killedAgainAndAgain_isTheUninterruptedRunToTheBit() throws IOException {
        TrainingCheckpoints whole = checkpoints("whole");
        TrainingCheckpoints killed = checkpoints("killed");
        Consumer<MaskCoFT.Builder> more = b -> b.optEstimator(MaskEstimator.dense(1));
        try (LanguageModel expected = model()) {
            MaskCoFT.Result result =
                    recipe(expected, more).run(new Clock(Integer.MAX_VALUE), saves(whole));
            int kills = 0;
            for (boolean done = false; !done; ) {
                try (LanguageModel one = model()) {
                    MaskCoFT.Result again = recipe(one, more).run(new Clock(2), saves(killed));
                    done = true;
                    assertArrayEquals(result.losses(), again.losses());
                    assertArrayEquals(result.maskLosses(), again.maskLosses());
                    assertSameWeights(expected, one);
                    assertSameStates(whole, killed);
                } catch (Killed e) {
                    kills++;
                    assertTrue(kills < 20, "no progress");
                }
            }
            assertEquals((MASK_STEPS + STEPS) / 2, kills);
        }
    }

    private static CoAdaptation.Builder adaptation(LanguageModel model) {
        return CoAdaptation.builder()
                .setModel(model)
                .setBatches(batches(1))
                .setSteps(STEPS)
                .optAdapters(3, 5)
                .optLearningRate(1e-2)
                .optSeed(3);
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void coAdaptation_killedAfterAnyStep_isTheUninterruptedRunToTheBit(boolean control)
            throws IOException {
        TrainingCheckpoints whole = checkpoints("whole");
        Consumer<CoAdaptation.Builder> more =
                control
                        ? b -> b.optTrainRouters(false)
                        : b ->
                                b.optMask(ExpertMask.random(2, EXPERTS, 3, 4))
                                        .optHalfExperts(true)
                                        .optSoftPrior(SelectionPrior.additive(1.5), 0.5);
        try (LanguageModel expected = model()) {
            CoAdaptation.Builder builder = adaptation(expected);
            more.accept(builder);
            float[] losses = builder.build().run(SILENT, saves(whole));
            for (int stop = 0; stop < STEPS; stop++) {
                TrainingCheckpoints killed = checkpoints("killed" + stop);
                try (LanguageModel first = model()) {
                    CoAdaptation.Builder b = adaptation(first);
                    more.accept(b);
                    Clock clock = new Clock(stop);
                    assertThrows(Killed.class, () -> b.build().run(clock, saves(killed)));
                }
                try (LanguageModel second = model()) {
                    CoAdaptation.Builder b = adaptation(second);
                    more.accept(b);
                    Clock clock = new Clock(Integer.MAX_VALUE);
                    assertArrayEquals(losses, b.build().run(clock, saves(killed)));
                    assertEquals(STEPS - stop / 2 * 2, clock.seen.size());
                    assertSameWeights(expected, second);
                    assertSameStates(whole, killed);
                }
            }
        }
    }

    /** A state of each stage, as a kill leaves it. */
    private TrainingCheckpoints killedAfter(int steps) throws IOException {
        TrainingCheckpoints checkpoints = checkpoints("killed after " + steps);
        try (LanguageModel model = model()) {
            MaskCoFT recipe = recipe(model, b -> {});
            assertThrows(Killed.class, () -> recipe.run(new Clock(steps), saves(checkpoints)));
        }
        return checkpoints;
    }

    private static void assertRefused(
            LanguageModel model, MaskCoFT recipe, TrainingCheckpoints from, String... parts) {
        CheckpointException e =
                assertThrows(
                        CheckpointException.class,
                        () ->
                                recipe.run(
                                        (stage, step, steps, tokens, loss) -> {
                                            throw new AssertionError("a step was made");
                                        },
                                        saves(from)));
        for (String part : parts) {
            assertTrue(e.getMessage().contains(part), e.getMessage());
        }
        assertTrue(e.getMessage().contains("checkpoint-0000"), e.getMessage());
        model.decoder().moeBlocks().forEach(layer -> assertNull(layer.experts().adapters()));
    }

    @ParameterizedTest
    @ValueSource(ints = {MASK_STEPS - 1, MASK_STEPS + 3})
    void maskCoFT_stateOfAnotherRun_isRefusedByWhatDiffers(int steps) throws IOException {
        TrainingCheckpoints from = killedAfter(steps);
        try (LanguageModel model = model()) {
            assertRefused(
                    model,
                    recipe(model, b -> b.optSteps(STEPS + 1).optAdapters(2, 5)),
                    from,
                    "rank 3 -> 2",
                    "steps 6 -> 7",
                    "Go on with those");
            assertRefused(
                    model, recipe(model, b -> b.optSeed(4)), from, "other settings", "seed 3 -> 4");
            assertRefused(
                    model,
                    recipe(model, b -> b.optEstimator(MaskEstimator.gumbel())),
                    from,
                    "estimator Plackett-Luce -> Gumbel");
            assertRefused(model, recipe(model, b -> b.setBatches(batches(2))), from, "other text");
            assertRefused(
                    model,
                    recipe(model, b -> b.setValidation(text(2).sample(10, 5))),
                    from,
                    "other text");
            CoAdaptation other = adaptation(model).build();
            CheckpointException e =
                    assertThrows(CheckpointException.class, () -> other.run(SILENT, saves(from)));
            assertTrue(e.getMessage().contains("MaskCoFT, not of CoAdaptation"), e.getMessage());
        }
        try (LanguageModel model = model(12)) {
            assertRefused(model, recipe(model, b -> {}), from, "another model", "Load the one");
        }
        try (LanguageModel model = model()) {
            model.narrowExperts();
            assertRefused(model, recipe(model, b -> {}), from, "another model", "types");
        }
        LanguageModel.Chunks small = new LanguageModel.Chunks(8, 512);
        try (LanguageModel same = model();
                LanguageModel model = LanguageModel.create(same.decoder().config(), small, 11)) {
            assertRefused(model, recipe(model, b -> {}), from, "moeTokens=4096", "moeTokens=8");
        }
    }

    /** A folder of {@code moe train} or of a loop of one's own. */
    @Test
    void maskCoFT_stateOfATrainingOfAllWeights_isRefused() throws IOException {
        TrainingCheckpoints from = checkpoints("other");
        try (LanguageModel model = model();
                OffloadStreamAdamW optimizer =
                        OffloadStreamAdamW.builder()
                                .setLearningRateTracker(
                                        WarmupCosineTracker.builder()
                                                .setPeak(1)
                                                .setUpdates(2)
                                                .build())
                                .optBlock(model.decoder())
                                .build();
                LanguageModelTrainer trainer = new LanguageModelTrainer(model, optimizer, 0)) {
            trainer.step(batches(1).at(0));
            from.save(model, optimizer, new TrainingState(1, 0, new float[0], Map.of()));
        }
        try (LanguageModel model = model()) {
            assertRefused(
                    model, recipe(model, b -> {}), from, "another kind of training", "its own");
        }
    }

    @Test
    void maskCoFT_stateIsDamaged_isRefusedByFile() throws IOException {
        TrainingCheckpoints from = killedAfter(MASK_STEPS + 3);
        Path latest = from.latest().orElseThrow().folder();
        Path older = from.folders().get(0);
        assertEquals("checkpoint-000002-mask-step-4", older.getFileName().toString());
        assertEquals("checkpoint-000003-adapt-step-2", latest.getFileName().toString());
        for (String name :
                List.of(
                        "mask_learning.safetensors",
                        "adapter_model.safetensors",
                        "optimizer.safetensors")) {
            Path file = latest.resolve(name);
            byte[] good = Files.readAllBytes(file);
            Files.write(file, Arrays.copyOf(good, good.length - 9));
            try (LanguageModel model = model()) {
                MaskCoFT recipe = recipe(model, b -> {});
                SafetensorsException e =
                        assertThrows(
                                SafetensorsException.class,
                                () -> recipe.run(new Clock(0), saves(from)));
                assertTrue(e.getMessage().contains(name), e.getMessage());
                model.decoder().moeBlocks().forEach(l -> assertNull(l.experts().adapters()));
            }
            Files.write(file, good);
        }
        // One of another step.
        Path state = latest.resolve("training_state.json");
        Files.writeString(state, Files.readString(state).replace("\"adapt\"", "\"mask\""));
        Files.writeString(
                state, Files.readString(state).replaceAll("\"losses\":\\[[^]]*", "\"losses\":["));
        try (LanguageModel model = model()) {
            assertRefused(model, recipe(model, b -> {}), from, "4 updates, not 2", "Delete it");
        }
    }

    @Test
    void maskLearning_savedAndLoaded_goesOnToTheBit() throws IOException {
        Path file = folder.resolve("learner.safetensors");
        MaskLearning one = learner(0.1);
        learn(one, 0, 3);
        one.save(file);
        MaskLearning two = learner(0.1);
        two.load(file);
        assertEquals(one.updates(), two.updates());
        learn(one, 3, 7);
        learn(two, 3, 7);
        assertTrue(Arrays.deepEquals(one.theta(), two.theta()));
        assertArrayEquals(one.losses(), two.losses());
        assertEquals(7, two.losses().length);
        assertEquals(one.droppedSamples(), two.droppedSamples());
        assertTrue(two.droppedSamples() > 0);

        MaskLearning other = learner(0.2);
        SafetensorsException e = assertThrows(SafetensorsException.class, () -> other.load(file));
        assertTrue(e.getMessage().contains("learning rate 0.1"), e.getMessage());
        assertEquals(0, other.updates());
    }

    private static MaskLearning learner(double rate) {
        return MaskLearning.builder()
                .setNumLayers(2)
                .setNumExperts(4)
                .setKept(2)
                .setTopK(1)
                .optSamples(4)
                .optLearningRate(rate)
                .build();
    }

    private static void learn(MaskLearning learning, int from, int to) {
        for (int step = from; step < to; step++) {
            List<MaskSample> samples = learning.propose(step);
            double[] losses = new double[samples.size()];
            for (int i = 0; i < losses.length; i++) {
                losses[i] = samples.get(i).mask().isKept(0, step % 4) ? 1 : 2.5;
            }
            if (step % 2 == 0) {
                losses[1] = Double.NaN;
            }
            learning.update(samples, losses);
        }
    }

    @Test
    void digest_oneWeightOrTypeDiffers_differs() {
        try (LanguageModel one = model();
                LanguageModel same = model()) {
            String digest = one.digest();
            assertEquals(64, digest.length());
            assertEquals(digest, same.digest());
            same.narrowExperts();
            assertNotEquals(digest, same.digest());
            one.decoder().moeBlocks().get(1).router().weight().getArray().muli(1.001f);
            assertNotEquals(digest, one.digest());
        }
    }

    @Test
    void runSaves_settingsThatMakeNoSense_areRefused() {
        assertThrows(IllegalArgumentException.class, () -> RunSaves.every(0, checkpoints("x")));
        assertThrows(IllegalArgumentException.class, () -> RunSaves.every(1, null));
        assertFalse(RunSaves.NONE.every() > 0);
    }
}
