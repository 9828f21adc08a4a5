package org.djlmoe.examples.bench;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import java.util.Map;
import java.util.TreeMap;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class PeakFitTest {

    @ParameterizedTest
    @CsvSource({"0, 3e8", "4e6, 2.5e8", "1e9, 1", "-2e6, 1e8"})
    void of_peaksOnALine_findsTheLine(double a, double b) {
        Map<Integer, Double> peaks = new TreeMap<>();
        for (int k : new int[] {1, 2, 5, 10, 20}) {
            peaks.put(k, a + b / k);
        }
        PeakFit fit = PeakFit.of(peaks);
        assertEquals(a, fit.fixed(), 1e-9 * (Math.abs(a) + b));
        assertEquals(b, fit.divided(), 1e-9 * (Math.abs(a) + b));
        assertEquals(a / (a + b), fit.fixedShare(), 1e-9);
    }

    @Test
    void of_onePeakOrNoneOfOneChunk_isRefused() {
        assertThrows(IllegalArgumentException.class, () -> PeakFit.of(Map.of(1, 5.0)));
        assertThrows(IllegalArgumentException.class, () -> PeakFit.of(Map.of(2, 5.0, 4, 3.0)));
    }
}
