package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Locale;
import java.util.concurrent.Callable;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe train}: trains a model from scratch on the parliament transcripts. */
@Command(
        name = "train",
        description = "Train a Mixtral-style model from scratch on the parliament transcripts.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class TrainCommand implements Callable<Integer> {

    @Mixin private CommonOptions options;
    @Mixin private OutputDirectory out;
    @Mixin private Memory memory;
    @Mixin private SavedStates saved;

    @Option(
            names = "--preset",
            paramLabel = "PRESET",
            defaultValue = "tiny",
            description =
                    "Sizes of the model: ${COMPLETION-CANDIDATES} (default: ${DEFAULT-VALUE}).")
    private Preset preset;

    @Option(names = "--steps", paramLabel = "N", description = "Updates (default: the preset's).")
    private Integer steps;

    @Option(
            names = "--batch",
            paramLabel = "N",
            description = "Rows a batch (default: the preset's).")
    private Integer batch;

    @Option(
            names = "--language",
            paramLabel = "CODE",
            description = "Train on one language only, such as de (default: all of them).")
    private String language;

    @Option(
            names = "--learning-rate",
            paramLabel = "RATE",
            defaultValue = "" + Pretraining.LEARNING_RATE,
            description = "Highest learning rate (default: ${DEFAULT-VALUE}).")
    private double learningRate;

    @Option(
            names = "--balance",
            paramLabel = "X",
            defaultValue = "" + Pretraining.BALANCE,
            description = "Coefficient of the routers' balance loss (default: ${DEFAULT-VALUE}).")
    private double balance;

    @Override
    public Integer call() throws IOException {
        int updates = steps == null ? preset.steps : steps;
        int rows = batch == null ? preset.batch : batch;
        Arguments.positive("--steps", updates);
        Arguments.positive("--batch", rows);
        Arguments.positive("--learning-rate", learningRate);
        saved.check();
        Path folder = out.create(Path.of("runs", "train"));
        options.keepJsonOutside(folder);
        Pretraining.Report report =
                new Pretraining(preset, updates, rows, learningRate, balance)
                        .run(Arguments.language(language), folder, memory, saved, options);
        if (report.resumed_from() > 0) {
            options.text().printf("went on after step %d%n", report.resumed_from());
        }
        options.text()
                .printf(
                        Locale.ROOT,
                        "%d weights, %d steps of %d x %d tokens: last loss %.4f, validation perplexity"
                                + " %.3f%n%.0f tokens/s; memory peak %.0f MB, planned %.0f MB%nsaved"
                                + " to %s%n",
                        report.parameters(),
                        report.steps(),
                        report.batch(),
                        report.sequence(),
                        report.losses()[updates - 1],
                        report.validation_perplexity(),
                        report.tokens_per_second(),
                        report.peak_mb(),
                        report.planned_peak_mb(),
                        report.model());
        options.writeJson(report);
        return ExitCodes.OK;
    }
}
