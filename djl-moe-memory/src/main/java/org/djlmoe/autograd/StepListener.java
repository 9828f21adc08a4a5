package org.djlmoe.autograd;

/** A block that is told when the parameters have been updated. */
public interface StepListener {

    /**
     * Called by a {@link BoundedTrainer} once a step, after the update. DJL's own trainer does not
     * know of it: call it after {@code trainer.step()} there.
     */
    void afterStep();
}
