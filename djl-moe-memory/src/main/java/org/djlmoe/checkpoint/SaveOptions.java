package org.djlmoe.checkpoint;

import java.util.Objects;
import org.djlmoe.io.DType;

/**
 * How {@link HfCheckpoint#save} writes.
 *
 * @param layout how experts lie on disk
 * @param dtype element type of every tensor but balancing biases, which are F32: F32, F16 or BF16
 * @param maxShardBytes largest data size of one file
 */
public record SaveOptions(Layout layout, DType dtype, long maxShardBytes) {

    /** Checks the options. */
    public SaveOptions {
        Objects.requireNonNull(layout, "layout");
        Objects.requireNonNull(dtype, "dtype");
        if (!dtype.isWritableFromF32()) {
            throw new IllegalArgumentException(
                    "Weights are saved as F32, F16 or BF16, not as " + dtype);
        }
        if (maxShardBytes <= 0) {
            throw new IllegalArgumentException(
                    "maxShardBytes must be positive, not " + maxShardBytes);
        }
    }

    /**
     * Creates a builder.
     *
     * @return a builder with the defaults
     */
    public static Builder builder() {
        return new Builder();
    }

    /** PyTorch's word for the element type, as it stands in {@code config.json}. */
    String torchDtype() {
        return switch (dtype) {
            case F16 -> "float16";
            case BF16 -> "bfloat16";
            default -> "float32";
        };
    }

    /** Builds {@link SaveOptions}. */
    public static final class Builder {

        private Layout layout = Layout.MIXTRAL;
        private DType dtype = DType.F32;
        private long maxShardBytes = 5_000_000_000L;

        private Builder() {}

        /**
         * Sets how experts lie on disk.
         *
         * @param value the layout; default {@link Layout#MIXTRAL}
         * @return this builder
         */
        public Builder optLayout(Layout value) {
            layout = value;
            return this;
        }

        /**
         * Sets the element type. F16 turns weights beyond 65504 into infinities, as PyTorch does.
         *
         * @param value F32 (default, exact), F16 or BF16
         * @return this builder
         */
        public Builder optDtype(DType value) {
            dtype = value;
            return this;
        }

        /**
         * Sets the largest size of a file.
         *
         * @param value bytes of tensor data; default 5 GB (10^9 bytes)
         * @return this builder
         */
        public Builder optMaxShardBytes(long value) {
            maxShardBytes = value;
            return this;
        }

        /**
         * Checks the options.
         *
         * @return the options
         */
        public SaveOptions build() {
            return new SaveOptions(layout, dtype, maxShardBytes);
        }
    }
}
