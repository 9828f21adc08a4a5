package org.djlmoe.optimizer;

import ai.djl.ndarray.NDArray;
import java.util.Map;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Decides what holds for a whole step, from all of its gradients: how they are scaled, and whether
 * the step is left out because one is not finite. Counts both kinds of steps.
 */
final class StepPolicy {

    /**
     * What holds for a step.
     *
     * @param number which step it is; one that is left out has the number of the last
     * @param skipped whether it is left out
     * @param divisor what gradients are divided by
     * @param expertLoad how many tokens each expert had, by the path of its parameters
     */
    record Step(int number, boolean skipped, double divisor, Map<String, long[]> expertLoad) {}

    private static final Logger LOGGER = LoggerFactory.getLogger(OffloadStreamAdamW.class);

    private final AdamWKernels kernels;
    private final Clipping clipping;
    private final NonFinitePolicy nonFinite;
    private final ExpertLoad load;
    private final int begin;

    /** The tokens of a step that was taken back, for the one that comes in its place. */
    private Map<String, long[]> kept;

    private int updates;
    private long skipped;
    private double globalNorm = Double.NaN;

    /**
     * Creates a policy.
     *
     * @param load the source of the experts' tokens, or null
     * @param begin the number after which the first step comes
     */
    StepPolicy(
            AdamWKernels kernels,
            Clipping clipping,
            NonFinitePolicy nonFinite,
            ExpertLoad load,
            int begin) {
        this.kernels = kernels;
        this.clipping = clipping;
        this.nonFinite = nonFinite;
        this.load = load;
        this.begin = begin;
    }

    /** Returns whether one gradient without the path of its parameter is too little to go by. */
    boolean needsModel() {
        return needsAllGradients() || load != null;
    }

    private boolean needsAllGradients() {
        return clipping.norm() > 0 || nonFinite != NonFinitePolicy.PROPAGATE;
    }

    /**
     * Counts and decides the next step.
     *
     * @param gradients all of its gradients by path; any of them, if not all are needed
     * @throws ArithmeticException if one is not finite and the policy is to raise
     */
    Step next(Map<String, NDArray> gradients) {
        // Also of a step that is left out or refused: its tokens are no tokens of the next.
        Map<String, long[]> expertLoad =
                kept != null ? kept : load == null ? Map.of() : load.take();
        kept = null;
        String culprit = needsAllGradients() ? measure(gradients) : null;
        if (culprit != null && nonFinite == NonFinitePolicy.RAISE) {
            throw new ArithmeticException(
                    "The gradient of "
                            + culprit
                            + " holds a NaN or an infinity; nothing has been updated");
        }
        boolean skip = culprit != null && nonFinite == NonFinitePolicy.SKIP;
        if (skip) {
            skipped++;
            LOGGER.warn(
                    "A step is left out ({} so far): the gradient of {} holds a NaN or an infinity",
                    skipped,
                    culprit);
        } else {
            updates = Math.max(begin, updates) + 1;
        }
        return new Step(updates, skip, clipping.divisor(globalNorm), expertLoad);
    }

    /** Takes the global norm, and returns the first parameter whose gradient is not finite. */
    private String measure(Map<String, NDArray> gradients) {
        String culprit = null;
        double squares = 0;
        for (Map.Entry<String, NDArray> gradient : gradients.entrySet()) {
            double sum = kernels.sumOfSquares(gradient.getValue(), 0);
            if (culprit == null && !Double.isFinite(sum)) {
                culprit = gradient.getKey();
            }
            squares +=
                    clipping.value() > 0
                            ? kernels.sumOfSquares(gradient.getValue(), clipping.limit())
                            : sum;
        }
        globalNorm = Math.abs(clipping.rescale()) * Math.sqrt(squares);
        return culprit;
    }

    /** Has a step not been, the last one, which was not left out. */
    void takeBack(Step step) {
        updates--;
        kept = step.expertLoad();
    }

    /** Goes on after the last step of another run. */
    void restore(int updates, long skipped) {
        this.updates = updates;
        this.skipped = skipped;
    }

    int updates() {
        return updates;
    }

    long skipped() {
        return skipped;
    }

    double globalNorm() {
        return globalNorm;
    }
}
