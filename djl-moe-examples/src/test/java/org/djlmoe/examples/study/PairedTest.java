package org.djlmoe.examples.study;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import org.junit.jupiter.api.Test;

class PairedTest {

    @Test
    void spread_values_meanAndSampleDeviation() {
        Spread spread = Spread.of(2, 4, 4, 4, 5, 5, 7, 9);
        assertEquals(5, spread.mean());
        assertEquals(Math.sqrt(32.0 / 7), spread.deviation(), 1e-12);
        assertEquals("5.000 ± 2.138", spread.toString());
    }

    @Test
    void spread_oneValue_noDeviation() {
        assertEquals(new Spread(3, 0, 1), Spread.of(3));
        assertEquals("3.000", Spread.of(3).toString());
        assertThrows(IllegalArgumentException.class, Spread::of);
    }

    /** Seeds differ by far more than the arms do; only pairs can show it. */
    @Test
    void of_seedsThatDifferMoreThanArms_comparedSeedBySeed() {
        Paired pair = Paired.of(new double[] {9, 99, 10}, new double[] {10, 100, 10});
        assertEquals(2, pair.wins());
        assertEquals(3, pair.seeds());
        assertEquals(-2.0 / 3, pair.difference().mean(), 1e-12);
        assertEquals((-0.1 - 0.01) / 3, pair.relative().mean(), 1e-12);
    }

    @Test
    void of_unequalNumbers_refused() {
        assertThrows(
                IllegalArgumentException.class,
                () -> Paired.of(new double[] {1}, new double[] {1, 2}));
        assertThrows(IllegalArgumentException.class, () -> Paired.of(new double[0], new double[0]));
    }

    @Test
    void percent_oneSeed_claimsNoDeviation() {
        assertEquals("-10.0 %", Paired.of(new double[] {9}, new double[] {10}).percent());
        assertEquals(
                "-15.0 % ± 7.1", Paired.of(new double[] {9, 8}, new double[] {10, 10}).percent());
    }
}
