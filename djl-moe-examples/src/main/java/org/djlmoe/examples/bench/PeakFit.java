package org.djlmoe.examples.bench;

import java.io.PrintWriter;
import java.util.LinkedHashMap;
import java.util.Locale;
import java.util.Map;

/**
 * The line {@code peak = a + b / K} through peaks at several numbers of chunks K, by least squares:
 * b is what chunks divide, a what they leave.
 *
 * @param peaks peak in bytes by K
 * @param fixed a, bytes
 * @param divided b, bytes
 */
public record PeakFit(Map<Integer, Double> peaks, double fixed, double divided) {

    private static final double MB = 1 << 20;

    /**
     * Fits the line.
     *
     * @param peaks peak in bytes by K, for one chunk and at least one more number
     * @return the line
     */
    public static PeakFit of(Map<Integer, Double> peaks) {
        if (peaks.size() < 2 || !peaks.containsKey(1)) {
            throw new IllegalArgumentException(
                    "A fit needs the peak of one chunk and of another number, not of "
                            + peaks.keySet());
        }
        double meanX = peaks.keySet().stream().mapToDouble(k -> 1.0 / k).average().orElseThrow();
        double meanY = peaks.values().stream().mapToDouble(peak -> peak).average().orElseThrow();
        double xy = 0;
        double xx = 0;
        for (Map.Entry<Integer, Double> point : peaks.entrySet()) {
            double x = 1.0 / point.getKey() - meanX;
            xy += x * (point.getValue() - meanY);
            xx += x * x;
        }
        double slope = xy / xx;
        return new PeakFit(new LinkedHashMap<>(peaks), meanY - slope * meanX, slope);
    }

    /**
     * Returns a as a share of the peak of one chunk.
     *
     * @return the share, negative if a is
     */
    public double fixedShare() {
        return fixed / peaks.get(1);
    }

    /**
     * Returns the figures in the form of the JSON.
     *
     * @return {@code {a_mb, b_mb, a_share, peaks: [{chunks, peak_mb}]}}
     */
    public Map<String, Object> json() {
        Map<String, Object> json = new LinkedHashMap<>();
        json.put("a_mb", fixed / MB);
        json.put("b_mb", divided / MB);
        json.put("a_share", fixedShare());
        json.put(
                "peaks",
                peaks.entrySet().stream()
                        .map(p -> Map.of("chunks", p.getKey(), "peak_mb", p.getValue() / MB))
                        .toList());
        return json;
    }

    /**
     * Prints the figures.
     *
     * @param out where to
     */
    public void print(PrintWriter out) {
        peaks.forEach(
                (chunks, peak) ->
                        out.printf(Locale.ROOT, "K = %-3d peak %10.1f MB%n", chunks, peak / MB));
        out.printf(
                Locale.ROOT,
                "peak = %.1f + %.1f / K MB: %.1f%% of the peak of one chunk is left by any number%n",
                fixed / MB,
                divided / MB,
                100 * fixedShare());
    }
}
