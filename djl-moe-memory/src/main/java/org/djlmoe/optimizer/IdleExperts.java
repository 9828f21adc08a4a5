package org.djlmoe.optimizer;

/** What a step does with an expert that had no tokens. */
public enum IdleExperts {
    /**
     * Nothing, as {@code torch.optim.AdamW} does with a parameter that has no gradient: weight,
     * running means and step count stay as they are.
     */
    SKIP,
    /** Its weight decays as its group says; running means and step count stay as they are. */
    DECAY
}
