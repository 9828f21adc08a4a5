package org.djlmoe.maskcoft;

import java.util.Map;
import org.djlmoe.training.TrainingCheckpoint;
import org.djlmoe.training.TrainingCheckpoints;

/**
 * How a fine-tuning run survives the end of its process: where and how often its state is saved,
 * and which state it goes on from. A run that goes on is in the end the run that was never stopped:
 * weights, adapters, mask logits, optimizer state and losses are equal to the bit.
 *
 * <pre>{@code
 * TrainingCheckpoints checkpoints = new TrainingCheckpoints(folder, 2);
 * RunSaves saves = RunSaves.every(50, checkpoints).goingOnFrom(checkpoints.latest().orElse(null));
 * MaskCoFT.Result result = recipe.run(listener, saves);   // the same line, first time or later
 * }</pre>
 *
 * <p>A saved state holds the adapters, the routers where they train, the optimizer's state, the
 * state of {@link MaskLearning} and how far the run is, but not the frozen weights: the run goes on
 * with the model that it began with, loaded anew. Recipe, settings, text and model are compared
 * with those of the saved run; the model by {@link org.djlmoe.training.LanguageModel#digest()},
 * which reads all weights once, the training text by its first and its last batch. An estimator of
 * one's own is compared by its {@code toString}.
 *
 * <p>Not for {@link MaskCoFTStages}, whose loop and optimizer are the caller's. Equal to the bit
 * means on the same machine with the same number of threads.
 *
 * @param checkpoints where states are saved, a folder for this run alone; null if none are
 * @param every steps of a stage between two saves; the end of a stage is saved as well. 0 for never
 * @param from the state to go on from, or null to start from the beginning
 * @param settings the caller's own, saved along and not looked at; by name
 */
public record RunSaves(
        TrainingCheckpoints checkpoints,
        int every,
        TrainingCheckpoint from,
        Map<String, String> settings) {

    /** Nothing is saved, and the run starts from the beginning. */
    public static final RunSaves NONE = new RunSaves(null, 0, null, Map.of());

    /** Checks that there is a place for saves. */
    public RunSaves {
        Checks.require(every >= 0, "every is %d: set 1 or more, or 0 to save nothing", every);
        Checks.require(
                every == 0 || checkpoints != null,
                "every is %d, but checkpoints is null: name their folder",
                every);
        settings = Map.copyOf(settings);
    }

    /**
     * Saves on the way.
     *
     * @param steps steps of a stage between two saves, at least 1
     * @param checkpoints where to
     * @return the choice
     */
    public static RunSaves every(int steps, TrainingCheckpoints checkpoints) {
        Checks.require(steps >= 1, "every is %d: set 1 or more", steps);
        return new RunSaves(checkpoints, steps, null, Map.of());
    }

    /**
     * Goes on from a saved state.
     *
     * @param checkpoint the state, or null to start from the beginning
     * @return the choice
     */
    public RunSaves goingOnFrom(TrainingCheckpoint checkpoint) {
        return new RunSaves(checkpoints, every, checkpoint, settings);
    }

    /**
     * Saves settings of the caller's along, beside those of the run.
     *
     * @param own by name
     * @return the choice
     */
    public RunSaves withSettings(Map<String, String> own) {
        return new RunSaves(checkpoints, every, from, own);
    }
}
