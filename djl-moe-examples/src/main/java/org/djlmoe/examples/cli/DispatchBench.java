package org.djlmoe.examples.cli;

import java.io.IOException;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.bench.BenchReport;
import org.djlmoe.examples.bench.Benches;
import org.djlmoe.examples.bench.Case;
import org.djlmoe.examples.bench.PeakFit;
import org.djlmoe.moe.MoeBlock;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe bench dispatch}. */
@Command(
        name = "dispatch",
        description =
                "Forward and backward of a Mixture-of-Experts layer: in chunks, all tokens at"
                        + " once, and by DJL's own automatic differentiation. With --ranks:"
                        + " its experts over several ranks, in one process.",
        footer =
                "%nCases: pipelined (--chunks chunks), k1 (one chunk), stock (DJL's automatic"
                        + " differentiation); over ranks, workload and dispatch, such as \"80/16 standard\".",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class DispatchBench implements Callable<Integer> {

    private static final List<Integer> FITTED = List.of(1, 2, 5, 10, 20);

    @Mixin private CommonOptions options;
    @Mixin private BenchOptions bench;

    @Mixin private RankOptions group;

    @Option(
            names = "--tokens",
            paramLabel = "N",
            description =
                    "Tokens (default: 32768, with --overlap on each rank; with --ranks 2560 on each).")
    private Integer tokens;

    @Option(
            names = "--hidden",
            paramLabel = "N",
            description = "Width of the hidden states (default: 512; with --ranks 64).")
    private Integer hidden;

    @Option(
            names = "--inner",
            paramLabel = "N",
            description = "Width of an expert (default: 1024; with --ranks 40).")
    private Integer inner;

    @Option(
            names = "--experts",
            paramLabel = "N",
            description = "Experts of the layer (default: 16; with --ranks 128).")
    private Integer experts;

    @Option(
            names = "--top-k",
            paramLabel = "N",
            description = "Experts a token (default: 4; with --ranks 8).")
    private Integer topK;

    @Option(
            names = "--chunks",
            paramLabel = "N",
            description =
                    "Chunks of the case pipelined (default: those of MoeBlock; with --ranks 10).")
    private Integer chunks;

    @Option(
            names = "--fit",
            description =
                    "Measure the peak at 1, 2, 5, 10 and 20 chunks too, and fit a + b / chunks.")
    private boolean fit;

    @Override
    public Integer call() throws IOException {
        boolean many = group.areMany();
        if (group.isOverlap()) {
            int seed = (int) BenchOptions.settings("", "", options).get("seed");
            options.writeJson(group.measureOverlap(or(tokens, 32768), seed, bench, options));
            return ExitCodes.OK;
        }
        Map<String, Object> settings =
                many
                        ? BenchOptions.settings("80/16 automatic", "80/16 standard", options)
                        : BenchOptions.settings("pipelined", "k1", options);
        settings.put("tokens", or(tokens, many ? 2560 : 32768));
        settings.put("hidden", or(hidden, many ? 64 : 512));
        settings.put("inner", or(inner, many ? 40 : 1024));
        settings.put("experts", or(experts, many ? 128 : 16));
        settings.put("top-k", or(topK, many ? 8 : 4));
        Arguments.positive("--tokens", (int) settings.get("tokens"));
        settings.put("chunks", or(chunks, many ? 10 : defaultChunks(settings)));
        BenchOptions.positive(settings);
        check(settings);
        if (many) {
            settings.put("ranks", group.ranks());
            options.writeJson(group.measure(settings, bench, options));
            return ExitCodes.OK;
        }
        BenchReport report = bench.measure("dispatch", settings, Benches.dispatch(), options);
        report.print(options.text());
        Map<String, Object> json = report.json();
        if (fit) {
            PeakFit line = fitted(settings);
            line.print(options.text());
            json.put("fit", line.json());
        }
        options.writeJson(json);
        return ExitCodes.OK;
    }

    private static int or(Integer given, int otherwise) {
        return given == null ? otherwise : given;
    }

    private void check(Map<String, Object> settings) {
        int all = (int) settings.get("experts");
        if (all < 2) {
            throw new UserError(
                    "--experts must be at least 2, not "
                            + all
                            + ": with one the router has no choice and no gradient");
        }
        if ((int) settings.get("top-k") > all) {
            throw new UserError("--top-k " + settings.get("top-k") + " is above --experts " + all);
        }
        if (group.ranks() > all) {
            throw new UserError("--ranks " + group.ranks() + " is above --experts " + all);
        }
        if (fit && group.ranks() > 1) {
            throw new UserError("--fit is for one rank: leave out --ranks");
        }
    }

    /** As many as a block of these sizes takes. */
    private static int defaultChunks(Map<String, Object> settings) {
        return MoeBlock.builder()
                .setHiddenSize(1)
                .setIntermediateSize(1)
                .setNumExperts(1)
                .setTopK(1)
                .build()
                .chunks((int) settings.get("tokens"));
    }

    private PeakFit fitted(Map<String, Object> settings) throws IOException {
        List<Case> cases = FITTED.stream().map(Benches::dispatch).toList();
        Map<String, Double> peaks = BenchOptions.peaks("fit", settings, cases, options);
        Map<Integer, Double> byChunks = new LinkedHashMap<>();
        for (int i = 0; i < cases.size(); i++) {
            byChunks.put(FITTED.get(i), peaks.get(cases.get(i).name()));
        }
        return PeakFit.of(byChunks);
    }
}
