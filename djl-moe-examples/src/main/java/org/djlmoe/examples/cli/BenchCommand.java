package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.bench.BenchReport;
import org.djlmoe.examples.bench.Benches;
import org.djlmoe.examples.bench.Case;
import org.djlmoe.examples.bench.OptimizerWorkload;
import org.djlmoe.examples.bench.PeakFit;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.tier.FileTier;
import org.djlmoe.tier.MappedFileTier;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Model.CommandSpec;
import picocli.CommandLine.Option;
import picocli.CommandLine.ParameterException;
import picocli.CommandLine.Spec;

/**
 * {@code moe bench}: time, memory and exactness of the operators beside what DJL does by itself.
 */
@Command(
        name = "bench",
        description =
                "Measure an operator beside what DJL code does without it, every case in a Java"
                        + " virtual machine of its own.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        synopsisSubcommandLabel = "BENCH",
        subcommands = {
            BenchCommand.Vocab.class,
            BenchCommand.Dispatch.class,
            BenchCommand.Checkpoint.class,
            BenchCommand.Optimizer.class,
            BenchCommand.DropIn.class
        })
final class BenchCommand implements Runnable {

    @Spec private CommandSpec spec;

    @Override
    public void run() {
        throw new ParameterException(spec.commandLine(), "a benchmark is missing");
    }

    private static Map<String, Object> settings(
            String ours, String baseline, CommonOptions options) {
        if ((int) options.seed() != options.seed()) {
            throw new UserError("--seed must be a number of 32 bits, not " + options.seed());
        }
        Map<String, Object> settings = new LinkedHashMap<>();
        settings.put("ours", ours);
        settings.put("baseline", baseline);
        settings.put("seed", (int) options.seed());
        return settings;
    }

    private static void heads(int heads, int hidden) {
        Arguments.positive("--heads", heads);
        if (hidden % (2 * heads) != 0) {
            throw new UserError(
                    "--hidden " + hidden + " must be an even multiple of --heads " + heads);
        }
    }

    @Command(
            name = "vocab",
            description =
                    "Vocabulary projection and cross-entropy with gradients: RingDtpLoss beside"
                            + " Linear and SoftmaxCrossEntropyLoss.",
            mixinStandardHelpOptions = true,
            versionProvider = Moe.Version.class,
            sortOptions = false)
    static final class Vocab implements Callable<Integer> {

        @Mixin private CommonOptions options;
        @Mixin private BenchOptions bench;

        @Option(
                names = "--tokens",
                paramLabel = "N",
                defaultValue = "8192",
                description = "Tokens (default: ${DEFAULT-VALUE}).")
        private int tokens;

        @Option(
                names = "--hidden",
                paramLabel = "N",
                defaultValue = "512",
                description = "Width of the hidden states (default: ${DEFAULT-VALUE}).")
        private int hidden;

        @Option(
                names = "--vocab",
                paramLabel = "N",
                defaultValue = "32000",
                description = "Size of the vocabulary (default: ${DEFAULT-VALUE}).")
        private int vocab;

        @Option(
                names = "--block",
                paramLabel = "N",
                defaultValue = "512",
                description = "Tokens that have logits at a time (default: 512).")
        private int block;

        @Override
        public Integer call() throws IOException {
            Map<String, Object> settings = settings("ours", "stock", options);
            settings.put("tokens", tokens);
            settings.put("hidden", hidden);
            settings.put("vocab", vocab);
            settings.put("block", block);
            return bench.run("vocab", settings, Benches.vocab(), options);
        }
    }

    @Command(
            name = "dispatch",
            description =
                    "Forward and backward of a Mixture-of-Experts layer: in chunks, all tokens at"
                            + " once, and by DJL's own automatic differentiation. With --ranks:"
                            + " its experts over several ranks, in one process.",
            mixinStandardHelpOptions = true,
            versionProvider = Moe.Version.class,
            sortOptions = false)
    static final class Dispatch implements Callable<Integer> {

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
                int seed = (int) settings("", "", options).get("seed");
                options.writeJson(group.measureOverlap(or(tokens, 32768), seed, bench, options));
                return ExitCodes.OK;
            }
            Map<String, Object> settings =
                    many
                            ? settings("80/16 automatic", "80/16 standard", options)
                            : settings("pipelined", "k1", options);
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
                throw new UserError(
                        "--top-k " + settings.get("top-k") + " is above --experts " + all);
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

    @Command(
            name = "checkpoint",
            description =
                    "Forward and backward of decoder layers: their boundaries in files, in memory, and"
                            + " all that DJL's own trainer holds.",
            mixinStandardHelpOptions = true,
            versionProvider = Moe.Version.class,
            sortOptions = false)
    static final class Checkpoint implements Callable<Integer> {

        @Mixin private CommonOptions options;
        @Mixin private BenchOptions bench;

        @Option(
                names = "--tokens",
                paramLabel = "N",
                defaultValue = "32768",
                description = "Tokens (default: ${DEFAULT-VALUE}).")
        private int tokens;

        @Option(
                names = "--sequence",
                paramLabel = "N",
                description = "Tokens a sequence (default: all).")
        private Integer sequence;

        @Option(
                names = "--hidden",
                paramLabel = "N",
                defaultValue = "512",
                description = "Width of the hidden states (default: ${DEFAULT-VALUE}).")
        private int hidden;

        @Option(
                names = "--layers",
                paramLabel = "N",
                defaultValue = "4",
                description = "Layers (default: ${DEFAULT-VALUE}).")
        private int layers;

