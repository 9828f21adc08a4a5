package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;

/**
 * BF16 tensors, for weights that do not train. Every one of them is made here, and only here may
 * anything ask whether an array is one.
 *
 * <p>DJL knows no BF16: such an array's {@code getDataType()} is {@code UNKNOWN}, and {@code
 * toType}, {@code zerosLike}, {@code toString} or a copy to another device end in an error or end
 * the process. It may be held, closed, duplicated, sliced and passed to kernels; other types come
 * from {@link #widen}.
 *
 * <p>Narrowing rounds to 8 bits of precision, ties to even, and keeps F32's range. Widening is
 * exact, so a weight that was BF16 in its file goes through both unchanged.
 */
public final class HalfArrays {

    private static final TorchKernels KERNELS = TorchKernels.load(HalfArrays.class, "arrays.py");

    private HalfArrays() {}

    /**
     * Returns whether an array is BF16.
     *
     * @param array any array of the PyTorch engine
     * @return true if it is
     */
    public static boolean isHalf(NDArray array) {
        return KERNELS.callBoolean("is_half", array);
    }

    /**
     * Makes a BF16 array of zeros.
     *
     * @param manager its owner
     * @param shape its shape
     * @return the array
     */
    public static NDArray zeros(NDManager manager, Shape shape) {
        try (NDArray zero = manager.zeros(new Shape(1));
                NDArray like = zero.broadcast(shape)) {
            return KERNELS.record(manager, "half_zeros", like).head();
        }
    }

    /**
     * Rounds an F32 array.
     *
     * @param manager the owner of the result
     * @param array F32
     * @return BF16 of the same shape
     */
    public static NDArray narrow(NDManager manager, NDArray array) {
        return convert(manager, "narrowed", array);
    }

    /**
     * Widens a BF16 array, exactly.
     *
     * @param manager the owner of the result
     * @param array BF16
     * @return F32 of the same shape
     */
    public static NDArray widen(NDManager manager, NDArray array) {
        return convert(manager, "widened", array);
    }

    private static NDArray convert(NDManager manager, String kernel, NDArray array) {
        // Recorded, so that autograd may save the result; detached, so that it is a leaf.
        try (NDArray detached = array.stopGradient()) {
            return KERNELS.record(manager, kernel, detached).head();
        }
    }

    /**
     * Returns whether narrowing and widening an array gives it back.
     *
     * @param array F32
     * @return true if every value is one of BF16
     */
    public static boolean isExact(NDArray array) {
        return KERNELS.callBoolean("survives_narrowing", array);
    }

    /**
     * Replaces elements, rounding them.
     *
     * @param flat BF16 [n], changed in place
     * @param offset the first element
     * @param values F32, one-dimensional
     */
    public static void put(NDArray flat, long offset, NDArray values) {
        KERNELS.run("put", flat, offset, values);
    }

    /**
     * Copies an array of the same shape and type over another.
     *
     * @param array changed in place
     * @param values what it becomes
     */
    public static void copy(NDArray array, NDArray values) {
        KERNELS.run("replace", array, values);
    }
}
