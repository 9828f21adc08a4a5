package org.djlmoe.training;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonParseException;
import java.io.IOException;
import java.nio.charset.CharacterCodingException;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.NotDirectoryException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.checkpoint.Layout;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.io.AtomicFiles;
import org.djlmoe.io.AtomicFolders;
import org.djlmoe.optimizer.OffloadStreamAdamW;

/**
 * The saved states of a training run, in one folder: {@code checkpoint-000001-step-100} and so on,
 * or {@code checkpoint-000001-STAGE-step-100} in a run of several stages.
 *
 * <p>Each is written under a hidden name, forced to the disk and renamed when it is complete. So
 * whatever has its name is complete, at whatever moment the process is killed, and only then are
 * older ones deleted. The number counts the saves; the latest has the highest.
 *
 * <p>Memory beside the model and the state: a few MB. Disk: 4 bytes a parameter, 8 more for each
 * that trains, times one more than are kept. A save takes the time to write that; training waits.
 *
 * <p>Where adapters of frozen experts train, {@link #saveAdapters} leaves out the frozen weights:
 * the run goes on with the model that it began with, and the adapters on top.
 *
 * <p>One process at a time may save into a folder.
 */
public final class TrainingCheckpoints {

    private static final String STATE_FILE = "training_state.json";
    private static final String FORMAT = "djl-moe-training-1";

    /** A loss may be NaN, and a run whose optimizer leaves such steps out goes on. */
    private static final Gson GSON =
            new GsonBuilder().serializeSpecialFloatingPointValues().create();

    private static final Pattern NAME =
            Pattern.compile("checkpoint-(\\d{6,18})(-[a-z_]+)?-step-(\\d+)");

    private final Path folder;
    private final int kept;

    /** What the file holds. */
    private record StateJson(
            String format,
            String stage,
            Long step,
            Long seed,
            Map<String, String> settings,
            float[] losses) {}

    /**
     * Names the folder; nothing is read or written yet.
     *
     * @param folder the folder, made by the first save
     * @param kept how many of the latest are kept, at least 1
     * @throws IllegalArgumentException if none is kept
     */
    public TrainingCheckpoints(Path folder, int kept) {
        if (kept < 1) {
            throw new IllegalArgumentException("At least 1 checkpoint is kept, not " + kept);
        }
        this.folder = folder;
        this.kept = kept;
    }

    /**
     * Saves a run after an update, when no gradients are pending.
     *
     * @param model its weights; its experts have no adapters
     * @param optimizer its optimizer
     * @param state how far it is
     * @return what was saved
     * @throws IllegalStateException if experts have adapters
     * @throws IOException if writing fails; what was saved before is untouched then
     */
    public TrainingCheckpoint save(
            LanguageModel model, OffloadStreamAdamW optimizer, TrainingState state)
            throws IOException {
        // Stacked experts are the model's own layout: fewer tensors, nothing is taken apart.
        SaveOptions options = SaveOptions.builder().optLayout(Layout.FUSED).build();
        return save(
                state,
                partial -> {
                    model.save(partial, options);
                    optimizer.save(partial.resolve(TrainingCheckpoint.OPTIMIZER_FILE));
                });
    }

    /**
     * Saves a run in which adapters train, and perhaps routers, after an update, when no gradients
     * are pending. All other weights are left out.
     *
     * @param model its experts have adapters
     * @param routers whether routers train too
     * @param optimizer the optimizer
     * @param state how far the run is
     * @param more writes further files of the caller's
     * @return what was saved
     * @throws IllegalStateException if not every layer has adapters
     * @throws IOException if writing fails; what was saved before is untouched then
     */
    public TrainingCheckpoint saveAdapters(
            LanguageModel model,
            boolean routers,
            OffloadStreamAdamW optimizer,
            TrainingState state,
            AtomicFolders.Contents more)
            throws IOException {
        return save(
                state,
                partial -> {
                    model.saveAdapter(partial, null, routers);
                    optimizer.save(partial.resolve(TrainingCheckpoint.OPTIMIZER_FILE));
                    more.writeTo(partial);
                });
    }