        @Option(
                names = "--heads",
                paramLabel = "N",
                defaultValue = "8",
                description = "Attention heads (default: ${DEFAULT-VALUE}).")
        private int heads;

        @Option(
                names = "--window",
                paramLabel = "N",
                defaultValue = "512",
                description = "Tokens that a token sees (default: ${DEFAULT-VALUE}).")
        private int window;

        @Option(
                names = "--intermediate",
                paramLabel = "N",
                defaultValue = "1024",
                description = "Inner width of the SwiGLU (default: 1024).")
        private int intermediate;

        @Option(
                names = "--tier",
                paramLabel = "DIR",
                defaultValue = "${sys:java.io.tmpdir}",
                description = "Where boundaries are stored, on a disk (default: ${DEFAULT-VALUE}).")
        private Path tier;

        @Override
        public Integer call() throws IOException {
            Map<String, Object> settings = settings("file-tier", "memory", options);
            int length = sequence == null ? tokens : sequence;
            Arguments.positive("--sequence", length);
            if (tokens % length != 0) {
                throw new UserError(
                        "--tokens " + tokens + " is no whole number of sequences of " + length);
            }
            heads(heads, hidden);
            // Known before the first case has run, not after minutes.
            new FileTier(tier).close();
            settings.put("tokens", tokens);
            settings.put("sequence", length);
            settings.put("hidden", hidden);
            settings.put("layers", layers);
            settings.put("heads", heads);
            settings.put("window", window);
            settings.put("intermediate", intermediate);
            settings.put("tier", tier.toString());
            return bench.run("checkpoint", settings, Benches.checkpoint(), options);
        }
    }

    @Command(
            name = "optimizer",
            description =
                    "A step of AdamW: OffloadStreamAdamW with its state in memory and in files beside"
                            + " DJL's AdamW and PyTorch's bare fused kernel.",
            mixinStandardHelpOptions = true,
            versionProvider = Moe.Version.class,
            sortOptions = false)
    static final class Optimizer implements Callable<Integer> {

        @Mixin private CommonOptions options;
        @Mixin private BenchOptions bench;

        @Option(
                names = "--parameters",
                paramLabel = "N",
                defaultValue = "100000000",
                description = "Elements in all (default: ${DEFAULT-VALUE}).")
        private int parameters;

        @Option(
                names = "--array",
                paramLabel = "N",
                defaultValue = "25000000",
                description =
                        "Elements of one weight, such as a stack of experts (default: ${DEFAULT-VALUE}).")
        private int array;

        @Option(
                names = "--bucket",
                paramLabel = "N",
                description = "Elements of a bucket (default: the optimizer's own).")
        private Integer bucket;

        @Option(
                names = "--tier",
                paramLabel = "DIR",
                defaultValue = "${sys:java.io.tmpdir}",
                description = "Where state is stored, on a disk (default: ${DEFAULT-VALUE}).")
        private Path tier;

        @Override
        public Integer call() throws IOException {
            Map<String, Object> settings =
                    settings(OptimizerWorkload.MEMORY, OptimizerWorkload.DJL, options);
            // Known before the first case has run, not after minutes.
            new MappedFileTier(tier).close();
            settings.put("parameters", parameters);
            settings.put("array", array);
            if (bucket != null) {
                settings.put("bucket", bucket);
            }
            settings.put("tier", tier.toString());
            settings.put("pairs", Benches.optimizerPairs());
            return bench.run("optimizer", settings, Benches.optimizer(), options);
        }
    }

    @Command(
            name = "dropin",
            description =
                    "A training step of the language model of docs/drop-in.md: changed, and as it was.",
            mixinStandardHelpOptions = true,
            versionProvider = Moe.Version.class,
            sortOptions = false)
    static final class DropIn implements Callable<Integer> {

        @Mixin private CommonOptions options;
        @Mixin private BenchOptions bench;

        @Option(
                names = "--batch",
                paramLabel = "N",
                defaultValue = "16",
                description = "Sequences (default: 16).")
        private int batch;

        @Option(
                names = "--sequence",
                paramLabel = "N",
                defaultValue = "256",
                description = "Tokens a sequence (default: 256).")
        private int sequence;

        @Option(
                names = "--hidden",
                paramLabel = "N",
                defaultValue = "256",
                description = "Width of the hidden states (default: ${DEFAULT-VALUE}).")
        private int hidden;

        @Option(
                names = "--layers",
                paramLabel = "N",
                defaultValue = "2",
                description = "Layers (default: ${DEFAULT-VALUE}).")
        private int layers;

        @Option(
                names = "--heads",
                paramLabel = "N",
                defaultValue = "4",
                description = "Attention heads (default: ${DEFAULT-VALUE}).")
        private int heads;

        @Option(
                names = "--vocab",
                paramLabel = "N",
                defaultValue = "32000",
                description = "Size of the vocabulary (default: ${DEFAULT-VALUE}).")
        private int vocab;

        @Override
        public Integer call() throws IOException {
            Map<String, Object> settings = settings("ours", "stock", options);
            heads(heads, hidden);
            settings.put("batch", batch);
            settings.put("sequence", sequence);
            settings.put("hidden", hidden);
            settings.put("layers", layers);
            settings.put("heads", heads);
            settings.put("vocab", vocab);
            return bench.run("dropin", settings, Benches.dropIn(), options);
        }
    }
}
