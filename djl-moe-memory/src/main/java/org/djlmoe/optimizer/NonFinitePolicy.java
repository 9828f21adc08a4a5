package org.djlmoe.optimizer;

/** What a step does when a gradient holds a NaN or an infinity. */
public enum NonFinitePolicy {
    /** Nothing special, as {@code torch.optim.AdamW}: what the gradient holds spreads. */
    PROPAGATE,
    /** Leaves all weights and state as they are, sets the gradients to zero and counts the step. */
    SKIP,
    /** Throws an {@link ArithmeticException} that names the parameter; nothing is changed. */
    RAISE
}