    /**
     * Saves a run whose weights and optimizer are the caller's own.
     *
     * @param state how far it is
     * @param contents writes everything else that it needs to go on
     * @return what was saved
     * @throws IOException if writing fails; what was saved before is untouched then
     */
    public TrainingCheckpoint save(TrainingState state, AtomicFolders.Contents contents)
            throws IOException {
        Files.createDirectories(folder);
        AtomicFolders.deleteLeftovers(folder);
        TreeMap<Long, Path> before = complete();
        long number = before.isEmpty() ? 1 : before.lastKey() + 1;
        String stage = state.stage().isEmpty() ? "" : "-" + state.stage();
        Path target =
                folder.resolve(
                        String.format(
                                Locale.ROOT,
                                "checkpoint-%06d%s-step-%d",
                                number,
                                stage,
                                state.step()));
        AtomicFolders.write(
                target,
                partial -> {
                    contents.writeTo(partial);
                    AtomicFiles.writeString(partial.resolve(STATE_FILE), GSON.toJson(json(state)));
                });
        before.put(number, target);
        while (before.size() > kept) {
            AtomicFolders.delete(before.pollFirstEntry().getValue());
        }
        return new TrainingCheckpoint(target, state);
    }

    private static StateJson json(TrainingState state) {
        return new StateJson(
                FORMAT,
                state.stage().isEmpty() ? null : state.stage(),
                state.step(),
                state.seed(),
                // Sorted, so that equal states are equal files.
                new TreeMap<>(state.settings()),
                state.losses());
    }

    /**
     * Returns the latest complete checkpoint.
     *
     * @return the checkpoint, or nothing if there is none
     * @throws CheckpointException if its description is broken
     * @throws IOException if the folder cannot be read
     */
    public Optional<TrainingCheckpoint> latest() throws IOException {
        TreeMap<Long, Path> all = complete();
        return all.isEmpty() ? Optional.empty() : Optional.of(read(all.lastEntry().getValue()));
    }

    /**
     * Returns all complete checkpoints.
     *
     * @return their folders, the oldest first
     * @throws IOException if the folder cannot be read
     */
    public List<Path> folders() throws IOException {
        return new ArrayList<>(complete().values());
    }

    private TreeMap<Long, Path> complete() throws IOException {
        TreeMap<Long, Path> found = new TreeMap<>();
        if (Files.exists(folder) && !Files.isDirectory(folder)) {
            throw new NotDirectoryException(folder.toString());
        }
        if (Files.isDirectory(folder)) {
            try (DirectoryStream<Path> entries = Files.newDirectoryStream(folder)) {
                for (Path entry : entries) {
                    Matcher name = NAME.matcher(entry.getFileName().toString());
                    if (name.matches() && Files.isDirectory(entry)) {
                        found.put(Long.parseLong(name.group(1)), entry);
                    }
                }
            }
        }
        return found;
    }

    private static TrainingCheckpoint read(Path checkpoint) throws IOException {
        Path file = checkpoint.resolve(STATE_FILE);
        try {
            StateJson json = GSON.fromJson(Files.readString(file), StateJson.class);
            if (json == null || !FORMAT.equals(json.format)) {
                throw new CheckpointException(file + ": is not marked as " + FORMAT);
            }
            if (json.step == null
                    || json.seed == null
                    || json.settings == null
                    || json.losses == null) {
                throw new CheckpointException(file + ": lacks step, seed, settings or losses");
            }
            return new TrainingCheckpoint(
                    checkpoint,
                    new TrainingState(
                            json.stage == null ? "" : json.stage,
                            json.step,
                            json.seed,
                            json.losses,
                            json.settings));
        } catch (JsonParseException | CharacterCodingException e) {
            throw new CheckpointException(
                    file
                            + ": is damaged, not the JSON that was saved: delete "
                            + checkpoint
                            + " to go on from the one before");
        } catch (IllegalArgumentException e) {
            throw new CheckpointException(file + ": " + e.getMessage());
        }
    }
}
