package org.djlmoe.io;

import java.nio.FloatBuffer;
import java.nio.ShortBuffer;

/**
 * Conversions between F32 and the two 16-bit floating-point types, by bits.
 *
 * <p>Widening is exact. Narrowing rounds to the nearest value, ties to the even one, as IEEE 754
 * and PyTorch do: what exceeds the range becomes infinite, what is too small becomes a subnormal or
 * a signed zero. A NaN stays a NaN with its sign and upper payload bits, made quiet; so every value
 * other than a signalling NaN survives the way to F32 and back bit for bit.
 */
public final class HalfFloats {

    private static final int F32_INFINITY = 0x7f800000;

    private HalfFloats() {}

    /**
     * Widens a BF16 value.
     *
     * @param bits the 16 bits
     * @return the same value
     */
    public static float bf16ToFloat(short bits) {
        return Float.intBitsToFloat(bits << 16);
    }

    /**
     * Narrows to BF16.
     *
     * @param value any value
     * @return the 16 bits of the nearest BF16
     */
    public static short floatToBf16(float value) {
        int bits = Float.floatToRawIntBits(value);
        if ((bits & 0x7fffffff) > F32_INFINITY) {
            return (short) ((bits >>> 16) | 0x0040);
        }
        // Adding half a unit, less one where the kept part is even, rounds ties to even; a carry
        // out of the mantissa raises the exponent, up to infinity.
        return (short) ((bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16);
    }

    /**
     * Widens an IEEE half.
     *
     * @param bits the 16 bits
     * @return the same value
     */
    public static float f16ToFloat(short bits) {
        int sign = (bits & 0x8000) << 16;
        int exponent = (bits >>> 10) & 0x1f;
        int mantissa = bits & 0x3ff;
        if (exponent == 0) {
            // Zero or subnormal: a multiple of 2^-24, exact in F32.
            int magnitude = Float.floatToRawIntBits(mantissa * 0x1p-24f);
            return Float.intBitsToFloat(sign | magnitude);
        }
        if (exponent == 0x1f) {
            return Float.intBitsToFloat(sign | F32_INFINITY | mantissa << 13);
        }
        return Float.intBitsToFloat(sign | (exponent + 127 - 15) << 23 | mantissa << 13);
    }

    /**
     * Narrows to an IEEE half.
     *
     * @param value any value
     * @return the 16 bits of the nearest half
     */
    public static short floatToF16(float value) {
        int bits = Float.floatToRawIntBits(value);
        int sign = (bits >>> 16) & 0x8000;
        int magnitude = bits & 0x7fffffff;
        if (magnitude > F32_INFINITY) {
            return (short) (sign | 0x7e00 | (magnitude >>> 13) & 0x3ff);
        }
        if (magnitude >= 0x477ff000) {
            // From 65520 on, half way between the largest half and the next power of two.
            return (short) (sign | 0x7c00);
        }
        if (magnitude >= 0x38800000) {
            int rebased = magnitude - (127 - 15 << 23);
            return (short) (sign | (rebased + 0xfff + ((rebased >>> 13) & 1)) >>> 13);
        }
        // Below 2^-14 the unit is 2^-24, which is the unit of F32 in [0.5, 1): let the adder round.
        float aligned = Float.intBitsToFloat(magnitude) + 0.5f;
        return (short) (sign | Float.floatToRawIntBits(aligned) - Float.floatToRawIntBits(0.5f));
    }

    /** Widens what remains in {@code source} into {@code target}; both positions advance. */
    static void widen(DType dtype, ShortBuffer source, FloatBuffer target) {
        if (dtype == DType.BF16) {
            while (source.hasRemaining()) {
                target.put(bf16ToFloat(source.get()));
            }
        } else {
            while (source.hasRemaining()) {
                target.put(f16ToFloat(source.get()));
            }
        }
    }

    /** Narrows as many values as {@code target} has room for; both positions advance. */
    static void narrow(DType dtype, FloatBuffer source, ShortBuffer target) {
        if (dtype == DType.BF16) {
            while (target.hasRemaining()) {
                target.put(floatToBf16(source.get()));
            }
        } else {
            while (target.hasRemaining()) {
                target.put(floatToF16(source.get()));
            }
        }
    }
}
