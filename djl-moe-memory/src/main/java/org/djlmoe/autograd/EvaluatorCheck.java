package org.djlmoe.autograd;

import ai.djl.training.evaluator.Evaluator;
import java.util.List;

/**
 * A loss whose predictions are not what every evaluator takes them for. {@link BoundedTrainer} asks
 * it before training begins.
 */
public interface EvaluatorCheck {

    /**
     * Checks the evaluators of a training configuration.
     *
     * @param evaluators the evaluators beside the loss
     * @throws IllegalArgumentException if one of them would report nonsense
     */
    void checkEvaluators(List<Evaluator> evaluators);
}
