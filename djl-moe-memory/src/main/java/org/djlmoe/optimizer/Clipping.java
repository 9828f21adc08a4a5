package org.djlmoe.optimizer;

/**
 * What is done to the gradients of a step, in this order: they are multiplied by {@code rescale},
 * each element is clipped to [-value, value], and all are divided by what brings their common norm
 * below {@code norm}, as {@code torch.nn.utils.clip_grad_norm_} does.
 *
 * <p>The update does it in two operations, which read better the other way round: it clips to
 * {@link #limit} what is not rescaled yet, then divides by {@link #divisor}.
 *
 * @param rescale finite and not 0
 * @param value 0 for no clipping of values
 * @param norm 0 for no clipping by the norm
 */
record Clipping(double rescale, double value, double norm) {

    /** Returns the largest absolute value of an element that is not rescaled yet; 0 for none. */
    double limit() {
        return value / Math.abs(rescale);
    }

    /**
     * Returns what gradients are divided by.
     *
     * @param globalNorm the norm of all gradients, rescaled and with values clipped
     */
    double divisor(double globalNorm) {
        double divisor = 1.0 / rescale;
        return norm > 0 ? divisor / Math.min(1, norm / (globalNorm + 1e-6)) : divisor;
    }
}
