package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertEquals;

import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.DoubleRange;
import org.junit.jupiter.api.Test;

class ClippingTest {

    /** Clip, then divide, as the update does; or rescale, clip and scale, as it is described. */
    @Property
    void limitAndDivisor_anyGradient_equalTheOperationsAsDescribed(
            @ForAll @DoubleRange(min = -100, max = 100) double gradient,
            @ForAll @DoubleRange(min = 0.01, max = 10) double size,
            @ForAll boolean negative,
            @ForAll @DoubleRange(min = 0.01, max = 10) double value,
            @ForAll @DoubleRange(min = 0.01, max = 10) double norm) {
        double rescale = negative ? -size : size;
        Clipping clipping = new Clipping(rescale, value, norm);

        double clipped = Math.max(-value, Math.min(value, gradient * rescale));
        double expected = clipped * Math.min(1, norm / (Math.abs(clipped) + 1e-6));

        double limit = clipping.limit();
        double limited = Math.max(-limit, Math.min(limit, gradient));
        assertEquals(expected, limited / clipping.divisor(Math.abs(clipped)), 1e-12 * value);
    }

    @Test
    void limitAndDivisor_nothingToClip_onlyRescale() {
        Clipping clipping = new Clipping(0.5, 0, 0);

        assertEquals(0, clipping.limit());
        assertEquals(2, clipping.divisor(Double.NaN));
    }
}
