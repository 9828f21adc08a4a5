package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.NoSuchFileException;
import java.nio.file.NotDirectoryException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.stream.Collectors;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.maskcoft.RunSaves;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.TrainingCheckpoint;
import org.djlmoe.training.TrainingCheckpoints;
import picocli.CommandLine.Option;

/** The options {@code --save-every} and {@code --resume} of commands that train; a mixin. */
final class SavedStates {

    private static final String FOLDER = "checkpoints";
    private static final int KEPT = 2;
    private static final String MOE_CHUNK = "moe_chunk_tokens";
    private static final String VOCAB_BLOCK = "vocab_block_tokens";

    @Option(
            names = "--save-every",
            paramLabel = "N",
            description =
                    "Save the state of the run every N steps under "
                            + FOLDER
                            + " in the output directory; the last "
                            + KEPT
                            + " are kept (default: never).")
    private Integer every;

    @Option(
            names = "--resume",
            description =
                    "Go on from the last saved state, with the same settings; from the start if"
                            + " there is none.")
    private boolean resume;

    /** Fails unless the options make sense. */
    void check() {
        if (every != null) {
            Arguments.positive("--save-every", every);
        }
    }

    /** Returns whether the state is saved after a step, counted from 1. */
    boolean due(int step) {
        return every != null && step % every == 0;
    }

    /** Returns the saved states of a run. */
    TrainingCheckpoints in(Path out) {
        return new TrainingCheckpoints(out.resolve(FOLDER), KEPT);
    }

    /**
     * Returns what fine-tuning is to do.
     *
     * @param last where it goes on from
     * @param settings saved along
     */
    RunSaves of(Path out, Optional<TrainingCheckpoint> last, Map<String, String> settings) {
        RunSaves saves = every == null ? RunSaves.NONE : RunSaves.every(every, in(out));
        return saves.goingOnFrom(last.orElse(null)).withSettings(settings);
    }

    /**
     * Returns the chunks of a run, and adds them to its settings. Other chunks add up in another
     * order, so a run keeps those that it was started with.
     *
     * @throws UserError if the saved state does not say which
     */
    static LanguageModel.Chunks chunks(
            Optional<TrainingCheckpoint> last, MemoryPlan plan, Map<String, String> settings) {
        LanguageModel.Chunks chunks = Memory.chunks(plan);
        if (last.isPresent()) {
            Map<String, String> before = last.get().state().settings();
            try {
                chunks =
                        new LanguageModel.Chunks(
                                Integer.parseInt(before.get(MOE_CHUNK)),
                                Integer.parseInt(before.get(VOCAB_BLOCK)));
            } catch (NumberFormatException e) {
                throw new UserError(
                        "--resume: "
                                + last.get().folder()
                                + " does not say which chunks the run had; it was not saved by"
                                + " this command",
                        e);
            }
        }
        settings.put(MOE_CHUNK, Integer.toString(chunks.moeTokens()));
        settings.put(VOCAB_BLOCK, Integer.toString(chunks.vocabTokens()));
        return chunks;
    }

    /** Something that reads a saved state. */
    interface Reading<T> {
        T run() throws IOException;
    }

    /** Turns what is wrong with a saved state into an error for people. */
    static <T> T explained(Reading<T> reading) throws IOException {
        try {
            return reading.run();
        } catch (CheckpointException | SafetensorsException e) {
            throw new UserError("--resume: " + e.getMessage(), e);
        } catch (NotDirectoryException e) {
            throw new UserError("--resume: " + e.getFile() + " is a file, not a folder", e);
        } catch (NoSuchFileException e) {
            throw new UserError("--resume: there is no file " + e.getFile(), e);
        }
    }

    /**
     * Returns the state to go on from, if there is one.
     *
     * @param out the output directory
     * @param settings what decides the run, by option
     * @throws UserError if there is one of a run with other settings, or one and no {@code
     *     --resume}
     */
    Optional<TrainingCheckpoint> start(Path out, Map<String, String> settings) throws IOException {
        Optional<TrainingCheckpoint> last = explained(() -> in(out).latest());
        if (last.isEmpty()) {
            return last;
        }
        Path folder = last.get().folder();
        if (!resume) {
            throw new UserError(
                    "--out: there is a saved state of an earlier run, "
                            + folder
                            + ": go on from it with --resume, name another directory, or delete "
                            + out.resolve(FOLDER));
        }
        if (!options(settings).equals(options(last.get().state().settings()))) {
            throw new UserError(
                    "--resume: "
                            + folder
                            + " was saved by another command: name another directory with --out");
        }
        List<String> differing = new ArrayList<>();
        last.get()
                .state()
                .changes(settings)
                .forEach(
                        (name, change) -> {
                            // What is no option is the run's own choice, and goes on with it.
                            if (isOption(name)) {
                                differing.add(name + " " + change);
                            }
                        });
        if (!differing.isEmpty()) {
            throw new UserError(
                    "--resume: "
                            + folder
                            + " is of a run with other settings: "
                            + String.join(", ", differing));
        }
        return last;
    }

    private static boolean isOption(String setting) {
        return setting.startsWith("--");
    }

    private static Set<String> options(Map<String, String> settings) {
        return settings.keySet().stream().filter(SavedStates::isOption).collect(Collectors.toSet());
    }
}
