package org.djlmoe.examples.cli;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.bench.Case;
import org.djlmoe.examples.bench.ToyWorkload;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;

class BenchCommandTest {

    private final StringWriter out = new StringWriter();
    private final StringWriter err = new StringWriter();

    private int moe(String line) {
        return Moe.run(new PrintWriter(out), new PrintWriter(err), line.split(" "));
    }

    @ParameterizedTest
    @CsvSource({
        "vocab --tokens 40 --hidden 8 --vocab 30 --block 16, 4, 1e-5",
        "checkpoint --tokens 64 --hidden 16 --layers 2 --heads 2 --window 16 --intermediate 24, 4, 1e-5",
        "dispatch --tokens 60 --hidden 8 --inner 12 --experts 5 --top-k 2 --chunks 3 --fit, 3, 1e-5",
        // the scale of a norm before another norm has next to no gradient, mostly rounding
        "dropin --batch 2 --sequence 8 --hidden 16 --layers 2 --heads 2 --vocab 50, 2, 1e-4",
        "optimizer --parameters 1000 --array 300 --bucket 128, 10, 1e-3"
    })
    void bench_smallShape_givesTheFormOfJsonAndErrorsOfRounding(
            String line, int cases, double tolerance) {
        int code = moe("bench " + line + " --runs 1 --quiet --json -");

        assertEquals(ExitCodes.OK, code, err::toString);
        JsonObject report = JsonParser.parseString(out.toString()).getAsJsonObject();
        assertEquals(line.split(" ")[0], report.get("bench").getAsString());
        String baseline = report.getAsJsonObject("settings").get("baseline").getAsString();
        Map<String, String> baselines =
                Map.of("checkpoint", "memory", "dispatch", "k1", "optimizer", "djl-adamw");
        assertEquals(baselines.getOrDefault(line.split(" ")[0], "stock"), baseline);
        if (line.contains("--fit")) {
            assertEquals(5, report.getAsJsonObject("fit").getAsJsonArray("peaks").size());
        }
        assertEquals(cases, report.getAsJsonArray("cases").size());
        int compared = 0;
        for (JsonElement element : report.getAsJsonArray("cases")) {
            JsonObject row = element.getAsJsonObject();
            assertTrue(row.get("seconds").getAsDouble() > 0, row::toString);
            assertTrue(row.get("peak_mb").getAsDouble() >= 0, row::toString);
            if (!row.get("loss_rel_error").isJsonNull()) {
                compared++;
                assertTrue(row.get("loss_rel_error").getAsDouble() < 1e-6, row::toString);
                assertTrue(row.get("grad_rel_error").getAsDouble() < tolerance, row::toString);
            }
        }
        assertTrue(compared >= 1);
        assertTrue(report.getAsJsonObject("ratios").get("time").getAsDouble() > 0);
    }

    private JsonObject json(String line) {
        int code = moe(line + " --runs 1 --quiet --json -");

        assertEquals(ExitCodes.OK, code, err::toString);
        return JsonParser.parseString(out.toString()).getAsJsonObject();
    }

    @Test
    void benchDispatch_ranks_everyWorkloadAndModeIsExactAndWithinBounds() {
        JsonObject report =
                json(
                        "bench dispatch --ranks 4 --tokens 200 --hidden 8 --inner 6 --experts 32"
                                + " --top-k 4 --chunks 5");

        assertEquals("dispatch", report.get("bench").getAsString());
        assertEquals(4, report.getAsJsonObject("settings").get("ranks").getAsInt());
        assertEquals(45, report.getAsJsonArray("cases").size());
        for (JsonElement element : report.getAsJsonArray("cases")) {
            JsonObject row = element.getAsJsonObject();
            assertTrue(row.get("seconds").getAsDouble() > 0, row::toString);
            assertTrue(row.get("peak_mb").getAsDouble() > 0, row::toString);
            assertTrue(row.get("row_mb_sent").getAsDouble() > 0, row::toString);
            assertTrue(row.get("loss_rel_error").getAsDouble() < 1e-5, row::toString);
            assertTrue(row.get("grad_rel_error").getAsDouble() < 1e-5, row::toString);
            boolean held = row.get("bound_held").getAsDouble() == 1;
            boolean below = row.get("receive_over_bound").getAsDouble() <= 1;
            assertEquals(held, below, row::toString);
            if (row.get("name").getAsString().endsWith("automatic")) {
                assertTrue(held, row::toString);
            }
        }
        JsonObject ratios = report.getAsJsonObject("ratios");
        assertTrue(ratios.get("worst_over_balanced").getAsDouble() >= 1);
        assertTrue(ratios.get("standard_80_16_over_balanced").getAsDouble() > 1);
        assertTrue(ratios.get("time").getAsDouble() > 0);
        assertEquals(256, report.getAsJsonObject("planner").get("experts").getAsInt());
        assertTrue(err.toString().contains("worst rank's peak over all workloads, automatic:"));
    }

