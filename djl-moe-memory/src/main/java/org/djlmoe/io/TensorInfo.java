package org.djlmoe.io;

import java.util.Arrays;
import java.util.Objects;

/**
 * What a safetensors header says about one tensor.
 *
 * @param name the tensor's name
 * @param dtype its element type
 * @param shape its axes, outermost first; empty for a scalar
 * @param begin offset of its first byte within the data section
 * @param end offset after its last byte within the data section
 */
public record TensorInfo(String name, DType dtype, long[] shape, long begin, long end) {

    /** Copies the shape, so that the value stays immutable. */
    public TensorInfo {
        Objects.requireNonNull(name, "name");
        Objects.requireNonNull(dtype, "dtype");
        shape = shape.clone();
    }

    /**
     * Returns the axes.
     *
     * @return a copy of the shape
     */
    @Override
    public long[] shape() {
        return shape.clone();
    }

    /**
     * Returns the number of elements.
     *
     * @return the product of the axes, 1 for a scalar
     */
    public long elements() {
        return elementCount(shape);
    }

    /**
     * Returns the size of the tensor.
     *
     * @return bytes in the data section
     */
    public long byteSize() {
        return end - begin;
    }

    /**
     * Multiplies the axes of a shape.
     *
     * @param shape the axes
     * @return the number of elements
     * @throws ArithmeticException if it does not fit into 63 bits
     */
    static long elementCount(long[] shape) {
        // An axis of zero wins over any overflow among the others.
        for (long axis : shape) {
            if (axis == 0) {
                return 0;
            }
        }
        long count = 1;
        for (long axis : shape) {
            count = Math.multiplyExact(count, axis);
        }
        return count;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof TensorInfo o
                && name.equals(o.name)
                && dtype == o.dtype
                && Arrays.equals(shape, o.shape)
                && begin == o.begin
                && end == o.end;
    }

    @Override
    public int hashCode() {
        return Objects.hash(name, dtype, Arrays.hashCode(shape), begin, end);
    }

    @Override
    public String toString() {
        return name + " " + dtype + Arrays.toString(shape) + " bytes " + begin + ".." + end;
    }
}
