package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Locale;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.examples.text.Language;
import org.djlmoe.examples.text.TextData;
import org.djlmoe.io.DType;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.WarmupCosineTracker;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PeakMeter;
import org.djlmoe.plan.PlanSettings;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;

/**
 * Trains a preset from scratch and saves it in BF16.
 *
 * @param preset sizes
 * @param steps updates
 * @param batch rows a batch
 * @param learningRate highest learning rate
 * @param balance coefficient of the routers' balance loss
 */
record Pretraining(Preset preset, int steps, int batch, double learningRate, double balance) {

    static final double LEARNING_RATE = 3e-3;
    static final double BALANCE = 0.01;

    /** Rows of held-out text for the closing figure. */
    private static final int VALIDATION_ROWS = 256;

    /** What {@code --json} writes. */
    record Report(
            String preset,
            long seed,
            int steps,
            int batch,
            int sequence,
            double learning_rate,
            double balance,
            long parameters,
            double validation_loss,
            double validation_perplexity,
            double tokens_per_second,
            double seconds,
            double peak_mb,
            double planned_peak_mb,
            String model,
            float[] losses) {}

    /**
     * Trains.
     *
     * @param language the language of the text, or null for all
     * @param folder where the checkpoint goes
     * @param memory the budget
     * @param options seed and progress
     * @return the figures
     * @throws IOException if the text cannot be read or the checkpoint cannot be written
     */
    Report run(Language language, Path folder, Memory memory, CommonOptions options)
            throws IOException {
        TextData text = TextData.load(language, preset.sequence);
        PackedBatches batches = text.train().batches(batch, options.seed());
        MemoryPlan plan =
                memory.plan(
                        preset.config,
                        PlanSettings.builder().setBatch(batch).setSequence(preset.sequence));
        if (options.verbose()) {
            options.text().print(plan);
        }
        float[] losses = new float[steps];
        try (PeakMeter meter = PeakMeter.start();
                LanguageModel model =
                        LanguageModel.create(preset.config, Memory.chunks(plan), options.seed())) {
            long start = System.nanoTime();
            train(model, batches, losses, options);
            double seconds = (System.nanoTime() - start) / 1e9;
            long peak = meter.stop().peakBytes();
            // One from an earlier run into this folder would be applied to these weights.
            ExpertPrior.delete(folder);
            model.save(folder, SaveOptions.builder().optDtype(DType.BF16).build());
            try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
                tokenizer.save(folder);
            }
            Evaluation validation =
                    Evaluation.of(
                            model, text.validation().sample(VALIDATION_ROWS, batch), tokens -> {});
            return new Report(
                    preset.name().toLowerCase(Locale.ROOT),
                    options.seed(),
                    steps,
                    batch,
                    preset.sequence,
                    learningRate,
                    balance,
                    model.trainableElements(),
                    validation.loss(),
                    validation.perplexity(),
                    (double) steps * batch * preset.sequence / seconds,
                    seconds,
                    Memory.megabytes(peak),
                    Memory.megabytes(plan.peakBytes()),
                    folder.toString(),
                    losses);
        }
    }

    private void train(
            LanguageModel model, PackedBatches batches, float[] losses, CommonOptions options) {
        model.train(path -> true);
        model.decoder().moeBlocks().forEach(layer -> layer.setBalanceCoefficient(balance));
        OffloadStreamAdamW optimizer =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(
                                WarmupCosineTracker.builder()
                                        .setPeak(learningRate)
                                        .setUpdates(steps)
                                        .optWarmup(steps / 20)
                                        .optLast(learningRate / 20)
                                        .build())
                        .optWeightDecay(0.1)
                        .optBlock(model.decoder())
                        .optClipNorm(1)
                        .build();
        try (LanguageModelTrainer trainer =
                        new LanguageModelTrainer(model, optimizer, options.seed());
                StageProgress progress = new StageProgress(options)) {
            for (int step = 0; step < steps; step++) {
                TokenBatch tokens = batches.at(step);
                losses[step] = trainer.step(tokens);
                progress.step("training", step + 1, steps, tokens.tokens(), losses[step]);
            }
        } finally {
            optimizer.close();
        }
    }
}
