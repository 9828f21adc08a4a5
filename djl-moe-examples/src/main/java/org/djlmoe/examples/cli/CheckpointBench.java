package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.bench.Benches;
import org.djlmoe.tier.FileTier;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe bench checkpoint}. */
@Command(
        name = "checkpoint",
        description =
                "Forward and backward of decoder layers: their boundaries in files, in memory, and"
                        + " all that DJL's own trainer holds.",
        footer =
                "%nCases: memory and file-tier (where boundaries lie), slow-tier (files on a disk"
                        + " that takes 0.8 of a layer's time for each), stock (nothing is checkpointed).",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class CheckpointBench implements Callable<Integer> {

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
        Map<String, Object> settings = BenchOptions.settings("file-tier", "memory", options);
        int length = sequence == null ? tokens : sequence;
        Arguments.positive("--sequence", length);
        if (tokens % length != 0) {
            throw new UserError(
                    "--tokens " + tokens + " is no whole number of sequences of " + length);
        }
        BenchOptions.heads(heads, hidden);
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
