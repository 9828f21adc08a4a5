package org.djlmoe.examples.study;

import java.io.IOException;
import org.djlmoe.training.LanguageModel;

/** Measures the time per output token of a model whose experts come from a slower tier. */
@FunctionalInterface
interface DecodeTimer {

    /** Measures nothing. */
    DecodeTimer NONE = model -> null;

    /**
     * Measures.
     *
     * @param model the model, with adapters merged and the prior that it is served under
     * @return the time, or null for none
     * @throws IOException if the tier fails
     */
    Figures.Timing measure(LanguageModel model) throws IOException;
}
