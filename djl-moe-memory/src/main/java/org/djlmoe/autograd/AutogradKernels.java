package org.djlmoe.autograd;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.pytorch.engine.PtNDArray;
import ai.djl.pytorch.jni.JniUtils;
import org.djlmoe.kernel.TorchKernels;

/** What the tape must ask of tensors that DJL cannot tell. */
final class AutogradKernels {

    private static final TorchKernels KERNELS =
            TorchKernels.load(AutogradKernels.class, "autograd.py");

    private AutogradKernels() {}

    /**
     * Returns (output, anchor): the same memory as {@code array}, now with a history of one
     * addition, and the leaf at its other end, which holds no memory of its own and in which the
     * output's gradient arrives.
     */
    static NDList anchor(NDManager manager, NDArray array) {
        return KERNELS.record(manager, "anchor", array);
    }

    /** Returns zeros of an array's shape, all of them the same number in memory. */
    static NDArray zeros(NDManager manager, NDArray like) {
        return KERNELS.record(manager, "zeros", like).head();
    }

    /**
     * Sends a gradient on through autograd, which does not copy it: a leaf without a gradient keeps
     * its memory. The array of the gradient is closed.
     */
    static void backwardHandingOver(NDArray array, NDArray gradient) {
        NDManager manager = array.getManager();
        // Autograd keeps a gradient that only its own graph refers to. The one given to it has an
        // owner in Java; what comes out of the backward of a view has none.
        try (GradMode on = GradMode.on();
                gradient;
                NDArray view = KERNELS.record(manager, "view", array).head()) {
            JniUtils.backward((PtNDArray) view, (PtNDArray) gradient, true, false);
        }
    }

    /** Whether two contiguous arrays are the same memory, in one shape or another. */
    static boolean shareMemory(NDArray one, NDArray other) {
        return KERNELS.callBoolean("share_memory", one, other);
    }

    /** Whether a gradient that was released, or was never there, has received something since. */
    static boolean isLate(NDArray gradient) {
        return KERNELS.callBoolean("is_late", gradient);
    }

    /** Frees the memory of a gradient that its leaf still refers to. */
    static void release(NDArray gradient) {
        KERNELS.run("release", gradient);
    }
}
