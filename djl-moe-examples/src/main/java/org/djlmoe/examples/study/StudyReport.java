package org.djlmoe.examples.study;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.ToDoubleFunction;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.examples.report.HtmlReport;
import org.djlmoe.examples.report.ReportChart;
import org.djlmoe.examples.report.ReportTable;

/** A study's figures as text, JSON and a page with charts. */
public final class StudyReport {

    private final StudySettings settings;
    private final Results results;
    private final List<Claims.Claim> claims;
    private final double seconds;

    StudyReport(StudySettings settings, Results results, double seconds) {
        this.settings = settings;
        this.results = results;
        this.claims = Claims.of(settings, results);
        this.seconds = seconds;
    }

    private List<Arm> arms() {
        return Arrays.stream(Arm.values())
                .filter(arm -> !sweeps(arm, settings.kept()).isEmpty())
                .toList();
    }

    private List<Figures.Series> sweeps(Arm arm, int kept) {
        return results.series(arm, kept, settings.seeds());
    }

    private Spread spread(Arm arm, int kept, ToDoubleFunction<Figures.Series> figure) {
        return Spread.of(sweeps(arm, kept).stream().mapToDouble(figure).toArray());
    }

    /**
     * Returns the figures for {@code --json}.
     *
     * @return maps, lists and numbers
     */
    public Map<String, Object> json() {
        Map<String, Object> json = new LinkedHashMap<>();
        json.put("language", settings.language().code());
        json.put("other_language", settings.otherLanguage().code());
        json.put("seeds", settings.seeds());
        json.put("steps", settings.steps());
        json.put("kept", settings.kept());
        json.put("cache", settings.cache());
        json.put("policy", settings.policy().jsonName());
        json.put("seconds", seconds);
        json.put("claims", claims);
        Map<String, Object> arms = new LinkedHashMap<>();
        for (Arm arm : arms()) {
            arms.put(arm.name().toLowerCase(Locale.ROOT), arm(arm));
        }
        json.put("arms", arms);
        json.put("units", results.units());
        json.put("times", results.times());
        return json;
    }

    private Map<String, Object> arm(Arm arm) {
        Map<String, Object> json = new LinkedHashMap<>();
        int kept = settings.kept();
        json.put("perplexity", spread(arm, kept, s -> s.choice().perplexity()));
        Map<String, Object> loads = new LinkedHashMap<>();
        for (int cache : settings.caches()) {
            Map<String, Object> policies = new LinkedHashMap<>();
            for (EvictionPolicy.Type policy : EvictionPolicy.Type.values()) {
                policies.put(
                        policy.jsonName(), spread(arm, kept, s -> s.choice().loads(cache, policy)));
            }
            loads.put(String.valueOf(cache), policies);
        }
        json.put("loads_per_token", loads);
        return json;
    }

    /**
     * Returns the main figures for a terminal.
     *
     * @return some lines
     */
    public String text() {
        StringBuilder out = new StringBuilder();
        append(out, armTable());
        out.append(
                String.format(
                        Locale.ROOT,
                        "loads a token with %d experts a layer cached; mean ± deviation over %d"
                                + " seed(s), at strengths chosen on validation text%n%n",
                        settings.cache(),
                        settings.seeds().size()));
        for (Claims.Claim claim : claims) {
            out.append(
                    String.format(
                            "%-12s  %s%s%n",
                            claim.verdict(),
                            claim.claim(),
                            claim.figures().isEmpty() ? "" : ": " + claim.figures()));
        }
        return out.toString();
    }

    private static void append(StringBuilder out, ReportTable table) {
        int[] widths = new int[table.header().size()];
        List<List<?>> lines = new ArrayList<>(List.of(table.header()));
        lines.addAll(table.rows());
        for (List<?> line : lines) {
            for (int c = 0; c < widths.length; c++) {
                widths[c] = Math.max(widths[c], line.get(c).toString().length());
            }
        }
        for (List<?> line : lines) {
            StringBuilder row = new StringBuilder();
            for (int c = 0; c < widths.length; c++) {
                row.append(
                        String.format(
                                c == 0 ? "%-" + widths[c] + "s" : "  %" + widths[c] + "s",
                                line.get(c)));
            }
            out.append(row).append(System.lineSeparator());
        }
    }

