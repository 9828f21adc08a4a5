package org.djlmoe.examples.study;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.util.List;
import java.util.OptionalDouble;
import org.djlmoe.examples.study.Curve.Spot;
import org.junit.jupiter.api.Test;

class CurveTest {

    private static Curve curve(double... loadsAndPerplexities) {
        java.util.ArrayList<Spot> spots = new java.util.ArrayList<>();
        for (int i = 0; i < loadsAndPerplexities.length; i += 2) {
            spots.add(new Spot(loadsAndPerplexities[i], loadsAndPerplexities[i + 1]));
        }
        return new Curve(spots);
    }

    private static void assertAt(double expected, OptionalDouble found) {
        assertEquals(expected, found.orElseThrow(), 1e-12);
    }

    @Test
    void perplexityAt_betweenStrengths_straight() {
        Curve curve = curve(3, 4.0, 2, 4.4);
        assertAt(4.1, curve.perplexityAt(2.75));
        assertAt(4.0, curve.perplexityAt(3));
        assertAt(4.4, curve.perplexityAt(2));
    }

    @Test
    void perplexityAt_moreLoadsThanAnyPoint_theLowestPerplexity() {
        assertAt(4.0, curve(3, 4.0, 2, 4.4).perplexityAt(9));
    }

    @Test
    void perplexityAt_fewerLoadsThanAnyPoint_nothing() {
        assertEquals(OptionalDouble.empty(), curve(3, 4.0, 2, 4.4).perplexityAt(1.9));
    }

    /** Perplexity falls first as the prior grows: loads at the first point's are bettered. */
    @Test
    void perplexityAt_notMonotone_theBestOfAllStretches() {
        Curve curve = curve(3, 4.3, 2, 4.1, 1, 4.5);
        assertAt(4.1, curve.perplexityAt(3));
        assertAt(4.3, curve.perplexityAt(1.5));
        assertAt(1.5, curve.loadsAt(4.3));
        assertAt(1.75, curve.loadsAt(4.2));
    }

    @Test
    void loadsAt_lowerThanAnyPerplexity_nothing() {
        Curve curve = curve(3, 4.3, 2, 4.1);
        assertEquals(OptionalDouble.empty(), curve.loadsAt(4.09));
        assertAt(2, curve.loadsAt(4.1));
    }

    @Test
    void loadsAt_onePoint_itselfOrNothing() {
        assertAt(3, curve(3, 4).loadsAt(4));
        assertEquals(OptionalDouble.empty(), curve(3, 4).loadsAt(3.9));
        assertThrows(IllegalArgumentException.class, () -> new Curve(List.of()));
    }
}
