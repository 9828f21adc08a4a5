package org.djlmoe.plan;

/**
 * A stage of a step. Each is taken where it needs most: forward stages in the last layer, backward
 * stages in the first that they meet, which is the last layer too.
 */
public enum Phase {
    /** An attention segment computes its output. */
    FORWARD_ATTENTION("forward, attention"),
    /** A MoE segment computes its output. */
    FORWARD_MOE("forward, MoE"),
    /** The final norm computes its output. */
    FORWARD_NORM("forward, final norm"),
    /** Projection and cross-entropy, gradients included. */
    LOSS("loss"),
    /** The loss hands its gradients on. */
    BACKWARD_LOSS("backward, loss"),
    /** Backward of the final norm. */
    BACKWARD_NORM("backward, final norm"),
    /** Backward of a MoE segment. */
    BACKWARD_MOE("backward, MoE"),
    /** Backward of an attention segment. */
    BACKWARD_ATTENTION("backward, attention"),
    /** The optimizer's update. */
    STEP("step");

    private final String words;

    Phase(String words) {
        this.words = words;
    }

    /** Returns whether there is no gradient in it, so that evaluation has it too. */
    boolean isForward() {
        return compareTo(LOSS) <= 0;
    }

    @Override
    public String toString() {
        return words;
    }
}