    /**
     * Writes the page.
     *
     * @param file the HTML file
     * @throws IOException if writing fails
     */
    public void writeHtml(Path file) throws IOException {
        HtmlReport.Builder page =
                HtmlReport.builder()
                        .setTitle("MaskCoFT study: " + settings.language().label())
                        .addParagraph(
                                String.format(
                                        Locale.ROOT,
                                        "Each arm was fine-tuned for %d steps of %d tokens on %d"
                                                + " seed(s), all arms of a seed on the same batches."
                                                + " Strengths of priors were chosen on validation"
                                                + " text: the fewest loads at a perplexity of at"
                                                + " most 1.01 times the control's, or else 1.01"
                                                + " times the lowest of the arm. All figures come from test"
                                                + " text.",
                                        settings.steps(),
                                        settings.batch() * settings.sequence(),
                                        settings.seeds().size()))
                        .addHeading("Claims")
                        .addTable(claimTable())
                        .addHeading("Loads against perplexity")
                        .addParagraph(
                                "Lower left is better. A line is an arm over the strengths of its"
                                        + " prior, the mean of all seeds; a single point has no"
                                        + " strength to vary.")
                        .addCharts(pareto())
                        .addHeading("At the chosen strengths")
                        .addTable(armTable());
        for (int cache : settings.caches()) {
            page.addParagraph("Loads a token with " + cache + " experts a layer cached:")
                    .addTable(loadTable(cache));
        }
        page.addCharts(loadBars());
        if (!settings.keptSweep().isEmpty()) {
            page.addHeading("How many experts to keep")
                    .addParagraph(
                            "On the first " + settings.keptSeeds() + " seed(s), chosen strengths.")
                    .addTable(keptTable());
        }
        page.addHeading("On " + settings.otherLanguage().label() + " text")
                .addParagraph(
                        "A mask is one for all text, and was learned on "
                                + settings.language().label()
                                + " alone.")
                .addTable(otherTable());
        if (!sweeps(Arm.BASE, 0).get(0).tasks().isEmpty()) {
            page.addHeading("Tasks")
                    .addParagraph(
                            "Accuracy in percent, by length-normalised log-likelihood. A mean can"
                                    + " hide that some tasks gain what others lose.")
                    .addTable(taskTable());
        }
        if (!results.times().isEmpty()) {
            page.addHeading("Time per output token")
                    .addParagraph(
                            "Token by token, "
                                    + settings.cache()
                                    + " experts a layer cached under "
                                    + settings.policy().jsonName()
                                    + ", the others loaded from "
                                    + results.times().get(0).reads()
                                    + ". All arms of a seed took turns. Wider experts are padded"
                                    + " with zeros: the same outputs and more to load.")
                    .addTable(timeTable());
        }
        page.addHeading("All strengths").addTable(pointTable()).build().write(file);
    }

    private ReportTable claimTable() {
        List<List<?>> rows = new ArrayList<>();
        claims.forEach(c -> rows.add(List.of(c.verdict(), c.claim(), c.figures())));
        return new ReportTable(List.of("holds", "claim", "found"), rows);
    }

