package org.djlmoe.autograd;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
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

    /** Whether a gradient that was released, or was never there, has received something since. */
    static boolean isLate(NDArray gradient) {
        return KERNELS.callBoolean("is_late", gradient);
    }

    /** Frees the memory of a gradient that its leaf still refers to. */
    static void release(NDArray gradient) {
        KERNELS.run("release", gradient);
    }
}
