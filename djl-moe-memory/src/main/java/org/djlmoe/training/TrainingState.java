package org.djlmoe.training;

import java.util.Arrays;
import java.util.Map;
import java.util.Objects;
import java.util.TreeMap;

/**
 * How far a training run is, besides its weights and its optimizer's state. With the seed, the step
 * decides the next batch of {@code PackedBatches} and all random numbers of {@link
 * LanguageModelTrainer}.
 *
 * @param step the number of batches trained on, which is the number of the next; without
 *     accumulation that of the updates
 * @param seed what decides everything random
 * @param losses the loss of each step so far, or of none
 * @param settings what the run was started with, by name, to be compared when it goes on
 */
public record TrainingState(long step, long seed, float[] losses, Map<String, String> settings) {

    /**
     * Copies the losses and the settings.
     *
     * @throws IllegalArgumentException if the step is negative, or the losses are neither one a
     *     step nor none
     */
    public TrainingState {
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
                && step == that.step
                && seed == that.seed
                && Arrays.equals(losses, that.losses)
                && settings.equals(that.settings);
    }

    @Override
    public int hashCode() {
        return Objects.hash(step, seed, Arrays.hashCode(losses), settings);
    }

    @Override
    public String toString() {
        return "TrainingState[step=" + step + ", seed=" + seed + ", settings=" + settings + "]";
    }
}