    private ReportTable armTable() {
        List<EvictionPolicy.Type> policies =
                List.of(
                        EvictionPolicy.Type.LRU,
                        EvictionPolicy.Type.LFU,
                        EvictionPolicy.Type.LFU_LIFETIME,
                        EvictionPolicy.Type.BELADY);
        List<String> header = new ArrayList<>(List.of("arm", "strength", "perplexity"));
        policies.forEach(p -> header.add(p.jsonName()));
        header.add("limit kept");
        List<List<?>> rows = new ArrayList<>();
        for (Arm arm : arms()) {
            List<Figures.Series> sweeps = sweeps(arm, settings.kept());
            List<Object> row = new ArrayList<>(List.of(arm.label(), strengths(sweeps)));
            row.add(spread(arm, settings.kept(), s -> s.choice().perplexity()).toString());
            for (EvictionPolicy.Type policy : policies) {
                row.add(
                        spread(
                                        arm,
                                        settings.kept(),
                                        s -> s.choice().loads(settings.cache(), policy))
                                .toString());
            }
            row.add(
                    sweeps.stream().filter(Figures.Series::withinLimit).count()
                            + " of "
                            + sweeps.size());
            rows.add(row);
        }
        return new ReportTable(header, rows);
    }

    /** The chosen strengths, each once. */
    private static String strengths(List<Figures.Series> sweeps) {
        return String.join(
                ", ", sweeps.stream().map(s -> strength(s.arm(), s.choice())).distinct().toList());
    }

    private static String strength(Arm arm, Figures.Point point) {
        boolean masked = arm.model() != Arm.BASE && arm.model() != Arm.CONTROL;
        String beta = !masked ? "" : point.hard() ? "hard" : "beta " + point.beta();
        String lambda = arm.steersByCache() ? "lambda " + point.lambda() : "";
        return beta.isEmpty() ? lambda : lambda.isEmpty() ? beta : beta + " " + lambda;
    }

    private ReportTable loadTable(int cache) {
        List<String> header = new ArrayList<>(List.of("arm"));
        for (EvictionPolicy.Type policy : EvictionPolicy.Type.values()) {
            header.add(policy.jsonName());
        }
        List<List<?>> rows = new ArrayList<>();
        for (Arm arm : arms()) {
            List<Object> row = new ArrayList<>(List.of(arm.label()));
            for (EvictionPolicy.Type policy : EvictionPolicy.Type.values()) {
                row.add(
                        spread(arm, settings.kept(), s -> s.choice().loads(cache, policy))
                                .toString());
            }
            rows.add(row);
        }
        return new ReportTable(header, rows);
    }

    private ReportChart pareto() {
        List<ReportChart.Line> lines = new ArrayList<>();
        for (Arm arm : arms()) {
            List<Figures.Series> sweeps = sweeps(arm, settings.kept());
            int points = sweeps.get(0).points().size();
            double[] x = new double[points];
            double[] y = new double[points];
            for (int i = 0; i < points; i++) {
                for (Figures.Series sweep : sweeps) {
                    Figures.Point point = sweep.points().get(i);
                    x[i] += point.loads(settings.cache(), settings.policy()) / sweeps.size();
                    y[i] += point.perplexity() / sweeps.size();
                }
            }
            lines.add(new ReportChart.Line(arm.label(), x, y));
        }
        return new ReportChart.Lines(
                "Loads against perplexity, cache of "
                        + settings.cache()
                        + ", "
                        + settings.policy().jsonName(),
                "expert loads a token",
                "perplexity",
                lines);
    }

    private ReportChart loadBars() {
        List<String> policies = new ArrayList<>();
        for (EvictionPolicy.Type policy : EvictionPolicy.Type.values()) {
            policies.add(policy.jsonName());
        }
        List<ReportChart.BarSeries> bars = new ArrayList<>();
        for (Arm arm : arms()) {
            double[] values = new double[policies.size()];
            for (EvictionPolicy.Type policy : EvictionPolicy.Type.values()) {
                values[policy.ordinal()] =
                        spread(
                                        arm,
                                        settings.kept(),
                                        s -> s.choice().loads(settings.cache(), policy))
                                .mean();
            }
            bars.add(new ReportChart.BarSeries(arm.label(), values));
        }
        return new ReportChart.Bars(
                "Loads by policy, cache of " + settings.cache(),
                "eviction policy",
                "loads a token",
                policies,
                bars);
    }

