package org.djlmoe.examples.bench;

import java.io.PrintWriter;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;

/**
 * The figures of a benchmark. As JSON: {@code {bench, settings, cases: [{name, seconds, turns,
 * peak_mb, loss_rel_error, grad_rel_error}], ratios: {time, peak}}}, where ratios may have further
 * times of a case over another's.
 *
 * @param bench the benchmark's name
 * @param settings the shape of the problem; {@code ours} and {@code baseline} name cases, {@code
 *     pairs} is a list of further {@code CASE/CASE} whose times are compared
 * @param cases one entry a case
 */
public record BenchReport(String bench, Map<String, Object> settings, List<Result> cases) {

    private static final double MB = 1 << 20;

    /**
     * The figures of a case.
     *
     * @param name the case
     * @param turns the seconds of a run, turn by turn
     * @param peakBytes the most memory held above the resident arrays
     * @param lossError the relative error of the loss, NaN without a reference
     * @param gradientError the largest relative error of a gradient, NaN without a reference
     * @param figures further figures by name
     */
    public record Result(
            String name,
            List<Double> turns,
            double peakBytes,
            double lossError,
            double gradientError,
            Map<String, Double> figures) {

        /**
         * Returns the median of its turns.
         *
         * @return seconds
         */
        public double seconds() {
            return median(turns);
        }

        /** The median over turns: what disturbs the computer for a while disturbs both in it. */
        private double timeOver(Result other) {
            List<Double> ratios = new ArrayList<>();
            for (int i = 0; i < Math.min(turns.size(), other.turns.size()); i++) {
                ratios.add(turns.get(i) / other.turns.get(i));
            }
            return median(ratios);
        }
    }

    private Optional<Result> named(Object name) {
        return cases.stream().filter(c -> c.name().equals(name)).findFirst();
    }

    private Result ours() {
        return named(settings.get("ours")).orElseThrow();
    }

    private Result baseline() {
        return named(settings.get("baseline")).orElseThrow();
    }

    private boolean isComparison() {
        return named(settings.get("ours")).isPresent()
                && named(settings.get("baseline")).isPresent();
    }

    /**
     * Returns the time of our case over that of the baseline.
     *
     * @return the median ratio of a turn, NaN if one of them was left out
     */
    public double timeRatio() {
        return isComparison() ? ours().timeOver(baseline()) : Double.NaN;
    }

    /**
     * Returns the peak of our case over that of the baseline.
     *
     * @return the ratio, NaN if one of them was left out
     */
    public double peakRatio() {
        return isComparison() ? ours().peakBytes() / baseline().peakBytes() : Double.NaN;
    }

    /** Times of cases over others', by pair; of those that were run. */
    private Map<String, Double> pairs() {
        Map<String, Double> ratios = new LinkedHashMap<>();
        if (settings.get("pairs") instanceof List<?> pairs) {
            for (Object pair : pairs) {
                String[] names = pair.toString().split("/");
                Optional<Result> first = named(names[0]);
                Optional<Result> second = named(names[1]);
                if (first.isPresent() && second.isPresent()) {
                    ratios.put(pair.toString(), first.get().timeOver(second.get()));
                }
            }
        }
        return ratios;
    }

    /**
     * Returns the median.
     *
     * @param values one or more numbers
     * @return the middle one, or the mean of the two in the middle
     */
    public static double median(List<Double> values) {
        List<Double> sorted = new ArrayList<>(values);
        Collections.sort(sorted);
        int middle = sorted.size() / 2;
        return sorted.size() % 2 == 1
                ? sorted.get(middle)
                : (sorted.get(middle - 1) + sorted.get(middle)) / 2;
    }

    /**
     * Returns the figures in the form of the JSON.
     *
     * @return maps and lists
     */
    public Map<String, Object> json() {
        List<Map<String, Object>> rows = new ArrayList<>();
        for (Result result : cases) {
            Map<String, Object> row = new LinkedHashMap<>();
            row.put("name", result.name());
            row.put("seconds", result.seconds());
            row.put("turns", result.turns());
            row.put("peak_mb", result.peakBytes() / MB);
            row.put("loss_rel_error", result.lossError());
            row.put("grad_rel_error", result.gradientError());
            row.putAll(result.figures());
            rows.add(row);
        }
        Map<String, Object> ratios = new LinkedHashMap<>();
        ratios.put("time", timeRatio());
        ratios.put("peak", peakRatio());
        ratios.putAll(pairs());
        Map<String, Object> report = new LinkedHashMap<>();
        report.put("bench", bench);
        report.put("settings", settings);
        report.put("cases", rows);
        report.put("ratios", ratios);
        return report;
    }

    /**
     * Prints the table.
     *
     * @param out where to
     */
    public void print(PrintWriter out) {
        Map<String, Object> shown = new LinkedHashMap<>(settings);
        shown.keySet().removeAll(List.of("ours", "baseline", "pairs"));
        out.println(bench + " " + shown);
        out.printf(
                "%-18s %10s %10s %12s %12s%n",
                "case", "seconds", "peak MB", "loss err", "grad err");
        for (Result result : cases) {
            out.printf(
                    Locale.ROOT,
                    "%-18s %10.3f %10.1f %12s %12s%s%n",
                    result.name(),
                    result.seconds(),
                    result.peakBytes() / MB,
                    error(result.lossError()),
                    error(result.gradientError()),
                    more(result.figures()));
        }
        out.println(
                "seconds: median turn; peak: above resident arrays; errors: relative; others: of one"
                        + " run while the peak was measured");
        if (isComparison()) {
            out.printf(
                    Locale.ROOT,
                    "%s over %s: time %.3fx, peak %.3fx%n",
                    settings.get("ours"),
                    settings.get("baseline"),
                    timeRatio(),
                    peakRatio());
        }
        pairs().forEach(
                        (pair, time) ->
                                out.printf(
                                        Locale.ROOT,
                                        "%s: time %.3fx%n",
                                        pair.replace("/", " over "),
                                        time));
    }

    private static String error(double value) {
        return Double.isNaN(value) ? "-" : String.format(Locale.ROOT, "%.1e", value);
    }

    private static String more(Map<String, Double> figures) {
        StringBuilder text = new StringBuilder();
        figures.forEach(
                (name, value) -> text.append(String.format(Locale.ROOT, "  %s %.1f", name, value)));
        return text.toString();
    }
}
