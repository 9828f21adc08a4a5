package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.List;
import org.djlmoe.kernel.KernelException;
import org.djlmoe.kernel.TorchKernels;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** The passes over weights, gradients and state, in one of two forms of the update rule. */
final class AdamWKernels {

    /** Elements that are widened to 64 bits at a time when squares are summed: 1 MB. */
    private static final long CHUNK = 1L << 17;

    /** PyTorch's number for bfloat16. */
    private static final double BF16 = 15;

    private final TorchKernels kernels;

    private AdamWKernels(String rule) {
        kernels = TorchKernels.load(AdamWKernels.class, "adamw.py", rule);
    }

    /** One pass over memory for the whole update. */
    static AdamWKernels fused() {
        return new AdamWKernels("adamw_fused.py");
    }

    /** Plain in-place operations; needs one temporary array as large as a slab. */
    static AdamWKernels plain() {
        return new AdamWKernels("adamw_plain.py");
    }

    /** The fused form where this build of PyTorch has it, else the plain one. */
    static AdamWKernels best() {
        return Best.KERNELS;
    }

    private static final class Best {

        static final AdamWKernels KERNELS = choose();

        private static AdamWKernels choose() {
            try {
                AdamWKernels fused = fused();
                fused.tryOut();
                return fused;
            } catch (KernelException e) {
                Logger logger = LoggerFactory.getLogger(OffloadStreamAdamW.class);
                logger.warn("No fused AdamW in this build of PyTorch, using plain operations", e);
                return plain();
            }
        }
    }

    private void tryOut() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            long[] zero = {0};
            long[] one = {1};
            Slabs slabs =
                    new Slabs(
                            List.of(manager.ones(new Shape(1))),
                            List.of(manager.ones(new Shape(1))),
                            zero,
                            zero,
                            one,
                            one);
            State state = new State(manager.ones(new Shape(2)), 1, false);
            Rule rule = new Rule(0, 0.9, 0.999, 1e-8, 0, 0, 2);
            update(slabs, state, TorchKernels.nothing(), rule, false);
        }
    }

    /**
     * Slabs of one bucket, entry by entry: the whole weight and gradient, the first element in
     * them, the first in the bucket, the number of elements, and the number of this update.
     */
    record Slabs(
            List<NDArray> weights,
            List<NDArray> gradients,
            long[] start,
            long[] offset,
            long[] length,
            long[] step) {}

    /**
     * The state of one bucket in a row, F32: exp_avg, exp_avg_sq and, where weights are of half
     * precision, their masters, each of {@code elements}.
     */
    record State(NDArray array, long elements, boolean master) {}

    /**
     * The numbers of an update. A gradient is first clipped to [-limit, limit], if limit is above
     * 0, then divided by divisor; both may change it in place.
     */
    record Rule(
            double learningRate,
            double beta1,
            double beta2,
            double epsilon,
            double decay,
            double limit,
            double divisor) {}

    /**
     * Updates slabs.
     *
     * @param scratch F32, as long as the bucket if a gradient is of half precision
     * @param clear whether to set gradients, which must be contiguous, to zero
     */
    void update(Slabs slabs, State state, NDArray scratch, Rule rule, boolean clear) {
        kernels.run(
                "update",
                slabs.weights,
                slabs.gradients,
                state.array,
                state.elements,
                state.master,
                scratch,
                slabs.start,
                slabs.offset,
                slabs.length,
                slabs.step,
                rule.learningRate,
                rule.beta1,
                rule.beta2,
                rule.epsilon,
                rule.decay,
                rule.limit,
                rule.divisor,
                clear);
    }

    /** Multiplies weights by a factor and leaves their running means. */
    void shrink(Slabs slabs, State state, double factor) {
        kernels.run(
                "shrink",
                slabs.weights,
                state.array,
                state.elements,
                state.master,
                slabs.start,
                slabs.offset,
                slabs.length,
                factor);
    }

    /** Copies elements [first, last) of each part of a bucket's state. */
    void move(NDArray target, State source, long first, long last) {
        kernels.run(
                "move", target, source.array, source.elements, source.master ? 3 : 2, first, last);
    }

    /** A type of elements that a weight or a gradient may have. */
    enum Precision {
        F32,
        HALF,
        OTHER
    }

    /** Tells BF16 as well, which DJL does not know here. */
    Precision precision(NDArray array) {
        switch (array.getDataType()) {
            case FLOAT32:
                return Precision.F32;
            case FLOAT16:
            case BFLOAT16:
                return Precision.HALF;
            case UNKNOWN:
                return kernels.callDouble("type_code", array) == BF16
                        ? Precision.HALF
                        : Precision.OTHER;
            default:
                return Precision.OTHER;
        }
    }

    /**
     * Adds up the squares of the elements, clipped to [-limit, limit] if limit is above 0. In 64
     * bits, so that it is finite exactly if all (unclipped) elements are.
     */
    double sumOfSquares(NDArray gradient, double limit) {
        return kernels.callDouble("sum_of_squares", gradient, limit, CHUNK);
    }

    boolean isZero(NDArray array) {
        return kernels.callBoolean("is_zero", array);
    }

    boolean areContiguous(List<NDArray> arrays) {
        return kernels.callBoolean("are_contiguous", arrays);
    }

    void zero(List<NDArray> arrays) {
        kernels.run("zero", arrays);
    }

    void copy(NDArray target, long targetStart, NDArray source, long sourceStart, long length) {
        kernels.run("copy", target, targetStart, source, sourceStart, length);
    }
}
