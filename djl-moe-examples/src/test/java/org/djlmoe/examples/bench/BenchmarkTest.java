package org.djlmoe.examples.bench;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class BenchmarkTest {

    private static final Case REFERENCE = new Case("reference", ToyWorkload.class, null);
    private static final Case OURS = new Case("ours", ToyWorkload.class, REFERENCE);
    private static final Case STOCK = new Case("stock", ToyWorkload.class, null);

    @TempDir private Path temporary;

    private static Map<String, Object> settings() {
        Map<String, Object> settings = new LinkedHashMap<>();
        settings.put("ours", "ours");
        settings.put("baseline", "stock");
        settings.put("ours_mb", 40);
        settings.put("stock_mb", 160);
        settings.put("broken", 2);
        return settings;
    }

    private void assertNothingLeft() throws IOException {
        try (Stream<Path> files = Files.list(temporary)) {
            assertEquals(List.of(), files.collect(Collectors.toList()));
        }
    }

    @Test
    void run_toyCases_measuresPeaksAboveResidentArraysAndErrors() throws IOException {
        List<String> steps = new ArrayList<>();
        Benchmark benchmark = new Benchmark("toy", settings(), List.of(OURS, STOCK), 2);

        BenchReport report = benchmark.run(steps::add, temporary);

        assertEquals(benchmark.steps(), steps.size());
        assertEquals(
                List.of("ours: run 1", "stock: run 1", "ours: run 2", "stock: run 2"),
                steps.subList(4, 8));
        BenchReport.Result ours = report.cases().get(0);
        BenchReport.Result stock = report.cases().get(1);
        double mb = 1 << 20;
        assertEquals(40, ours.peakBytes() / mb, 4);
        assertEquals(160, stock.peakBytes() / mb, 4);
        assertEquals(0.25, report.peakRatio(), 0.03);
        assertEquals(0.001, ours.lossError(), 1e-6);
        assertEquals(0.01, ours.gradientError(), 1e-6);
        assertEquals(Double.NaN, stock.lossError());
        assertEquals(2.0, ours.figures().get("run_count"));
        assertTrue(ours.seconds() > 0 && stock.seconds() > 0);
        assertNothingLeft();
    }

    @ParameterizedTest
    @CsvSource({
        "broken-start, exit code 1, no start today",
        "broken-run, exit code 1, the wheel came off",
        "killed-run, exit code 7, ''"
    })
    void run_caseFails_saysWhichAndWhatItSaidAndLeavesNothing(
            String name, String code, String message) throws IOException {
        Benchmark benchmark =
                new Benchmark(
                        "toy", settings(), List.of(new Case(name, ToyWorkload.class, null)), 1);

        String said =
                assertThrows(BenchException.class, () -> benchmark.run(what -> {}, temporary))
                        .getMessage();

        assertTrue(said.contains("Case " + name), said);
        assertTrue(said.contains(code), said);
        assertTrue(said.contains(message), said);
        assertFalse(said.contains("\tat "), said);
        assertNothingLeft();
    }

    private static BenchReport.Result result(String name, double seconds, double peak) {
        return result(name, List.of(seconds), peak);
    }

    private static BenchReport.Result result(String name, List<Double> turns, double peak) {
        return new BenchReport.Result(name, turns, peak, 1e-7, Double.NaN, Map.of());
    }

    @Test
    void json_anyReport_hasTheOneForm() {
        BenchReport report =
                new BenchReport(
                        "toy",
                        settings(),
                        List.of(result("stock", 4, 8 << 20), result("ours", 1, 2 << 20)));

        Map<String, Object> json = report.json();

        assertEquals(List.of("bench", "settings", "cases", "ratios"), List.copyOf(json.keySet()));
        Map<?, ?> first = (Map<?, ?>) ((List<?>) json.get("cases")).get(0);
        assertEquals(
                List.of("name", "seconds", "turns", "peak_mb", "loss_rel_error", "grad_rel_error"),
                List.copyOf(first.keySet()));
        assertEquals(8.0, first.get("peak_mb"));
        assertEquals(Map.of("time", 0.25, "peak", 0.25), json.get("ratios"));
        StringWriter text = new StringWriter();
        report.print(new PrintWriter(text, true));
        assertTrue(
                text.toString().contains("ours over stock: time 0.250x, peak 0.250x"),
                text::toString);
    }

    @Test
    void timeRatio_computerSlowsDown_comparesWithinTurns() {
        List<BenchReport.Result> cases =
                List.of(
                        result("stock", List.of(4.0, 4.0, 40.0, 44.0, 40.0), 1),
                        result("ours", List.of(2.0, 2.0, 2.5, 20.0, 20.0), 1));

        BenchReport report = new BenchReport("toy", settings(), cases);

        assertEquals(0.5, report.timeRatio());
        assertEquals(2.5, cases.get(1).seconds());
    }

    @Test
    void ratios_baselineLeftOut_areNaN() {
        BenchReport report = new BenchReport("toy", settings(), List.of(result("ours", 1, 2)));
        assertEquals(Double.NaN, report.timeRatio());
        assertEquals(Double.NaN, report.peakRatio());
    }

    @Test
    void median_oddAndEven_isTheMiddle() {
        assertEquals(3, BenchReport.median(List.of(9.0, 1.0, 3.0)));
        assertEquals(2, BenchReport.median(List.of(9.0, 1.0, 3.0, 0.0)));
        assertEquals(5, BenchReport.median(List.of(5.0)));
    }
}