    @Test
    void benchDispatch_chosenWorkloadsAndModes_runAlone() {
        JsonObject report =
                json(
                        "bench dispatch --ranks 2 --tokens 50 --hidden 8 --inner 6 --experts 8"
                                + " --top-k 2 --chunks 5 --workloads 50/4 --cases standard,automatic");

        List<String> names =
                report.getAsJsonArray("cases").asList().stream()
                        .map(c -> c.getAsJsonObject().get("name").getAsString())
                        .toList();
        assertEquals(List.of("50/4 standard", "50/4 automatic"), names);
        assertTrue(report.getAsJsonObject("ratios").get("worst_over_balanced").isJsonNull());
    }

    @Test
    void benchDispatch_overlap_givesBothDirections() {
        JsonObject report = json("bench dispatch --overlap --tokens 200");

        assertEquals(6, report.getAsJsonArray("cases").size());
        JsonObject ratios = report.getAsJsonObject("ratios");
        for (String name :
                List.of(
                        "forward_pipelined",
                        "forward_serial",
                        "backward_pipelined",
                        "backward_serial")) {
            assertTrue(ratios.get(name).getAsDouble() > 0, name);
        }
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            value = {
                "bench | moe bench: a benchmark is missing (see moe bench --help)",
                "bench vocab --tokens 0 | moe bench vocab: --tokens must be at least 1, not 0",
                "bench vocab --runs 0 | moe bench vocab: --runs must be at least 1, not 0",
                "bench vocab --cases mine | moe bench vocab: --cases: there is no case mine; there are"
                        + " ours, stock, ours-none, ours-all-options",
                "bench checkpoint --tokens 10 --sequence 3 | moe bench checkpoint: --tokens 10 is no"
                        + " whole number of sequences of 3",
                "bench dispatch --top-k 3 --experts 2 | moe bench dispatch: --top-k 3 is above --experts"
                        + " 2",
                "bench dispatch --ranks 9 --experts 8 | moe bench dispatch: --ranks 9 is above --experts"
                        + " 8",
                "bench dispatch --ranks 2 --cases k1 | moe bench dispatch: --cases: there is no case"
                        + " k1; there are standard, least-loaded, pipelined-strided, pipelined-dealt,"
                        + " automatic",
                "bench dispatch --ranks 2 --workloads odd | moe bench dispatch: --workloads: no workload"
                        + " is called 'odd': choose one of balanced, 30/16, 50/16, 80/16, 95/16, 30/4,"
                        + " 50/4, periodic, rotating",
                "bench dispatch --workloads 30/4 | moe bench dispatch: --workloads needs --ranks of 2 or"
                        + " more",
                "bench dispatch --ranks 2 --fit | moe bench dispatch: --fit is for one rank: leave out"
                        + " --ranks",
                "bench dispatch --ranks 2 --overlap | moe bench dispatch: --overlap has two ranks of its"
                        + " own: leave out --ranks",
                "bench dispatch --top-k 1 --experts 1 | moe bench dispatch: --experts must be at least 2,"
                        + " not 1: with one the router has no choice and no gradient",
                "bench dispatch --chunks 0 | moe bench dispatch: --chunks must be at least 1, not 0",
                "bench dropin --hidden 10 --heads 4 | moe bench dropin: --hidden 10 must be an even"
                        + " multiple of --heads 4"
            })
    void bench_wrongArguments_returnsTwoAndOneLine(String line, String message) {
        assertEquals(ExitCodes.USAGE, moe(line));
        assertEquals(message + "\n", err.toString());
    }

    @Test
    void bench_caseFails_returnsOneAndSaysWhy() {
        int code =
                Moe.run(
                        List.of(new Toy()),
                        new PrintWriter(out),
                        new PrintWriter(err),
                        "toy",
                        "--quiet");

        assertEquals(ExitCodes.FAILURE, code);
        assertTrue(
                err.toString()
                        .startsWith(
                                "moe toy: failed: BenchException: Case broken-start ended with exit"
                                        + " code 1"),
                err::toString);
        assertTrue(err.toString().contains("no start today"), err::toString);
        assertEquals(1, err.toString().lines().count());
        assertEquals("", out.toString());
    }

    @Command(name = "toy", mixinStandardHelpOptions = true)
    static final class Toy implements Callable<Integer> {

        @Mixin private CommonOptions options;
        @Mixin private BenchOptions bench;

        @Override
        public Integer call() throws IOException {
            return bench.run(
                    "toy",
                    Map.of("ours", "ours"),
                    List.of(new Case("broken-start", ToyWorkload.class, null)),
                    options);
        }
    }
}
