package org.djlmoe.autograd;

import ai.djl.ndarray.NDArray;
import ai.djl.nn.Parameter;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.jni.JniUtils;
import org.djlmoe.kernel.ArrayKernels;

/**
 * The gradient that PyTorch keeps with a weight. DJL's own accessor makes up zeros where there is
 * none.
 */
public final class Gradients {

    private Gradients() {}

    /**
     * Returns the gradient of a parameter.
     *
     * @param parameter a parameter
     * @return a handle on the gradient, to be closed by the caller; null if the parameter has no
     *     array, is frozen, or no backward has reached it yet
     */
    public static NDArray of(Parameter parameter) {
        return parameter.isInitialized() && parameter.requiresGradient()
                ? of(parameter.getArray())
                : null;
    }

    /**
     * Returns the gradient of a weight.
     *
     * @param weight an array
     * @return a handle on the gradient, to be closed by the caller; null if no backward has reached
     *     the array yet
     */
    public static NDArray of(NDArray weight) {
        return JniUtils.getGradient((PtNDArray) weight);
    }

    /**
     * Adds the gradients of a number to those of all parameters that it was computed from, now. The
     * history stays, so a later backward of something else may pass through it.
     *
     * @param loss one number; if nothing that it was computed from gets a gradient, nothing happens
     */
    public static void add(NDArray loss) {
        if (ArrayKernels.requiresGradient(loss)) {
            try (NDArray one = loss.onesLike()) {
                JniUtils.backward((PtNDArray) loss, (PtNDArray) one, true, false);
            }
        }
    }

    /**
     * Sets the gradient of a weight to zero, if it has one.
     *
     * @param weight an array
     */
    public static void zero(NDArray weight) {
        JniUtils.zeroGrad((PtNDArray) weight);
    }
}
