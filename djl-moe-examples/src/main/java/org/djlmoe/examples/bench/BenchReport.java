package org.djlmoe.examples.bench;

import java.io.PrintWriter;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;

/**
 * The figures of a benchmark. As JSON: {@code {bench, settings, cases: [{name, seconds, peak_mb,
 * loss_rel_error, grad_rel_error}], ratios: {time, peak}}}, where ratios may have further times of
 * a case over another's.
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
     * @param seconds the median of its runs
     * @param peakBytes the most memory held above the resident arrays
     * @param lossError the relative error of the loss, NaN without a reference
     * @param gradientError the largest relative error of a gradient, NaN without a reference
     * @param figures further figures by name
     */
    public record Result(
            String name,
            double seconds,
            double peakBytes,
            double lossError,
            double gradientError,
            Map<String, Double> figures) {}

    private Result named(String setting) {
        Object name = settings.get(setting);
        return cases.stream()
                .filter(c -> c.name().equals(name))
                .findFirst()
                .orElseThrow(
                        () ->
                                new IllegalStateException(
                                        "The case " + name + " of " + setting + " was not run"));
    }

    private boolean isComparison() {
        return cases.stream().anyMatch(c -> c.name().equals(settings.get("ours")))
                && cases.stream().anyMatch(c -> c.name().equals(settings.get("baseline")));
    }

    /**
     * Returns the time of our case over that of the baseline.
     *
     * @return the ratio, NaN if one of them was left out
     */
    public double timeRatio() {
        return isComparison() ? named("ours").seconds() / named("baseline").seconds() : Double.NaN;
    }

    /**
     * Returns the peak of our case over that of the baseline.
     *
     * @return the ratio, NaN if one of them was left out
     */
    public double peakRatio() {
        return isComparison()
                ? named("ours").peakBytes() / named("baseline").peakBytes()
                : Double.NaN;
    }

    /** Times of cases over others', by pair; of those that were run. */
    private Map<String, Double> pairs() {
        Map<String, Double> ratios = new LinkedHashMap<>();
        if (settings.get("pairs") instanceof List<?> pairs) {
            for (Object pair : pairs) {
                String[] names = pair.toString().split("/");
                double time = seconds(names[0]) / seconds(names[1]);
                if (!Double.isNaN(time)) {
                    ratios.put(pair.toString(), time);
                }
            }
        }
        return ratios;
    }

    private double seconds(String name) {
        return cases.stream()
                .filter(c -> c.name().equals(name))
                .mapToDouble(Result::seconds)
                .findFirst()
                .orElse(Double.NaN);
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
        out.println(bench + " " + settings);
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
