package org.djlmoe.maskcoft;

import java.util.Arrays;
import org.djlmoe.routing.ExpertMask;

/**
 * One drawn mask: what to try on the model, and what the estimator needs to credit it. Immutable.
 */
public final class MaskSample {

    private final int step;
    private final int index;
    private final ExpertMask mask;
    private final double[][] credit;
    private final long updates;

    /**
     * Creates a sample.
     *
     * @param step the step that it is drawn for
     * @param index which of the step's samples it is
     * @param mask the mask
     * @param credit what its estimator multiplies the outcome by, [layers, experts]: for
     *     Plackett-Luce d log P / d theta, straight through d factor / d theta; not copied
     */
    public MaskSample(int step, int index, ExpertMask mask, double[][] credit) {
        this(step, index, mask, credit, 0);
    }

    private MaskSample(int step, int index, ExpertMask mask, double[][] credit, long updates) {
        this.step = step;
        this.index = index;
        this.mask = mask;
        this.credit = credit;
        this.updates = updates;
    }

    /** The same sample, drawn when theta had seen so many updates. */
    MaskSample drawnAfter(long count) {
        return new MaskSample(step, index, mask, credit, count);
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

    /**
     * Returns what the estimator multiplies an expert's outcome by.
     *
     * @param layer the MoE layer
     * @return [experts]; a copy
     */
    public double[] credit(int layer) {
        return credit[layer].clone();
    }

    /** Returns how many updates theta had seen when this was drawn. */
    long updates() {
        return updates;
    }

    @Override
    public String toString() {
        return "MaskSample %d of step %d, credit %s%n%s"
                .formatted(index, step, Arrays.deepToString(credit), mask);
    }
}
