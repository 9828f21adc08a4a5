package org.djlmoe.training;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.optimizer.NonFinitePolicy;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.WarmupCosineTracker;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** A run that stops and goes on is the run that did not stop. */
class TrainingCheckpointsTest {

    private static final long SEED = 5;
    private static final int STEPS = 9;
    private static final Map<String, String> SETTINGS = Map.of("rows", "2");
    private static final PackedBatches BATCHES =
            PackedTokens.of(IntStream.range(0, 300).map(i -> i * i % 31).toArray(), 6)
                    .batches(2, SEED);

    @TempDir Path folder;

    private static MoeConfig.Builder config() {
        return MoeConfig.builder()
                .setVocabSize(31)
                .setHiddenSize(8)
                .setIntermediateSize(6)
                .setNumLayers(2)
                .setNumHeads(2)
                .setNumExperts(4)
                .setTopK(2);
    }

    /** One process's part of a run. */
    private static final class Run implements AutoCloseable {

        final LanguageModel model;
        final OffloadStreamAdamW optimizer;
        final LanguageModelTrainer trainer;
        float[] losses = new float[0];

        Run(Optional<TrainingCheckpoint> from) throws IOException {
            this(from, config().build());
        }

        Run(Optional<TrainingCheckpoint> from, MoeConfig config) throws IOException {
            model =
                    from.isPresent()
                            ? from.get().loadModel(LanguageModel.Chunks.DEFAULT)
                            : LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, SEED);
            model.train(path -> true);
            optimizer =
                    OffloadStreamAdamW.builder()
                            .setLearningRateTracker(
                                    WarmupCosineTracker.builder()
                                            .setPeak(0.02)
                                            .setUpdates(STEPS)
                                            .optWarmup(2)
                                            .build())
                            .optClipNorm(1)
                            .optNonFinite(NonFinitePolicy.SKIP)
                            .build();
            trainer = new LanguageModelTrainer(model, optimizer, SEED);
            if (from.isPresent()) {
                from.get().restore(model, optimizer, trainer);
                losses = from.get().state().losses();
            }
        }

        void train(int last) {
            while (trainer.batches() < last) {
                int step = (int) trainer.batches();
                losses = Arrays.copyOf(losses, step + 1);
                losses[step] = trainer.step(BATCHES.at(step));
            }
        }

        TrainingState state() {
            return new TrainingState(trainer.batches(), SEED, losses, SETTINGS);
        }

        TrainingCheckpoint save(TrainingCheckpoints checkpoints) throws IOException {
            return checkpoints.save(model, optimizer, state());
        }

        Map<String, float[]> weights() {
            Map<String, float[]> all = new LinkedHashMap<>();
            model.decoder()
                    .namedParameters()
                    .forEach((path, p) -> all.put(path, p.getArray().toFloatArray()));
            return all;
        }

