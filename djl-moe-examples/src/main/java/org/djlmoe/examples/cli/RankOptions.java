package org.djlmoe.examples.cli;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.dispatch.DispatchMode;
import org.djlmoe.dispatch.DispatchWorkload;
import org.djlmoe.examples.bench.OverlapBenchmark;
import org.djlmoe.examples.bench.PlannerTime;
import org.djlmoe.examples.bench.RankBenchmark;
import org.djlmoe.examples.bench.RankReport;
import picocli.CommandLine.Option;

/** Dispatch over several ranks: its options, and its benchmarks; a mixin. */
final class RankOptions {

    /** Whatever reads it has not started the engine yet: a rank computes with one thread. */
    private static final String THREADS = "ai.djl.pytorch.num_threads";

    @Option(
            names = "--ranks",
            paramLabel = "P",
            defaultValue = "1",
            description =
                    "Of more than 1: ranks as threads of one process, all modes of dispatch on even and"
                            + " skewed routings (default: 1).")
    private int ranks;

    @Option(
            names = "--workloads",
            paramLabel = "NAME",
            split = ",",
            description =
                    "With --ranks: the routings, such as balanced,80/16,periodic (default: all).")
    private List<String> workloads;

    @Option(
            names = "--overlap",
            description =
                    "Instead: what a slow transport costs two ranks, with and without overlap.")
    private boolean overlap;

    boolean areMany() {
        Arguments.positive("--ranks", ranks);
        if (ranks == 1 && workloads != null) {
            throw new UserError("--workloads needs --ranks of 2 or more");
        }
        if (ranks > 1 && overlap) {
            throw new UserError("--overlap has two ranks of its own: leave out --ranks");
        }
        return ranks > 1;
    }

    boolean isOverlap() {
        return overlap;
    }

    int ranks() {
        return ranks;
    }

    /** The JSON of both, whose table has been printed. */
    Map<String, Object> measure(
            Map<String, Object> settings, BenchOptions bench, CommonOptions options) {
        List<DispatchMode> modes =
                bench.chosen(Arrays.asList(DispatchMode.values()), RankBenchmark::nameOf);
        RankBenchmark benchmark = new RankBenchmark(settings, chosen(), modes, bench.runs());
        oneThreadARank();
        RankReport report;
        try (ProgressBar bar = options.progress("bench dispatch", benchmark.steps()).build()) {
            report =
                    benchmark.run(
                            what -> {
                                bar.note(what);
                                bar.advance(1);
                            });
        }
        report.print(options.text());
        PlannerTime planner = PlannerTime.measure(64, 256);
        options.text().println(planner);
        Map<String, Object> json = new LinkedHashMap<>(report.json());
        json.put("planner", planner);
        return json;
    }

    Map<String, Object> measureOverlap(
            int tokens, int seed, BenchOptions bench, CommonOptions options) {
        Arguments.positive("--tokens", tokens);
        OverlapBenchmark benchmark = new OverlapBenchmark(tokens, seed, bench.runs());
        oneThreadARank();
        try (ProgressBar bar = options.progress("bench overlap", benchmark.steps()).build()) {
            OverlapBenchmark.Report report =
                    benchmark.run(
                            what -> {
                                bar.note(what);
                                bar.advance(1);
                            });
            report.print(options.text());
            return report.json();
        }
    }

    private List<DispatchWorkload> chosen() {
        if (workloads == null) {
            return Arrays.asList(DispatchWorkload.values());
        }
        List<DispatchWorkload> chosen = new ArrayList<>();
        for (String name : workloads) {
            try {
                chosen.add(DispatchWorkload.of(name));
            } catch (IllegalArgumentException e) {
                throw new UserError("--workloads: " + e.getMessage());
            }
        }
        return chosen;
    }

    private static void oneThreadARank() {
        if (System.getProperty(THREADS) == null) {
            System.setProperty(THREADS, "1");
        }
    }
}
