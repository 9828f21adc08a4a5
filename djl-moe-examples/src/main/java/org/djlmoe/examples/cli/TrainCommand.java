package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.concurrent.Callable;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.examples.text.TextData;
import org.djlmoe.io.DType;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.WarmupCosineTracker;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;
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

    /** Rows of held-out text for the closing figure. */
    private static final int VALIDATION_ROWS = 256;

    @Mixin private CommonOptions options;
    @Mixin private OutputDirectory out;

    @Option(
            names = "--preset",
            defaultValue = "tiny",
            description =
                    "Sizes of the model: ${COMPLETION-CANDIDATES} (default: ${DEFAULT-VALUE}).")
    private Preset preset;

    @Option(names = "--steps", description = "Updates (default: the preset's).")
    private Integer steps;

    @Option(names = "--batch", description = "Rows a batch (default: the preset's).")
    private Integer batch;

    @Option(
            names = "--language",
            description = "Train on one language only, such as de (default: all of them).")
    private String language;

    @Option(
            names = "--learning-rate",
            defaultValue = "3e-3",
            description = "Highest learning rate (default: ${DEFAULT-VALUE}).")
    private double learningRate;

    @Option(
            names = "--balance",
            defaultValue = "0.01",
            description = "Coefficient of the routers' balance loss (default: ${DEFAULT-VALUE}).")
    private double balance;

    @Override
    public Integer call() throws IOException {
        int updates = steps == null ? preset.steps : steps;
        int rows = batch == null ? preset.batch : batch;
        Arguments.positive("--steps", updates);
        Arguments.positive("--batch", rows);
        Path folder = out.create(Path.of("runs", "train"));
        TextData text = TextData.load(Arguments.language(language), preset.sequence);
        PackedBatches batches = text.train().batches(rows, options.seed());
        float[] losses = new float[updates];
        long start = System.nanoTime();
        try (LanguageModel model =
                LanguageModel.create(preset.config, LanguageModel.Chunks.DEFAULT, options.seed())) {
            train(model, batches, losses);
            double seconds = (System.nanoTime() - start) / 1e9;
            model.save(folder, SaveOptions.builder().optDtype(DType.BF16).build());
            try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
                tokenizer.save(folder);
            }
            Evaluation validation =
                    Evaluation.of(
                            model, text.validation().sample(VALIDATION_ROWS, rows), tokens -> {});
            Report report =
                    new Report(
                            preset.name().toLowerCase(java.util.Locale.ROOT),
                            options.seed(),
                            updates,
                            rows,
                            preset.sequence,
                            model.trainableElements(),
                            validation.loss(),
                            validation.perplexity(),
                            (long) updates * rows * preset.sequence / seconds,
                            seconds,
                            folder.toString(),
                            losses);
            options.text()
                    .printf(
                            "%d weights, %d steps of %d x %d tokens: loss %.4f, validation perplexity"
                                    + " %.3f, %.0f tokens/s%nsaved to %s%n",
                            report.parameters(),
                            updates,
                            rows,
                            preset.sequence,
                            losses[updates - 1],
                            report.validation_perplexity(),
                            report.tokens_per_second(),
                            folder);
            options.writeJson(report);
        }
        return ExitCodes.OK;
    }

    private void train(LanguageModel model, PackedBatches batches, float[] losses) {
        model.train(path -> true);
        model.decoder().moeBlocks().forEach(layer -> layer.setBalanceCoefficient(balance));
        OffloadStreamAdamW optimizer =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(
                                WarmupCosineTracker.builder()
                                        .setPeak(learningRate)
                                        .setUpdates(losses.length)
                                        .optWarmup(losses.length / 20)
                                        .optLast(learningRate / 20)
                                        .build())
                        .optWeightDecay(0.1)
                        .optBlock(model.decoder())
                        .optClipNorm(1)
                        .build();
        try (LanguageModelTrainer trainer =
                        new LanguageModelTrainer(model, optimizer, options.seed());
                ProgressBar bar =
                        options.progress("training", losses.length).optUnit("tokens").build()) {
            for (int step = 0; step < losses.length; step++) {
                TokenBatch tokens = batches.at(step);
                losses[step] = trainer.step(tokens);
                bar.note(String.format(java.util.Locale.ROOT, "loss %.3f", losses[step]));
                bar.advance(1, tokens.tokens());
            }
        } finally {
            optimizer.close();
        }
    }

    record Report(
            String preset,
            long seed,
            int steps,
            int batch,
            int sequence,
            long parameters,
            double validation_loss,
            double validation_perplexity,
            double tokens_per_second,
            double seconds,
            String model,
            float[] losses) {}
}
