package org.djlmoe.optimizer;

import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;

/**
 * What became of each parameter when an optimizer's state was loaded.
 *
 * @param file the file
 * @param updates the number of the last step, from which the learning rate goes on
 * @param restored trained parameters whose state was in the file
 * @param frozen parameters that are frozen now; their state is kept
 * @param started trained parameters without state in the file, which start at step 0
 * @param removed parameters of the file that the model lacks; their state was left out
 * @param converted parameters whose weight has become one of half precision, so that its master
 *     starts from it, or is no longer one, so that the master was left out
 * @param changedOptions options that are others now: name, old and new value
 */
public record StateReport(
        Path file,
        int updates,
        List<String> restored,
        List<String> frozen,
        List<String> started,
        List<String> removed,
        List<String> converted,
        List<String> changedOptions) {

    /** Copies the lists. */
    public StateReport {
        restored = List.copyOf(restored);
        frozen = List.copyOf(frozen);
        started = List.copyOf(started);
        removed = List.copyOf(removed);
        converted = List.copyOf(converted);
        changedOptions = List.copyOf(changedOptions);
    }

    /**
     * Returns whether the steps that follow are those of the run that was saved.
     *
     * @return true if every trained parameter was restored and nothing was left out or changed
     */
    public boolean isComplete() {
        return started.isEmpty()
                && removed.isEmpty()
                && converted.isEmpty()
                && changedOptions.isEmpty();
    }

    /** Returns one line that names every parameter but the restored ones. */
    @Override
    public String toString() {
        List<String> parts = new ArrayList<>();
        add(parts, "frozen, kept", frozen);
        add(parts, "without state, start at step 0", started);
        add(parts, "not in the model, left out", removed);
        add(parts, "weight of another precision", converted);
        add(parts, "changed options", changedOptions);
        return "Optimizer state after update "
                + updates
                + " from "
                + file
                + ": "
                + restored.size()
                + " parameters restored"
                + (parts.isEmpty() ? "" : "; " + String.join("; ", parts));
    }

    private static void add(List<String> parts, String what, List<String> names) {
        if (!names.isEmpty()) {
            parts.add(what + ": " + String.join(", ", names));
        }
    }
}
