package org.djlmoe.io;

/**
 * Element types of the safetensors format whose elements are whole bytes.
 *
 * <p>The four floating-point types {@link #F16}, {@link #BF16}, {@link #F32} and {@link #F64} can
 * be read as F32; the others only as bytes. The packed types of the newest revision (F4, F6) have
 * no whole number of bytes and are refused as unknown.
 */
public enum DType {
    /** Truth value, one byte. */
    BOOL(1),
    /** Unsigned 8-bit integer. */
    U8(1),
    /** Signed 8-bit integer. */
    I8(1),
    /** 8-bit float, 5 exponent bits. */
    F8_E5M2(1),
    /** 8-bit float, 4 exponent bits. */
    F8_E4M3(1),
    /** 8-bit scale, exponent only. */
    F8_E8M0(1),
    /** Signed 16-bit integer. */
    I16(2),
    /** Unsigned 16-bit integer. */
    U16(2),
    /** IEEE half precision. */
    F16(2),
    /** The upper half of an IEEE single. */
    BF16(2),
    /** Signed 32-bit integer. */
    I32(4),
    /** Unsigned 32-bit integer. */
    U32(4),
    /** IEEE single precision. */
    F32(4),
    /** Complex number of two IEEE singles. */
    C64(8),
    /** IEEE double precision. */
    F64(8),
    /** Signed 64-bit integer. */
    I64(8),
    /** Unsigned 64-bit integer. */
    U64(8);

    private final int bytes;

    DType(int bytes) {
        this.bytes = bytes;
    }

    /**
     * Returns the size of one element.
     *
     * @return bytes per element
     */
    public int bytes() {
        return bytes;
    }

    /**
     * Tells whether {@link SafetensorsReader#readF32} understands this type.
     *
     * @return true for F16, BF16, F32 and F64
     */
    public boolean isReadableAsF32() {
        return this == F16 || this == BF16 || this == F32 || this == F64;
    }

    /**
     * Tells whether {@link SafetensorsWriter#writeF32} can narrow to this type.
     *
     * @return true for F16, BF16 and F32
     */
    public boolean isWritableFromF32() {
        return this == F16 || this == BF16 || this == F32;
    }
}