        @Override
        public void close() {
            trainer.close();
            optimizer.close();
            model.close();
        }
    }

    private static float[] drawn(Run run) {
        return run.model.manager().randomUniform(0, 1, new Shape(4)).toFloatArray();
    }

    private static void assertSame(Run expected, Run actual) {
        assertArrayEquals(expected.losses, actual.losses);
        Map<String, float[]> weights = actual.weights();
        expected.weights().forEach((path, w) -> assertArrayEquals(w, weights.get(path), path));
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 4, 8})
    void restore_afterAnyStep_runIsTheUninterruptedOneToTheBit(int stop) throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 1);
        try (Run whole = new Run(Optional.empty());
                Run first = new Run(Optional.empty())) {
            whole.train(STEPS);
            first.train(stop);
            TrainingState saved = first.save(checkpoints).state();
            assertEquals(saved, checkpoints.latest().orElseThrow().state());
            try (Run second = new Run(checkpoints.latest())) {
                assertEquals(stop, second.optimizer.updates());
                second.train(STEPS);
                assertSame(whole, second);
                // The engine's own random numbers go on too, though this model draws none.
                second.train(STEPS + 1);
                float[] drawn = drawn(second);
                whole.train(STEPS + 1);
                assertArrayEquals(drawn(whole), drawn);
                assertEquals(STEPS + 1, second.trainer.batches());
                assertFalse(whole.losses[STEPS - 1] == whole.losses[0]);
            }
        }
    }

    @Test
    void restore_sharedExpertsAndBiases_runIsTheUninterruptedOneAndBiasesStay() throws IOException {
        MoeConfig config = config().optSharedExperts(5, true).optRoutingBias(true).build();
        float[] biases = {0.1f, -0.1f, 0.003f, 0};
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 1);
        try (Run whole = new Run(Optional.empty(), config);
                Run first = new Run(Optional.empty(), config)) {
            for (Run run : List.of(whole, first)) {
                run.model
                        .decoder()
                        .moeBlocks()
                        .forEach(
                                b ->
                                        run.model
                                                .manager()
                                                .create(biases)
                                                .copyTo(b.router().balanceBias().getArray()));
            }
            Map<String, float[]> before = whole.weights();
            whole.train(STEPS);
            first.train(4);
            first.save(checkpoints);
            try (Run second = new Run(checkpoints.latest())) {
                assertEquals(config, second.model.decoder().config());
                second.train(STEPS);
                assertSame(whole, second);
            }
            whole.weights()
                    .forEach(
                            (path, w) ->
                                    assertEquals(
                                            path.endsWith("e_score_correction_bias"),
                                            Arrays.equals(before.get(path), w),
                                            path));
        }
    }

    /**
     * A step with a NaN is left out by the optimizer, and must not end the run at its next save.
     */
    @Test
    void save_lossIsNotANumber_comesBack() throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 1);
        float[] losses = {1, Float.NaN, Float.POSITIVE_INFINITY};
        TrainingState state = new TrainingState(3, SEED, losses, SETTINGS);
        try (Run run = new Run(Optional.empty())) {
            run.train(1);
            checkpoints.save(run.model, run.optimizer, state);
        }
        assertEquals(state, checkpoints.latest().orElseThrow().state());
    }

    @Test
    void save_moreThanAreKept_oldestGoes() throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder.resolve("new"), 2);
        assertEquals(Optional.empty(), checkpoints.latest());
        assertEquals(List.of(), checkpoints.folders());
        try (Run run = new Run(Optional.empty())) {
            for (int step = 1; step <= 4; step++) {
                run.train(step);
                run.save(checkpoints);
            }
            run.save(checkpoints); // the same step once more
        }
        assertEquals(
                List.of("checkpoint-000004-step-4", "checkpoint-000005-step-4"),
                checkpoints.folders().stream().map(p -> p.getFileName().toString()).toList());
        try (Stream<Path> all = Files.list(folder.resolve("new"))) {
            assertEquals(2, all.count());
        }
    }

    /** What a kill leaves behind: a folder that is not complete yet, or no longer. */
    @Test
    void latest_leftoversOfAKill_areNoCheckpointsAndGoWithTheNextSave() throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 2);
        try (Run run = new Run(Optional.empty())) {
            run.train(1);
            Path good = run.save(checkpoints).folder();
            for (String name :
                    List.of(
                            ".checkpoint-000002-step-2.partial",
                            ".checkpoint-000000-step-0.partial")) {
                Path leftover = Files.createDirectory(folder.resolve(name));
                Files.writeString(leftover.resolve("model.safetensors"), "half");
            }
            assertEquals(good, checkpoints.latest().orElseThrow().folder());
            run.train(2);
            run.save(checkpoints);
            assertEquals(2, checkpoints.latest().orElseThrow().state().step());
        }
        try (Stream<Path> all = Files.list(folder)) {
            assertEquals(2, all.count());
        }
    }

    @Test
    void save_failsHalfWay_theOneBeforeStays() throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 1);
        try (Run run = new Run(Optional.empty())) {
            run.train(1);
            Path good = run.save(checkpoints).folder();
            run.train(2);
            TrainingState state = run.state();
            run.optimizer.close(); // so that it fails after the weights
            assertThrows(
                    IllegalStateException.class,
                    () -> checkpoints.save(run.model, run.optimizer, state));
            assertEquals(List.of(good), checkpoints.folders());
            try (Stream<Path> all = Files.list(folder)) {
                assertEquals(1, all.count());
            }
            try (Run again = new Run(checkpoints.latest())) {
                again.train(2);
                assertArrayEquals(run.losses, again.losses);
            }
        }
    }

    @Test
    void latest_descriptionIsBroken_saysWhichFile() throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 1);
        Path good;
        try (Run run = new Run(Optional.empty())) {
            run.train(1);
            good = run.save(checkpoints).folder();
        }
        Path file = good.resolve("training_state.json");
        String text = Files.readString(file);
        for (String broken :
                List.of(
                        "",
                        "{",
                        "{}",
                        text.replace("djl-moe-training-1", "djl-moe-training-9"),
                        text.replace("\"seed\":5,", ""),
                        text.replace("\"step\":1", "\"step\":7"))) {
            Files.writeString(file, broken);
            CheckpointException e =
                    assertThrows(CheckpointException.class, checkpoints::latest, broken);
            assertTrue(e.getMessage().startsWith(file.toString()), e.getMessage());
        }
        Files.write(file, new byte[] {'{', (byte) 0xff});
        CheckpointException bytes = assertThrows(CheckpointException.class, checkpoints::latest);
        assertEquals(
                file
                        + ": is damaged, not the JSON that was saved: delete "
                        + good
                        + " to go on from the one before",
                bytes.getMessage());
        Files.writeString(file, text);
        Path state = good.resolve("optimizer.safetensors");
        Files.write(state, Arrays.copyOf(Files.readAllBytes(state), 2000));
        TrainingCheckpoint cut = checkpoints.latest().orElseThrow();
        assertThrows(
                SafetensorsException.class,
                () -> {
                    try (Run run = new Run(Optional.of(cut))) {
                        run.train(2);
                    }
                });
    }

    @Test
    void save_stageIsNamed_comesBackAndStandsInTheName() throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 2);
        TrainingState state = new TrainingState("warm_up", 3, SEED, new float[0], SETTINGS);
        checkpoints.save(state, partial -> Files.writeString(partial.resolve("mine"), "x"));
        TrainingCheckpoint latest = checkpoints.latest().orElseThrow();
        assertEquals(state, latest.state());
        assertEquals("checkpoint-000001-warm_up-step-3", latest.folder().getFileName().toString());
        assertEquals("x", Files.readString(latest.folder().resolve("mine")));
        for (String bad : List.of("Two", "a b", "../x", "a-step-1")) {
            assertThrows(
                    IllegalArgumentException.class,
                    () -> new TrainingState(bad, 0, SEED, new float[0], SETTINGS));
        }
    }

    private static LanguageModel adapted(int rank) {
        LanguageModel model =
                LanguageModel.create(config().build(), LanguageModel.Chunks.DEFAULT, SEED);
        model.decoder()
                .moeBlocks()
                .forEach(
                        layer ->
                                layer.experts()
                                        .attachAdapters(rank, 2)
                                        .initialize(
                                                model.manager(), DataType.FLOAT32, new Shape(1)));
        model.train(path -> path.contains(".lora_"));
        return model;
    }

    /** One step of adapters alone in a loop of one's own, saved and gone on from. */
    @Test
    void loadAdapters_ownLoop_goesOnToTheBitAndRefusesWhatDoesNotFit() throws IOException {
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 1);
        Map<String, String> none = Map.of();
        float[] losses = new float[3];
        try (LanguageModel model = adapted(2);
                OffloadStreamAdamW optimizer = adapterOptimizer(model);
                LanguageModelTrainer trainer = new LanguageModelTrainer(model, optimizer, SEED)) {
            for (int step = 0; step < 3; step++) {
                losses[step] = trainer.step(BATCHES.at(step));
                if (step == 0) {
                    TrainingState state = new TrainingState(1, SEED, new float[0], none);
                    checkpoints.saveAdapters(model, false, optimizer, state, partial -> {});
                }
            }
            assertThrows(
                    IllegalStateException.class,
                    () ->
                            checkpoints.save(
                                    model, optimizer, new TrainingState(3, SEED, losses, none)));
        }
        TrainingCheckpoint saved = checkpoints.latest().orElseThrow();
        try (LanguageModel model = adapted(2);
                OffloadStreamAdamW optimizer = adapterOptimizer(model)) {
            saved.loadAdapters(model, false);
            try (LanguageModelTrainer trainer = new LanguageModelTrainer(model, optimizer, SEED)) {
                assertTrue(saved.restore(model, optimizer, trainer).isComplete());
                assertEquals(losses[1], trainer.step(BATCHES.at(1)));
                assertEquals(losses[2], trainer.step(BATCHES.at(2)));
            }
            CheckpointException e =
                    assertThrows(CheckpointException.class, () -> saved.loadAdapters(model, true));
            assertTrue(e.getMessage().contains("has no routers"), e.getMessage());
        }
        try (LanguageModel other = adapted(3)) {
            CheckpointException e =
                    assertThrows(CheckpointException.class, () -> saved.loadAdapters(other, false));
            assertTrue(e.getMessage().contains("does not fit the model"), e.getMessage());
        }
    }

    private static OffloadStreamAdamW adapterOptimizer(LanguageModel model) {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(Tracker.fixed(0.05f))
                .optBlock(model.decoder())
                .build();
    }

    @Test
    void changes_otherSettings_areNamedWithBothValues() {
        TrainingState state = new TrainingState(0, SEED, new float[0], SETTINGS);
        assertEquals(Map.of(), state.changes(SETTINGS));
        assertEquals(
                Map.of("rows", "2 -> 3", "more", "null -> x"),
                state.changes(Map.of("rows", "3", "more", "x")));
        assertThrows(
                IllegalArgumentException.class,
                () -> new TrainingState(3, SEED, new float[2], SETTINGS));
        assertThrows(IllegalArgumentException.class, () -> new TrainingCheckpoints(folder, 0));
    }
}
