package org.djlmoe.optimizer;

/** What a step does when a gradient holds a NaN or an infinity. */
public enum NonFinitePolicy {
    /** Nothing special, as {@code torch.optim.AdamW}: what the gradient holds spreads. */
    PROPAGATE,
    /**
     * Leaves all weights and state as they are, sets the gradients to zero and counts it as
     * skipped.
     */
    SKIP,
    /**
     * Throws an {@link ArithmeticException} that names the parameter; nothing is changed. The
     * gradients stay for a look at them. Before going on, set them to zero: {@code
     * BoundedTrainer.zeroGradients()}, or under DJL's trainer {@code
     * Gradients.zero(parameter.getArray())} for each parameter.
     */
    RAISE
}
