package org.djlmoe.examples.cli;

import java.io.IOException;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.bench.Benches;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe bench dropin}. */
@Command(
        name = "dropin",
        description =
                "A training step of the language model of docs/drop-in.md: changed, and as it was.",
        footer = "%nCases: stock (the program as it was) and ours (as changed).",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class DropInBench implements Callable<Integer> {

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
        Map<String, Object> settings = BenchOptions.settings("ours", "stock", options);
        BenchOptions.heads(heads, hidden);
        settings.put("batch", batch);
        settings.put("sequence", sequence);
        settings.put("hidden", hidden);
        settings.put("layers", layers);
        settings.put("heads", heads);
        settings.put("vocab", vocab);
        return bench.run("dropin", settings, Benches.dropIn(), options);
    }
}
