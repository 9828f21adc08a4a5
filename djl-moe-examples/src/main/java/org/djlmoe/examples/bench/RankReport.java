package org.djlmoe.examples.bench;

import java.io.PrintWriter;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import org.djlmoe.dispatch.DispatchMode;
import org.djlmoe.dispatch.DispatchWorkload;
import org.djlmoe.examples.bench.BenchReport.Result;

/**
 * The figures of a {@link RankBenchmark}. As JSON: the form of {@link BenchReport}, whose cases
 * have further figures.
 *
 * @param settings the shape of the problem
 * @param rows one a workload and mode
 */
public record RankReport(Map<String, Object> settings, List<Row> rows) {

    private static final double MB = 1 << 20;

    /**
     * The figures of a workload in a mode.
     *
     * @param workload the routing
     * @param mode the mode
     * @param seconds the median of its runs, forward and backward
     * @param peakBytes bytes of the buffers, counted, of the rank that has most
     * @param lossError the relative error of the loss
     * @param gradientError the largest relative error of a gradient
     * @param sendRatio the largest send of a chunk from one rank to one rank over the sender's mean
     * @param receiveRatio the most routes that a rank receives in a chunk over the even share
     * @param ofBound the largest R_d(i) over its bound of 1.5 max(R_d / K, 256)
     * @param held whether no R_d(i) is above its bound
     * @param rowBytes bytes of rows that all ranks send
     * @param weightBytes bytes of weights and their gradients that all ranks send
     */
    public record Row(
            DispatchWorkload workload,
            DispatchMode mode,
            double seconds,
            double peakBytes,
            double lossError,
            double gradientError,
            double sendRatio,
            double receiveRatio,
            double ofBound,
            boolean held,
            long rowBytes,
            long weightBytes) {}

    private Optional<Row> find(DispatchWorkload workload, DispatchMode mode) {
        return rows.stream().filter(r -> r.workload() == workload && r.mode() == mode).findFirst();
    }

    private double peak(DispatchWorkload workload, DispatchMode mode) {
        return find(workload, mode).map(Row::peakBytes).orElse(Double.NaN);
    }

    private double timeRatio(Row row) {
        return find(row.workload(), DispatchMode.STANDARD)
                .map(standard -> row.seconds() / standard.seconds())
                .orElse(Double.NaN);
    }

    /**
     * Returns the largest peak of a mode over all workloads that were run, over that of balanced.
     *
     * @param mode the mode
     * @return the ratio, NaN if balanced was left out
     */
    public double worstOverBalanced(DispatchMode mode) {
        double worst =
                rows.stream()
                        .filter(r -> r.mode() == mode)
                        .mapToDouble(Row::peakBytes)
                        .max()
                        .orElse(Double.NaN);
        return worst / peak(DispatchWorkload.BALANCED, mode);
    }

    /**
     * Returns the peak of the standard mode at 80/16 over a balanced one.
     *
     * @param balanced the mode of the balanced one
     * @return the ratio, NaN if one was left out
     */
    public double standardOverBalanced(DispatchMode balanced) {
        return peak(DispatchWorkload.HOT_80_16, DispatchMode.STANDARD)
                / peak(DispatchWorkload.BALANCED, balanced);
    }

    /**
     * Returns the figures in the form of the JSON.
     *
     * @return maps and lists
     */
    public Map<String, Object> json() {
        List<Result> results = new ArrayList<>();
        for (Row row : rows) {
            Map<String, Double> figures = new LinkedHashMap<>();
            figures.put("time_over_standard", timeRatio(row));
            figures.put("send_ratio", row.sendRatio());
            figures.put("receive_over_even_share", row.receiveRatio());
            figures.put("receive_over_bound", row.ofBound());
            figures.put("bound_held", row.held() ? 1.0 : 0.0);
            figures.put("row_mb_sent", row.rowBytes() / MB);
            figures.put("weight_mb_sent", row.weightBytes() / MB);
            results.add(
                    new Result(
                            RankBenchmark.nameOf(row.workload(), row.mode()),
                            List.of(row.seconds()),
                            row.peakBytes(),
                            row.lossError(),
                            row.gradientError(),
                            figures));
        }
        Map<String, Object> json = new BenchReport("dispatch", settings, results).json();
        Map<String, Object> ratios = new LinkedHashMap<>();
        @SuppressWarnings("unchecked")
        Map<String, Object> general = (Map<String, Object>) json.get("ratios");
        ratios.putAll(general);
        ratios.put("worst_over_balanced", worstOverBalanced(DispatchMode.AUTOMATIC));
        ratios.put("standard_80_16_over_balanced", standardOverBalanced(DispatchMode.STANDARD));
        ratios.put(
                "standard_80_16_over_balanced_automatic",
                standardOverBalanced(DispatchMode.AUTOMATIC));
        json.put("ratios", ratios);
        return json;
    }

    /**
     * Prints the table and what to conclude from it.
     *
     * @param out where to
     */
    public void print(PrintWriter out) {
        out.println("dispatch " + settings);
        out.printf(
                "%-9s %-17s %8s %6s %8s %6s %8s %12s %8s %9s %8s %8s%n",
                "workload",
                "mode",
                "seconds",
                "time",
                "peak MB",
                "send",
                "receive",
                "bound",
                "rows MB",
                "weights",
                "loss err",
                "grad err");
        for (Row row : rows) {
            out.printf(
                    Locale.ROOT,
                    "%-9s %-17s %8.3f %6s %8.2f %6.2f %8.2f %5.2f %-6s %8.1f %9.1f %8.0e %8.0e%n",
                    row.workload(),
                    RankBenchmark.nameOf(row.mode()),
                    row.seconds(),
                    ratio(timeRatio(row)),
                    row.peakBytes() / MB,
                    row.sendRatio(),
                    row.receiveRatio(),
                    row.ofBound(),
                    row.held() ? "held" : "broken",
                    row.rowBytes() / MB,
                    row.weightBytes() / MB,
                    row.lossError(),
                    row.gradientError());
        }
        out.println(
                "time: over the standard mode; peak: buffers of the worst rank, counted; send,"
                        + " receive: over an even share");
        for (DispatchMode mode : DispatchMode.values()) {
            line(
                    out,
                    "worst rank's peak over all workloads, " + RankBenchmark.nameOf(mode) + ":",
                    worstOverBalanced(mode));
        }
        line(
                out,
                "standard at 80/16 over standard when balanced:",
                standardOverBalanced(DispatchMode.STANDARD));
        line(
                out,
                "standard at 80/16 over automatic when balanced:",
                standardOverBalanced(DispatchMode.AUTOMATIC));
    }

    private static void line(PrintWriter out, String what, double ratio) {
        if (!Double.isNaN(ratio)) {
            boolean worst = what.startsWith("worst");
            out.printf(Locale.ROOT, "%-62s %.2fx%s%n", what, ratio, worst ? " of balanced" : "");
        }
    }

    private static String ratio(double value) {
        return Double.isNaN(value) ? "-" : String.format(Locale.ROOT, "%.2fx", value);
    }
}
