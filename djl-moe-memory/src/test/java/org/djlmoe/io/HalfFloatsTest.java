package org.djlmoe.io;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import org.junit.jupiter.api.Test;

class HalfFloatsTest {

    /** Exact in double: the unit in the last place is a power of two, rint rounds ties to even. */
    private static double nearest(float value, int minExponent, int mantissaBits, double max) {
        if (value == 0 || Float.isNaN(value) || Float.isInfinite(value)) {
            return value;
        }
        int exponent = Math.max(Math.getExponent((double) value), minExponent);
        double unit = Math.scalb(1.0, exponent - mantissaBits);
        double rounded = Math.rint(value / unit) * unit;
        return Math.abs(rounded) > max ? Math.copySign(Double.POSITIVE_INFINITY, value) : rounded;
    }

    private static double nearestF16(float value) {
        return nearest(value, -14, 10, 65504);
    }

    private static double nearestBf16(float value) {
        return nearest(value, -126, 7, 0x1.fep127);
    }

    private static double definitionOfF16(int bits) {
        int exponent = bits >>> 10 & 31;
        int mantissa = bits & 1023;
        double magnitude =
                exponent == 0
                        ? mantissa * 0x1p-24
                        : exponent == 31
                                ? (mantissa == 0 ? Double.POSITIVE_INFINITY : Double.NaN)
                                : (1 + mantissa / 1024.0) * Math.scalb(1.0, exponent - 15);
        return (bits & 0x8000) == 0 ? magnitude : -magnitude;
    }

    private static void assertSame(double expected, float actual, String what) {
        assertEquals(expected, actual, what);
        assertEquals(1 / expected, 1.0 / actual, what + " sign of zero");
    }

    @Test
    void f16ToFloat_everyPattern_isValueByDefinition() {
        for (int bits = 0; bits < 1 << 16; bits++) {
            assertSame(definitionOfF16(bits), HalfFloats.f16ToFloat((short) bits), "bits " + bits);
        }
    }

    @Test
    void bf16ToFloat_everyPattern_isUpperHalfOfFloat() {
        for (int bits = 0; bits < 1 << 16; bits++) {
            int wide = Float.floatToRawIntBits(HalfFloats.bf16ToFloat((short) bits));
            assertEquals(bits << 16, wide, "bits " + bits);
        }
    }

    @Test
    void narrow_afterWiden_givesEveryPatternBack() {
        for (int bits = 0; bits < 1 << 16; bits++) {
            short half = (short) bits;
            boolean f16Nan = (bits & 0x7c00) == 0x7c00 && (bits & 0x3ff) != 0;
            short f16 = HalfFloats.floatToF16(HalfFloats.f16ToFloat(half));
            assertEquals(f16Nan ? (short) (bits | 0x200) : half, f16, "f16 " + bits);
            boolean bf16Nan = (bits & 0x7f80) == 0x7f80 && (bits & 0x7f) != 0;
            short bf16 = HalfFloats.floatToBf16(HalfFloats.bf16ToFloat(half));
            assertEquals(bf16Nan ? (short) (bits | 0x40) : half, bf16, "bf16 " + bits);
        }
    }

    /** Ties and their neighbours between every two adjacent values: where rounding goes wrong. */
    @Test
    void floatToF16_aroundEveryMidpoint_roundsToNearestEven() {
        for (int bits = 0; bits < 0x7c00; bits++) {
            double low = definitionOfF16(bits);
            double high = bits == 0x7bff ? 65536 : definitionOfF16(bits + 1);
            float middle = (float) ((low + high) / 2);
            for (float value : new float[] {Math.nextDown(middle), middle, Math.nextUp(middle)}) {
                for (float signed : new float[] {value, -value}) {
                    float back = HalfFloats.f16ToFloat(HalfFloats.floatToF16(signed));
                    assertSame(nearestF16(signed), back, "value " + signed);
                }
            }
        }
    }

    @Test
    void floatToBf16_aroundEveryMidpoint_roundsToNearestEven() {
        for (int bits = 0; bits < 0x7f80; bits++) {
            float middle = Float.intBitsToFloat(bits << 16 | 0x8000);
            for (float value : new float[] {Math.nextDown(middle), middle, Math.nextUp(middle)}) {
                for (float signed : new float[] {value, -value}) {
                    float back = HalfFloats.bf16ToFloat(HalfFloats.floatToBf16(signed));
                    assertSame(nearestBf16(signed), back, "value " + signed);
                }
            }
        }
    }

    @Property(tries = 20_000)
    void narrow_anyFloat_isNearestEven(@ForAll int bits) {
        float value = Float.intBitsToFloat(bits);
        float f16 = HalfFloats.f16ToFloat(HalfFloats.floatToF16(value));
        float bf16 = HalfFloats.bf16ToFloat(HalfFloats.floatToBf16(value));
        if (Float.isNaN(value)) {
            assertTrue(Float.isNaN(f16) && Float.isNaN(bf16));
        } else {
            assertSame(nearestF16(value), f16, "f16 of " + value);
            assertSame(nearestBf16(value), bf16, "bf16 of " + value);
        }
    }

    @Test
    void narrow_edges_matchIeee() {
        assertEquals((short) 0x7bff, HalfFloats.floatToF16(65519.996f));
        assertEquals((short) 0x7c00, HalfFloats.floatToF16(65520f));
        assertEquals((short) 0xfc00, HalfFloats.floatToF16(Float.NEGATIVE_INFINITY));
        assertEquals((short) 0x0000, HalfFloats.floatToF16(0x1p-25f));
        assertEquals((short) 0x0001, HalfFloats.floatToF16(Math.nextUp(0x1p-25f)));
        assertEquals((short) 0x8000, HalfFloats.floatToF16(-0f));
        assertEquals((short) 0x7f80, HalfFloats.floatToBf16(Float.MAX_VALUE));
        assertEquals((short) 0x0001, HalfFloats.floatToBf16(Float.intBitsToFloat(0x8001)));
        // The payload sits in the lower half alone: dropping it must not turn NaN into infinity.
        assertTrue(
                Float.isNaN(
                        HalfFloats.bf16ToFloat(
                                HalfFloats.floatToBf16(Float.intBitsToFloat(0x7f800001)))));
        assertTrue(
                Float.isNaN(
                        HalfFloats.f16ToFloat(
                                HalfFloats.floatToF16(Float.intBitsToFloat(0x7f800001)))));
    }
}
