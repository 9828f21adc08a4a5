package org.djlmoe.training;

import java.util.Arrays;
import java.util.Map;
import java.util.Objects;
import java.util.TreeMap;
import java.util.regex.Pattern;

/**
 * How far a training run is, besides its weights and its optimizer's state. With the seed, the step
 * decides the next batch of {@code PackedBatches} and all random numbers of {@link
 * LanguageModelTrainer}.
 *
 * @param stage the stage of a run of several, in small letters; empty where there is only one
 * @param step the number of batches trained on in the stage, which is the number of the next;
 *     without accumulation that of the updates
 * @param seed what decides everything random
 * @param losses the loss of each step so far, or of none
 * @param settings what the run was started with, by name, to be compared when it goes on
 */
public record TrainingState(
        String stage, long step, long seed, float[] losses, Map<String, String> settings) {

    private static final Pattern STAGE = Pattern.compile("[a-z_]*");

    /**
     * Copies the losses and the settings.
     *
     * @throws IllegalArgumentException if the stage is not of small letters, the step is negative,
     *     or the losses are neither one a step nor none
     */
    public TrainingState {
        if (!STAGE.matcher(stage).matches()) {
            throw new IllegalArgumentException(
                    "The stage is '" + stage + "': name it in small letters, or not at all");
        }
        losses = losses.clone();
        settings = Map.copyOf(settings);
        if (step < 0 || losses.length != 0 && losses.length != step) {
            throw new IllegalArgumentException(
                    "A run after step "
                            + step
                            + " has that many losses, or none are kept, not "
                            + losses.length);
        }
    }

    /**
     * The state of a run of one stage.
     *
     * @param step the number of batches trained on
     * @param seed what decides everything random
     * @param losses the loss of each step so far, or of none
     * @param settings what the run was started with
     */
    public TrainingState(long step, long seed, float[] losses, Map<String, String> settings) {
        this("", step, seed, losses, settings);
    }

    @Override
    public float[] losses() {
        return losses.clone();
    }

    /**
     * Compares the settings.
     *
     * @param now the settings of the run that is to go on
     * @return the names of those that differ, each with the value before and now
     */
    public Map<String, String> changes(Map<String, String> now) {
        Map<String, String> changes = new TreeMap<>();
        TreeMap<String, String> all = new TreeMap<>(settings);
        all.putAll(now);
        for (String name : all.keySet()) {
            String before = settings.get(name);
            String after = now.get(name);
            if (!Objects.equals(before, after)) {
                changes.put(name, before + " -> " + after);
            }
        }
        return changes;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof TrainingState that
                && stage.equals(that.stage)
                && step == that.step
                && seed == that.seed
                && Arrays.equals(losses, that.losses)
                && settings.equals(that.settings);
    }

    @Override
    public int hashCode() {
        return Objects.hash(stage, step, seed, Arrays.hashCode(losses), settings);
    }

    @Override
    public String toString() {
        return "TrainingState["
                + (stage.isEmpty() ? "" : "stage=" + stage + ", ")
                + "step="
                + step
                + ", seed="
                + seed
                + ", settings="
                + settings
                + "]";
    }
}
