package org.djlmoe.maskcoft;

/** Is told how a stage of fine-tuning gets on. */
@FunctionalInterface
public interface StageListener {

    /**
     * Called after every step.
     *
     * @param step steps done in this stage
     * @param steps steps of this stage in all
     * @param tokens tokens that this step ran through the model
     * @param loss the step's mean loss, in nats a token
     */
    void step(int step, int steps, long tokens, double loss);
}
