package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;

/** Root mean square norm and embedding look-up, forward and backward. */
public final class NormKernels {

    private static final TorchKernels KERNELS = TorchKernels.load(NormKernels.class, "norm.py");

    private NormKernels() {}

    /**
     * {@code y = x / sqrt(mean(x^2) + eps) * gamma} over the last axis.
     *
     * @param x [N, H]
     * @param gamma [H]
     * @param eps keeps the root away from zero
     * @param y [N, H], filled
     */
    public static void rmsNorm(NDArray x, NDArray gamma, double eps, NDArray y) {
        KERNELS.run("rms_norm_rows", x, gamma, eps, y);
    }

    /**
     * Backward of {@link #rmsNorm}.
     *
     * @param x [N, H]
     * @param gamma [H]
     * @param eps as in forward
     * @param g gradient of the output [N, H]
     * @param dx [N, H], filled
     * @param dgamma [H], added to, or {@link TorchKernels#nothing}
     */
    public static void rmsNormBackward(
            NDArray x, NDArray gamma, double eps, NDArray g, NDArray dx, NDArray dgamma) {
        KERNELS.run("rms_norm_rows_backward", x, gamma, eps, g, dx, dgamma);
    }

    /**
     * {@link #rmsNorm} that autograd can follow.
     *
     * @param x [N, H]
     * @param gamma [H]
     * @param eps keeps the root away from zero
     * @return [N, H]
     */
    public static NDArray rmsNormPlain(NDArray x, NDArray gamma, double eps) {
        NDManager manager = x.getManager();
        try (NDArray number = manager.create(eps)) {
            return KERNELS.record(manager, "rms_norm_plain", x, gamma, number).head();
        }
    }

    /**
     * Rows of an embedding.
     *
     * @param ids INT64, any shape of N elements
     * @param weight [V, H]
     * @param y [N, H], filled
     */
    public static void embed(NDArray ids, NDArray weight, NDArray y) {
        KERNELS.run("embed_rows", ids, weight, y);
    }

    /**
     * Backward of {@link #embed}; repeated ids add up.
     *
     * @param ids INT64, any shape of N elements
     * @param g gradient of the rows [N, H]
     * @param dweight [V, H], added to
     */
    public static void embedBackward(NDArray ids, NDArray g, NDArray dweight) {
        KERNELS.run("embed_backward", ids, g, dweight);
    }

    /**
     * {@link #embed} that autograd can follow.
     *
     * @param ids INT64, any shape of N elements
     * @param weight [V, H]
     * @return [N, H]
     */
    public static NDArray embedPlain(NDArray ids, NDArray weight) {
        return KERNELS.record(ids.getManager(), "embed", ids, weight).head();
    }
}
