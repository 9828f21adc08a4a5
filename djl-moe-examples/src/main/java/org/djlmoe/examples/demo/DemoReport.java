package org.djlmoe.examples.demo;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.ToDoubleFunction;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.examples.report.HtmlReport;
import org.djlmoe.examples.report.ReportChart;
import org.djlmoe.examples.report.ReportTable;
import org.djlmoe.maskcoft.PriorSweep;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PeakMeter;

/**
 * The demonstration's figures as JSON, text and a page with charts.
 *
 * @param settings how long it ran
 * @param result what was found
 * @param plan the memory planned for training
 * @param peak the memory measured over the whole demonstration
 * @param seconds how long it took
 */
public record DemoReport(
        DemoSettings settings,
        Demo.Result result,
        MemoryPlan plan,
        PeakMeter.Reading peak,
        double seconds) {

    private static final double MB = 1 << 20;

    private Map<String, Demo.Arm> arms() {
        Map<String, Demo.Arm> arms = new LinkedHashMap<>();
        arms.put("base", result.base());
        arms.put("control", result.control());
        arms.put("maskcoft", result.maskcoft());
        return arms;
    }

    /**
     * Returns the figures for {@code report.json}.
     *
     * @return maps, lists and numbers
     */
    public Map<String, Object> json() {
        Map<String, Object> json = new LinkedHashMap<>();
        json.put("seed", settings.seed());
        json.put("language", settings.language().code());
        json.put("cache_size", settings.cacheSize());
        json.put("steps", settings.steps());
        json.put("tokens_per_step", settings.batch() * settings.sequence());
        json.put("tokens_per_second", result.tokensPerSecond());
        json.put("seconds", seconds);
        json.put("peak_mb", peak.peakBytes() / MB);
        json.put("planned_peak_mb", plan.peakBytes() / MB);
        json.put("peak_above_start_mb", peak.aboveBase() / MB);
        json.put("planned_peak_above_start_mb", plan.peakAboveBase() / MB);
        json.put("unbounded_peak_mb", plan.unboundedBytes() / MB);
        arms().forEach((name, arm) -> json.put(name, arm(arm)));
        PriorSweep sweep = result.recipe().sweep();
        Map<String, Object> prior = new LinkedHashMap<>();
        prior.put("beta", sweep.chosen().prior().beta());
        prior.put("within_limit", sweep.withinLimit());
        prior.put("control_validation_perplexity", result.controlValidation());
        List<Object> points = new ArrayList<>();
        for (PriorSweep.Point point : sweep.points()) {
            points.add(
                    Map.of(
                            "beta", point.prior().beta(),
                            "validation_perplexity", point.perplexity(),
                            "loads_per_token", point.loadsPerToken()));
        }
        prior.put("sweep", points);
        List<int[]> kept = new ArrayList<>();
        for (int l = 0; l < result.recipe().mask().numLayers(); l++) {
            kept.add(result.recipe().mask().experts(l));
        }
        prior.put("kept_experts", kept);
        json.put("prior", prior);
        return json;
    }

    private static Map<String, Object> arm(Demo.Arm arm) {
        Map<String, Object> json = new LinkedHashMap<>();
        json.put("perplexity", arm.perplexity());
        Map<String, Double> loads = new LinkedHashMap<>();
        arm.loadsPerToken().forEach((policy, value) -> loads.put(policy.jsonName(), value));
        json.put("loads_per_token", loads);
        json.put("expert_usage", arm.usage());
        if (arm.losses().length > 0) {
            json.put("losses", arm.losses());
        }
        return json;
    }

    /**
     * Returns the main figures as a table for a terminal.
     *
     * @return a few lines
     */
    public String text() {
        StringBuilder text = new StringBuilder();
        text.append(String.format(Locale.ROOT, "%-10s %11s", "", "perplexity"));
        Demo.POLICIES.forEach(p -> text.append(String.format("  %12s", p.jsonName())));
        text.append(String.format("   (loads a token, cache of %d)%n", settings.cacheSize()));
        arms().forEach(
                        (name, arm) -> {
                            text.append(
                                    String.format(
                                            Locale.ROOT, "%-10s %11.3f", name, arm.perplexity()));
                            arm.loadsPerToken()
                                    .values()
                                    .forEach(
                                            v ->
                                                    text.append(
                                                            String.format(
                                                                    Locale.ROOT, "  %12.3f", v)));
                            text.append(System.lineSeparator());
                        });
        text.append(
                String.format(
                        Locale.ROOT,
                        "beta %s; %.0f tokens/s; memory peak %.0f MB, planned %.0f MB; %.0f s%n",
                        result.recipe().sweep().chosen().prior().beta(),
                        result.tokensPerSecond(),
                        peak.peakBytes() / MB,
                        plan.peakBytes() / MB,
                        seconds));
        return text.toString();
    }

    /**
     * Writes the page.
     *
     * @param file the HTML file
     * @throws IOException if writing fails
     */
    public void writeHtml(Path file) throws IOException {
        ReportChart.HeatMap[] usage =
                ReportChart.HeatMap.usageBeforeAndAfter(
                        result.base().usage(), result.maskcoft().usage());
        PriorSweep sweep = result.recipe().sweep();
        HtmlReport.builder()
                .setTitle("MaskCoFT demo: " + settings.language().label())
                .addParagraph(summary())
                .addTable(armTable())
                .addParagraph("Columns from lru on: expert loads a token, by eviction policy.")
                .addHeading("Expert loads")
                .addParagraph(
                        "How many experts must be loaded for a token, over all layers, if a layer's cache"
                                + " holds "
                                + settings.cacheSize()
                                + " of its "
                                + result.config().numExperts()
                                + " experts. Replayed from the routing of the test text; the cache"
                                + " starts cold and stays warm over the rows. Belady knows the future"
                                + " and bounds every policy.")
                .addCharts(loadsChart())
                .addHeading("Training")
                .addCharts(lossChart())
                .addHeading("What the experts do")
                .addParagraph(
                        "Share of a layer's selections on the test text, base model and MaskCoFT"
                                + " under its prior.")
                .addCharts(usage)
                .addPreformatted(result.recipe().mask().toString())
                .addHeading("The prior")
                .addParagraph(
                        String.format(
                                Locale.ROOT,
                                "Kept experts rank higher by beta; none is forbidden. Chosen on"
                                        + " validation text: the fewest loads at a perplexity of at most"
                                        + " %.2f times the control's %.3f%s.",
                                PriorSweep.TOLERANCE,
                                result.controlValidation(),
                                sweep.withinLimit()
                                        ? ""
                                        : "; no beta kept that limit, so it became 1.01"
                                                + " times the lowest perplexity of all"))
                .addTable(sweepTable(sweep))
                .addHeading("Memory")
                .addCharts(
                        ReportChart.Bars.memory(
                                "Memory peak",
                                List.of("process", "above the start"),
                                new long[] {plan.peakBytes(), plan.peakAboveBase()},
                                new long[] {peak.peakBytes(), peak.aboveBase()}))
                .addPreformatted(plan.toString())
                .build()
                .write(file);
    }

    private String summary() {
        double loads = change(arm -> arm.loadsPerToken().get(EvictionPolicy.Type.LFU_LIFETIME));
        return String.format(
                Locale.ROOT,
                "A Mixtral-style model of %d layers with %d experts was fine-tuned on %s parliament"
                        + " transcripts, %d steps of %d tokens, without a mask (control) and with"
                        + " MaskCoFT. On held-out text MaskCoFT needs %.1f %% %s expert loads a"
                        + " token than the base (keep-the-most-frequent cache of %d), at a perplexity of"
                        + " %.3f against %.3f of the base and %.3f of the control. Seed %d.",
                result.config().numLayers(),
                result.config().numExperts(),
                settings.language().label(),
                settings.steps(),
                settings.batch() * settings.sequence(),
                Math.abs(loads),
                loads < 0 ? "fewer" : "more",
                settings.cacheSize(),
                result.maskcoft().perplexity(),
                result.base().perplexity(),
                result.control().perplexity(),
                settings.seed());
    }

    private double change(ToDoubleFunction<Demo.Arm> figure) {
        double before = figure.applyAsDouble(result.base());
        return 100 * (figure.applyAsDouble(result.maskcoft()) / before - 1);
    }

    private ReportTable armTable() {
        List<String> header = new ArrayList<>(List.of("", "perplexity"));
        Demo.POLICIES.forEach(p -> header.add(p.jsonName()));
        List<List<?>> rows = new ArrayList<>();
        arms().forEach(
                        (name, arm) -> {
                            List<Object> row =
                                    new ArrayList<>(List.of(name, rounded(arm.perplexity())));
                            arm.loadsPerToken().values().forEach(v -> row.add(rounded(v)));
                            rows.add(row);
                        });
        return new ReportTable(header, rows);
    }

    private static String rounded(double value) {
        return String.format(Locale.ROOT, "%.3f", value);
    }

    private ReportChart loadsChart() {
        List<ReportChart.BarSeries> series = new ArrayList<>();
        arms().forEach(
                        (name, arm) ->
                                series.add(
                                        new ReportChart.BarSeries(
                                                name,
                                                arm.loadsPerToken().values().stream()
                                                        .mapToDouble(v -> v)
                                                        .toArray())));
        return new ReportChart.Bars(
                "Expert loads by policy",
                "eviction policy",
                "loads a token",
                Demo.POLICIES.stream().map(EvictionPolicy.Type::jsonName).toList(),
                series);
    }

    private ReportChart lossChart() {
        List<ReportChart.Line> lines = new ArrayList<>();
        arms().forEach(
                        (name, arm) -> {
                            if (arm.losses().length > 0) {
                                double[] losses = new double[arm.losses().length];
                                for (int i = 0; i < losses.length; i++) {
                                    losses[i] = arm.losses()[i];
                                }
                                lines.add(ReportChart.Line.overSteps(name, losses));
                            }
                        });
        return new ReportChart.Lines("Training loss", "step", "nats a token", lines);
    }

    private ReportTable sweepTable(PriorSweep sweep) {
        List<List<?>> rows = new ArrayList<>();
        for (PriorSweep.Point point : sweep.points()) {
            rows.add(
                    List.of(
                            point.prior().beta(),
                            rounded(point.perplexity()),
                            rounded(point.loadsPerToken()),
                            point == sweep.chosen() ? "chosen" : ""));
        }
        return new ReportTable(List.of("beta", "validation perplexity", "loads a token", ""), rows);
    }
}
