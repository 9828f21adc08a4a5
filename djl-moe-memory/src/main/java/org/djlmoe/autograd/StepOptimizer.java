package org.djlmoe.autograd;

import ai.djl.ndarray.NDArray;
import java.util.List;

/** An optimizer that is handed all gradients of a step at once, in the block's order. */
public interface StepOptimizer {

    /**
     * Updates every weight and sets its gradient to zero.
     *
     * @param parameters the parameters that have a gradient
     */
    void step(List<Slot> parameters);

    /**
     * A parameter in a step.
     *
     * @param id DJL's id of the parameter, {@link ai.djl.nn.Parameter#getId()}
     * @param path its name in the model, as {@link ParameterPaths} gives it
     * @param weight the weight, to be updated in place
     * @param gradient its gradient, to be set to zero
     */
    record Slot(String id, String path, NDArray weight, NDArray gradient) {}
}