    private ReportTable keptTable() {
        List<Integer> kepts = new ArrayList<>(settings.keptSweep());
        kepts.add(settings.kept());
        kepts.sort(null);
        List<Long> seeds = settings.seeds().stream().limit(settings.keptSeeds()).toList();
        List<List<?>> rows = new ArrayList<>();
        for (int kept : kepts) {
            for (Arm arm : List.of(Arm.MASKCOFT, Arm.FREQUENT)) {
                List<Figures.Series> sweeps = results.series(arm, kept, seeds);
                if (!sweeps.isEmpty()) {
                    rows.add(
                            List.of(
                                    kept,
                                    arm.label(),
                                    strengths(sweeps),
                                    of(sweeps, s -> s.choice().perplexity()),
                                    of(
                                            sweeps,
                                            s ->
                                                    s.choice()
                                                            .loads(
                                                                    settings.cache(),
                                                                    settings.policy()))));
                }
            }
        }
        return new ReportTable(
                List.of("kept", "arm", "strength", "perplexity", settings.policy().jsonName()),
                rows);
    }

    private static String of(List<Figures.Series> sweeps, ToDoubleFunction<Figures.Series> figure) {
        return Spread.of(sweeps.stream().mapToDouble(figure).toArray()).toString();
    }

    private ReportTable otherTable() {
        List<List<?>> rows = new ArrayList<>();
        for (Arm arm : arms()) {
            rows.add(
                    List.of(
                            arm.label(),
                            spread(arm, settings.kept(), s -> s.other().perplexity()).toString(),
                            spread(
                                            arm,
                                            settings.kept(),
                                            s ->
                                                    s.other()
                                                            .loads(
                                                                    settings.cache(),
                                                                    settings.policy()))
                                    .toString()));
        }
        return new ReportTable(List.of("arm", "perplexity", settings.policy().jsonName()), rows);
    }

    private ReportTable taskTable() {
        List<String> tasks =
                sweeps(Arm.BASE, 0).get(0).tasks().stream().map(Figures.Task::task).toList();
        List<String> header = new ArrayList<>(List.of("arm"));
        header.addAll(tasks);
        header.add("mean");
        List<List<?>> rows = new ArrayList<>();
        for (Arm arm : arms()) {
            List<Object> row = new ArrayList<>(List.of(arm.label()));
            for (int t = 0; t < tasks.size(); t++) {
                int task = t;
                row.add(percent(arm, s -> s.tasks().get(task).accuracy()));
            }
            row.add(percent(arm, Claims::accuracy));
            rows.add(row);
        }
        return new ReportTable(header, rows);
    }

    private String percent(Arm arm, ToDoubleFunction<Figures.Series> share) {
        return String.format(Locale.ROOT, "%.1f", 100 * spread(arm, settings.kept(), share).mean());
    }

    private ReportTable timeTable() {
        List<List<?>> rows = new ArrayList<>();
        for (Figures.Times times : results.times()) {
            for (Figures.Timing t : times.timings()) {
                rows.add(
                        List.of(
                                times.seed(),
                                t.arm().label(),
                                t.widened(),
                                t.millisPerToken(),
                                100 * t.loadingShare(),
                                t.loadsPerToken()));
            }
        }
        return new ReportTable(
                List.of("seed", "arm", "widened", "ms/token", "% waiting for loads", "loads/token"),
                rows);
    }

    private ReportTable pointTable() {
        List<List<?>> rows = new ArrayList<>();
        for (Figures.Unit unit : results.units()) {
            for (Figures.Series series : unit.series()) {
                for (int i = 0; i < series.points().size(); i++) {
                    Figures.Point point = series.points().get(i);
                    rows.add(
                            List.of(
                                    unit.unit(),
                                    series.arm().label(),
                                    strength(series.arm(), point),
                                    point.validation(),
                                    point.perplexity(),
                                    point.loads(settings.cache(), settings.policy()),
                                    i == series.chosen() ? "chosen" : ""));
                }
            }
        }
        return new ReportTable(
                List.of(
                        "unit",
                        "arm",
                        "strength",
                        "validation perplexity",
                        "perplexity",
                        settings.policy().jsonName(),
                        ""),
                rows);
    }
}
