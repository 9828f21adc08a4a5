package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.List;
import java.util.function.ToLongFunction;
import org.djlmoe.kernel.KernelException;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.optimizer.BucketState.Part;
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

    /** Plain in-place operations; needs one temporary array as large as a run. */
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
            NDArray weight = manager.ones(new Shape(1));
            NDArray gradient = manager.ones(new Shape(1));
            BucketState state = new BucketState(manager.ones(new Shape(2)), 1, false);
            Rule rule = new Rule(0, 0.9, 0.999, 1e-8, 0, 0, 2);
            List<Run> runs = List.of(new Run(weight, gradient, 0, 0, 1, 1));
            update(runs, state, TorchKernels.nothing(), rule, false);
        }
    }

    /**
     * Elements of one parameter that are updated at once.
     *
     * @param weight the whole weight
     * @param gradient the whole gradient
     * @param start the first element, counted in the flattened weight
     * @param offset where its state lies in each part of the bucket
     * @param length the number of elements
     * @param step which of its updates this is
     */
    record Run(NDArray weight, NDArray gradient, long start, long offset, long length, long step) {}

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
     * Updates runs of one bucket.
     *
     * @param scratch F32, as long as the longest run if a gradient is of half precision
     * @param clear whether to set gradients, which must be contiguous, to zero
     */
    void update(List<Run> runs, BucketState state, NDArray scratch, Rule rule, boolean clear) {
        kernels.run(
                "update",
                weights(runs),
                runs.stream().map(Run::gradient).toList(),
                state.array(),
                state.elements(),
                state.master(),
                scratch,
                each(runs, Run::start),
                each(runs, Run::offset),
                each(runs, Run::length),
                each(runs, Run::step),
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
    void shrink(List<Run> runs, BucketState state, double factor) {
        kernels.run(
                "shrink",
                weights(runs),
                state.array(),
                state.elements(),
                state.master(),
                each(runs, Run::start),
                each(runs, Run::offset),
                each(runs, Run::length),
                factor);
    }

    private static List<NDArray> weights(List<Run> runs) {
        return runs.stream().map(Run::weight).toList();
    }

    private static long[] each(List<Run> runs, ToLongFunction<Run> number) {
        return runs.stream().mapToLong(number).toArray();
    }

    /** Copies elements [first, last) of each part of a bucket's state. */
    void move(NDArray target, BucketState source, long first, long last) {
        int parts = Part.of(source.master()).size();
        kernels.run("move", target, source.array(), source.elements(), parts, first, last);
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

    boolean isHalf(NDArray array) {
        return precision(array) == Precision.HALF;
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
