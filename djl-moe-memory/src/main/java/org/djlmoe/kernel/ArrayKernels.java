package org.djlmoe.kernel;

import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.engine.PtNDManager;
import ai.djl.pytorch.jni.IValue;
import ai.djl.pytorch.jni.JniUtils;

/** What can be done with, or known of, a tensor but not through DJL's {@link NDArray}. */
public final class ArrayKernels {

    private static final TorchKernels KERNELS = TorchKernels.load(ArrayKernels.class, "arrays.py");

    private ArrayKernels() {}

    /**
     * Returns another handle of the same tensor: same memory, history and gradient, but closing one
     * handle leaves the other usable.
     *
     * <p>For weights that leave their block: a list of predictions is closed with its batch, and
     * must not take the model's weight along.
     *
     * @param manager the owner of the new handle
     * @param array the array
     * @return the new handle
     */
    public static NDArray alias(NDManager manager, NDArray array) {
        try (IValue value = IValue.from((PtNDArray) array)) {
            NDArray alias = value.toTensor((PtNDManager) manager);
            alias.setName(array.getName());
            return alias;
        }
    }

    /**
     * Returns whether a gradient of an array is wanted. DJL's {@code hasGradient()} says no for
     * every array that was computed from others.
     *
     * @param array the array
     * @return true if autograd tracks it
     */
    public static boolean requiresGradient(NDArray array) {
        return KERNELS.callBoolean("requires_gradient", array);
    }

    /**
     * Returns the number of times that an array's memory was changed in place.
     *
     * @param array the array
     * @return the number, or -1 for arrays that do not count
     */
    public static long version(NDArray array) {
        return (long) KERNELS.callDouble("version", array);
    }

    /**
     * Switches the calling thread's gradient mode off for good: for worker threads, which start
     * with it on.
     */
    public static void stopRecording() {
        // The thread may be the first to need the engine.
        Engine.getEngine("PyTorch");
        JniUtils.setGradMode(false);
    }

    /**
     * Converts to FLOAT16 or FLOAT32 in a way that autograd follows, which DJL's {@code toType}
     * does not.
     *
     * @param array a floating point array
     * @param half true for FLOAT16, false for FLOAT32
     * @return the converted array
     */
    public static NDArray convert(NDArray array, boolean half) {
        return KERNELS.record(array.getManager(), half ? "to_half" : "to_single", array).head();
    }
}
