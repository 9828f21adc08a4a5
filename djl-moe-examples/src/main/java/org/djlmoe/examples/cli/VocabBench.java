package org.djlmoe.examples.cli;

import java.io.IOException;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.bench.Benches;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe bench vocab}. */
@Command(
        name = "vocab",
        description =
                "Vocabulary projection and cross-entropy with gradients: RingDtpLoss beside"
                        + " Linear and SoftmaxCrossEntropyLoss.",
        footer =
                "%nCases: ours and stock (mean), ours-none (a loss for each token),"
                        + " ours-all-options.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class VocabBench implements Callable<Integer> {

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
        Map<String, Object> settings = BenchOptions.settings("ours", "stock", options);
        settings.put("tokens", tokens);
        settings.put("hidden", hidden);
        settings.put("vocab", vocab);
        settings.put("block", block);
        return bench.run("vocab", settings, Benches.vocab(), options);
    }
}
