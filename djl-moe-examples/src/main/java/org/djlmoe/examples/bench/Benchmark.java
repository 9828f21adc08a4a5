package org.djlmoe.examples.bench;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.examples.bench.BenchReport.Result;
import org.djlmoe.examples.bench.ChildJvm.Allocator;
import org.djlmoe.examples.files.TemporaryFolder;

/**
 * Measures cases, each in a Java virtual machine of its own.
 *
 * <p>Peaks, losses and gradients come first, one case after the other, from machines whose
 * allocator gives back what is freed; each runs twice, and the second run counts. Times come from
 * others, whose allocator keeps it; all of them wait side by side and run in turn, so that what
 * disturbs the computer disturbs them alike.
 */
public final class Benchmark {

    private final String name;
    private final Map<String, Object> settings;
    private final List<Case> cases;
    private final int runs;

    /** Told about every finished step. */
    public interface Progress {
        /**
         * A step is done.
         *
         * @param what the case and what was done
         */
        void step(String what);
    }

    /**
     * Creates a benchmark.
     *
     * @param name its name
     * @param settings what cases are told, and what the report shows; {@code ours} and {@code
     *     baseline} name the cases to compare
     * @param cases the cases
     * @param runs timed turns of each case
     */
    public Benchmark(String name, Map<String, Object> settings, List<Case> cases, int runs) {
        if (cases.isEmpty() || runs < 1) {
            throw new IllegalArgumentException(
                    "A benchmark needs a case and a run, not " + cases.size() + " and " + runs);
        }
        this.name = name;
        this.settings = new LinkedHashMap<>(settings);
        this.settings.put("runs", runs);
        this.cases = List.copyOf(cases);
        this.runs = runs;
    }

    /**
     * Returns the number of steps that {@link #run} reports.
     *
     * @return their number
     */
    public int steps() {
        return cases.size() * (2 + runs);
    }

    private record Memory(
            double peakBytes, double loss, double gradient, Map<String, Double> more) {}

    /**
     * Measures.
     *
     * @param progress told about every step
     * @return the figures
     * @throws BenchException if a case fails
     * @throws IOException if a child cannot be started, or results not be stored
     */
    public BenchReport run(Progress progress) throws IOException {
        return run(progress, Path.of(System.getProperty("java.io.tmpdir")));
    }

    /** Measures, with files in a directory of its own below another while it runs. */
    BenchReport run(Progress progress, Path temporary) throws IOException {
        Map<Case, Path> results = new LinkedHashMap<>();
        try (TemporaryFolder own = TemporaryFolder.create(temporary, "bench")) {
            Path folder = own.path();
            List<Memory> memory = new ArrayList<>();
            for (Case each : cases) {
                memory.add(memory(each, folder, results));
                progress.step(each.name() + ": peak");
            }
            Map<Case, List<Double>> seconds = seconds(progress, folder);
            List<Result> rows = new ArrayList<>();
            for (int i = 0; i < cases.size(); i++) {
                Memory m = memory.get(i);
                rows.add(
                        new Result(
                                cases.get(i).name(),
                                seconds.get(cases.get(i)),
                                m.peakBytes(),
                                m.loss(),
                                m.gradient(),
                                m.more()));
            }
            return new BenchReport(name, settings, rows);
        }
    }

    /**
     * Measures the peaks alone.
     *
     * @param progress told about every case
     * @return bytes above the resident arrays, by the case's name
     * @throws BenchException if a case fails
     * @throws IOException if a child cannot be started
     */
    public Map<String, Double> peaks(Progress progress) throws IOException {
        try (TemporaryFolder own = TemporaryFolder.create("bench")) {
            Path folder = own.path();
            Map<String, Double> peaks = new LinkedHashMap<>();
            for (Case each : cases) {
                try (ChildJvm child = ChildJvm.start(each, settings, Allocator.EXACT, folder)) {
                    child.run();
                    peaks.put(each.name(), child.peak());
                }
                progress.step(each.name() + ": peak");
            }
            return peaks;
        }
    }

    private Memory memory(Case target, Path folder, Map<Case, Path> results) throws IOException {
        Case reference = target.reference();
        if (reference != null && !results.containsKey(reference)) {
            try (ChildJvm child = ChildJvm.start(reference, settings, Allocator.POOLED, folder)) {
                child.run();
                results.put(reference, folder.resolve(reference.name()));
                child.write(results.get(reference));
            }
        }
        try (ChildJvm child = ChildJvm.start(target, settings, Allocator.EXACT, folder)) {
            child.run();
            double peak = child.peak();
            Map<String, Double> figures = child.figures();
            if (!results.containsKey(target)) {
                results.put(target, folder.resolve(target.name()));
                child.write(results.get(target));
            }
            double loss = Double.NaN;
            double gradient = Double.NaN;
            if (reference != null) {
                Map<String, Double> errors =
                        TensorFile.errors(results.get(target), results.get(reference));
                loss = errors.remove("loss");
                gradient = errors.values().stream().reduce(0.0, Math::max);
            }
            return new Memory(peak, loss, gradient, figures);
        }
    }

    private Map<Case, List<Double>> seconds(Progress progress, Path folder) throws IOException {
        Map<Case, List<Double>> seconds = new HashMap<>();
        for (int round : cases.stream().mapToInt(Case::round).sorted().distinct().toArray()) {
            List<Case> turns = cases.stream().filter(c -> c.round() == round).toList();
            Map<Case, ChildJvm> children = new LinkedHashMap<>();
            try {
                for (Case each : turns) {
                    Allocator allocator =
                            each.defaultAllocator() ? Allocator.DEFAULT : Allocator.POOLED;
                    ChildJvm child = ChildJvm.start(each, settings, allocator, folder);
                    children.put(each, child);
                    child.warmUp();
                    seconds.put(each, new ArrayList<>());
                    progress.step(each.name() + ": warm-up");
                }
                for (int run = 0; run < runs; run++) {
                    for (Case each : turns) {
                        seconds.get(each).add(children.get(each).turn());
                        progress.step(each.name() + ": run " + (run + 1));
                    }
                }
            } finally {
                for (ChildJvm child : children.values()) {
                    child.close();
                }
            }
        }
        return seconds;
    }
}
