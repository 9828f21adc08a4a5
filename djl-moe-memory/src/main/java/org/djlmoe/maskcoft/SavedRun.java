package org.djlmoe.maskcoft;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.zip.CRC32;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.io.AtomicFolders;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.TrainingCheckpoint;
import org.djlmoe.training.TrainingState;

/** A run that follows {@link RunSaves}: knows what it is, and refuses states of other runs. */
final class SavedRun {

    static final String MASK = "mask";
    static final String ADAPT = "adapt";

    /** Keeps what the run is apart from the caller's own settings. */
    private static final String PREFIX = "maskcoft.";

    private static final String RECIPE = PREFIX + "recipe";
    private static final String MODEL = PREFIX + "model";
    private static final String TEXT = PREFIX + "text";

    private final RunSaves saves;
    private final long seed;
    private final Map<String, String> settings;
    private AtomicFolders.Contents more = folder -> {};

    private SavedRun(RunSaves saves, long seed, Map<String, String> settings) {
        this.saves = saves;
        this.seed = seed;
        this.settings = settings;
    }

    /**
     * Finds out what a run is, if that is to be saved or compared.
     *
     * @param recipe its class
     * @param options its settings by name
     * @param model the model as it is before anything trains
     * @param text training text
     * @param steps how many of its batches are used
     * @param validation further text
     * @throws CheckpointException if the state to go on from is of another run
     */
    static SavedRun of(
            RunSaves saves,
            Class<?> recipe,
            long seed,
            Map<String, Object> options,
            LanguageModel model,
            PackedBatches text,
            int steps,
            Iterable<TokenBatch> validation)
            throws CheckpointException {
        if (saves.every() == 0 && saves.from() == null) {
            return new SavedRun(saves, seed, Map.of());
        }
        Map<String, String> settings = new TreeMap<>(saves.settings());
        options.forEach((name, value) -> settings.put(PREFIX + name, String.valueOf(value)));
        settings.put(PREFIX + "seed", Long.toString(seed));
        settings.put(PREFIX + "chunks", model.chunks().toString());
        settings.put(RECIPE, recipe.getSimpleName());
        settings.put(MODEL, model.digest());
        settings.put(TEXT, digest(text, steps, validation));
        SavedRun run = new SavedRun(saves, seed, settings);
        if (saves.from() != null) {
            run.check(saves.from());
        }
        return run;
    }

    private static String digest(PackedBatches text, int steps, Iterable<TokenBatch> validation) {
        CRC32 crc = new CRC32();
        add(crc, text.at(0));
        add(crc, text.at(Math.max(0, steps - 1)));
        validation.forEach(batch -> add(crc, batch));
        return "%d rows, %08x".formatted(text.tokens().rows(), crc.getValue());
    }

    private static void add(CRC32 crc, TokenBatch batch) {
        String line = batch + Arrays.toString(batch.inputs()) + Arrays.toString(batch.targets());
        crc.update(line.getBytes(StandardCharsets.US_ASCII));
    }

    private void check(TrainingCheckpoint from) throws CheckpointException {
        Path folder = from.folder();
        TrainingState state = from.state();
        String recipe = state.settings().get(RECIPE);
        if (recipe == null) {
            throw new CheckpointException(
                    folder
                            + " is the state of another kind of training, not of fine-tuning: give"
                            + " this run a folder of its own");
        }
        if (!recipe.equals(settings.get(RECIPE))) {
            throw new CheckpointException(
                    folder
                            + " is the state of a run of "
                            + recipe
                            + ", not of "
                            + settings.get(RECIPE)
                            + ": go on with that, or give this run a folder of its own");
        }
        List<String> changed = new ArrayList<>();
        Map<String, String> changes = state.changes(settings);
        changes.forEach(
                (name, change) -> {
                    if (name.startsWith(PREFIX) && !name.equals(MODEL) && !name.equals(TEXT)) {
                        changed.add(name.substring(PREFIX.length()) + " " + change);
                    }
                });
        if (!changed.isEmpty()) {
            throw new CheckpointException(
                    folder
                            + " is of a run with other settings: "
                            + String.join(", ", changed)
                            + ". Go on with those, or give this run a folder of its own");
        }
        if (changes.containsKey(MODEL)) {
            throw new CheckpointException(
                    folder
                            + " is of a run that began with another model: the weights, or their"
                            + " types, differ. Load the one that it began with, or give this run a"
                            + " folder of its own");
        }
        if (changes.containsKey(TEXT)) {
            throw new CheckpointException(
                    folder
                            + " is of a run on other text, or on other batches of it ("
                            + changes.get(TEXT)
                            + "). Go on with that, or give this run a folder of its own");
        }
        if (!state.stage().equals(MASK) && !state.stage().equals(ADAPT)) {
            throw new CheckpointException(
                    folder + " is of an unknown stage, '" + state.stage() + "'");
        }
    }

    /** Has every further save write these files too. */
    void with(AtomicFolders.Contents files) {
        more = files;
    }

    /** The state to go on from, if it is of a stage; null otherwise. */
    TrainingCheckpoint from(String stage) {
        TrainingCheckpoint from = saves.from();
        return from != null && from.state().stage().equals(stage) ? from : null;
    }

    /** Saves a step of stage 1, if it is due. */
    void saveMask(int step, int steps) throws IOException {
        if (isDue(step, steps)) {
            saves.checkpoints().save(state(MASK, step, new float[0]), more);
        }
    }

    /** Saves a step of stage 2, if it is due. */
    void saveAdapters(
            int step,
            int steps,
            LanguageModel model,
            boolean routers,
            OffloadStreamAdamW optimizer,
            float[] losses)
            throws IOException {
        if (isDue(step, steps)) {
            TrainingState state = state(ADAPT, step, Arrays.copyOf(losses, step));
            saves.checkpoints().saveAdapters(model, routers, optimizer, state, more);
        }
    }

    private TrainingState state(String stage, int step, float[] losses) {
        return new TrainingState(stage, step, seed, losses, settings);
    }

    private boolean isDue(int step, int steps) {
        return saves.every() > 0 && (step == steps || step % saves.every() == 0);
    }
}
