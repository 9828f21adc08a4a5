package org.djlmoe.examples.cli;

import java.io.IOException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.function.Function;
import java.util.stream.Collectors;
import org.djlmoe.examples.bench.BenchReport;
import org.djlmoe.examples.bench.Benchmark;
import org.djlmoe.examples.bench.Case;
import picocli.CommandLine.Option;

/** Which cases of a benchmark run, and how often; a mixin. */
final class BenchOptions {

    @Option(
            names = "--runs",
            paramLabel = "N",
            defaultValue = "5",
            description =
                    "Timed turns of each case, which take several runs if it is short (default: ${DEFAULT-VALUE}).")
    private int runs;

    @Option(
            names = "--cases",
            paramLabel = "NAME",
            split = ",",
            description = "The cases to run (default: all).")
    private List<String> names;

    /** The settings that every benchmark has. */
    static Map<String, Object> settings(String ours, String baseline, CommonOptions options) {
        if ((int) options.seed() != options.seed()) {
            throw new UserError("--seed must be a number of 32 bits, not " + options.seed());
        }
        Map<String, Object> settings = new LinkedHashMap<>();
        settings.put("ours", ours);
        settings.put("baseline", baseline);
        settings.put("seed", (int) options.seed());
        return settings;
    }

    /** Fails unless attention can split the width among so many heads, with rotary pairs. */
    static void heads(int heads, int hidden) {
        Arguments.positive("--heads", heads);
        if (hidden % (2 * heads) != 0) {
            throw new UserError(
                    "--hidden " + hidden + " must be an even multiple of --heads " + heads);
        }
    }

    int run(String bench, Map<String, Object> settings, List<Case> all, CommonOptions options)
            throws IOException {
        BenchReport report = measure(bench, settings, all, options);
        report.print(options.text());
        options.writeJson(report.json());
        return ExitCodes.OK;
    }

    /** Fails unless the numbers of the settings are positive. */
    static void positive(Map<String, Object> settings) {
        settings.forEach(
                (option, value) -> {
                    if (value instanceof Integer number && !option.equals("seed")) {
                        Arguments.positive("--" + option, number);
                    }
                });
    }

    BenchReport measure(
            String bench, Map<String, Object> settings, List<Case> all, CommonOptions options)
            throws IOException {
        positive(settings);
        Benchmark benchmark = new Benchmark(bench, settings, chosen(all, Case::name), runs());
        try (ProgressBar bar = options.progress("bench " + bench, benchmark.steps()).build()) {
            return benchmark.run(
                    what -> {
                        bar.note(what);
                        bar.advance(1);
                    });
        }
    }

    /** Measures the peak of each case and nothing else; bytes by the case's name. */
    static Map<String, Double> peaks(
            String bench, Map<String, Object> settings, List<Case> cases, CommonOptions options)
            throws IOException {
        Benchmark benchmark = new Benchmark(bench, settings, cases, 1);
        try (ProgressBar bar = options.progress("bench " + bench, cases.size()).build()) {
            return benchmark.peaks(
                    what -> {
                        bar.note(what);
                        bar.advance(1);
                    });
        }
    }

    /** Timed turns of each case. */
    int runs() {
        Arguments.positive("--runs", runs);
        return runs;
    }

    /** Those that {@code --cases} names, or all. */
    <T> List<T> chosen(List<T> all, Function<T, String> nameOf) {
        if (names == null) {
            return all;
        }
        List<T> chosen = new ArrayList<>();
        for (String name : new LinkedHashSet<>(names)) {
            chosen.add(
                    all.stream()
                            .filter(c -> nameOf.apply(c).equals(name))
                            .findFirst()
                            .orElseThrow(() -> new UserError(missing(name, all, nameOf))));
        }
        return chosen;
    }

    private static <T> String missing(String name, List<T> all, Function<T, String> nameOf) {
        String known = all.stream().map(nameOf).collect(Collectors.joining(", "));
        return "--cases: there is no case " + name + "; there are " + known;
    }
}
