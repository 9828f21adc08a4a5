package org.djlmoe.maskcoft;

import java.util.Arrays;
import org.djlmoe.routing.ExpertMask;

/** One drawn mask: what to try on the model, and what the learner needs to credit it. Immutable. */
public final class MaskSample {

    private final int step;
    private final int index;
    private final long updates;
    private final int[][] order;
    private final ExpertMask mask;

    MaskSample(int step, int index, long updates, int experts, int[][] order) {
        this.step = step;
        this.index = index;
        this.updates = updates;
        this.order = order;
        boolean[][] kept = new boolean[order.length][experts];
        for (int l = 0; l < order.length; l++) {
            for (int e : order[l]) {
                kept[l][e] = true;
            }
        }
        mask = ExpertMask.of(kept);
    }

    /**
     * Returns the mask to run the model under, the same for every token of the batch.
     *
     * @return the mask
     */
    public ExpertMask mask() {
        return mask;
    }

    /**
     * Returns the step it was proposed in.
     *
     * @return the step
     */
    public int step() {
        return step;
    }

    /**
     * Returns which of the step's samples it is.
     *
     * @return 0 to M - 1
     */
    public int index() {
        return index;
    }

    /** Returns how many updates theta had seen when this was drawn. */
    long updates() {
        return updates;
    }

    /** Returns the drawn order of a layer; the learner's own array. */
    int[] order(int layer) {
        return order[layer];
    }

    @Override
    public String toString() {
        return "MaskSample %d of step %d %s".formatted(index, step, Arrays.deepToString(order));
    }
}
