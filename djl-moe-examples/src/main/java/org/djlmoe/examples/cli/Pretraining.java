package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
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
import org.djlmoe.training.TrainingCheckpoint;
import org.djlmoe.training.TrainingState;

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
            int resumed_from,
            float[] losses) {}

    /**
     * Trains.
     *
     * @param language the language of the text, or null for all
     * @param folder where the checkpoint goes
     * @param memory the budget
     * @param saved whether the state is saved meanwhile, or there is one to go on from
     * @param options seed and progress
     * @return the figures
     * @throws IOException if the text cannot be read or the checkpoint cannot be written
     */
    Report run(
            Language language, Path folder, Memory memory, SavedStates saved, CommonOptions options)
            throws IOException {
        Map<String, String> settings = settings(language, options.seed());
        Optional<TrainingCheckpoint> last = saved.start(folder, settings);
        TextData text = TextData.load(language, preset.sequence);
        PackedBatches batches = text.train().batches(batch, options.seed());
        MemoryPlan plan =
                memory.plan(
                        preset.config,
                        PlanSettings.builder().setBatch(batch).setSequence(preset.sequence));
        if (options.verbose()) {
            options.text().print(plan);
        }
        LanguageModel.Chunks chunks = SavedStates.chunks(last, plan, settings);
        float[] losses = new float[steps];
        int from = last.isEmpty() ? 0 : (int) last.get().state().step();
        if (from > 0) {
            System.arraycopy(last.get().state().losses(), 0, losses, 0, from);
        }
        try (PeakMeter meter = PeakMeter.start();
                LanguageModel model = model(last, chunks, options.seed())) {
            long start = System.nanoTime();
            Run run = new Run(model, batches, losses, folder, saved, settings, options);
            train(run, last);
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
                    (double) (steps - from) * batch * preset.sequence / seconds,
                    seconds,
                    Memory.megabytes(peak),
                    Memory.megabytes(plan.peakBytes()),
                    folder.toString(),
                    from,
                    losses);
        }
    }

    /** What decides the run besides the text; what is not here may change when it goes on. */
    private Map<String, String> settings(Language language, long seed) {
        Map<String, String> settings = new TreeMap<>();
        settings.put("--preset", preset.name().toLowerCase(Locale.ROOT));
        settings.put("--steps", Integer.toString(steps));
        settings.put("--batch", Integer.toString(batch));
        settings.put("--language", language == null ? "all" : language.code());
        settings.put("--learning-rate", Double.toString(learningRate));
        settings.put("--balance", Double.toString(balance));
        settings.put("--seed", Long.toString(seed));
        return settings;
    }

    private LanguageModel model(
            Optional<TrainingCheckpoint> last, LanguageModel.Chunks chunks, long seed)
            throws IOException {
        return last.isEmpty()
                ? LanguageModel.create(preset.config, chunks, seed)
                : SavedStates.explained(() -> last.get().loadModel(chunks));
    }

    private record Run(
            LanguageModel model,
            PackedBatches batches,
            float[] losses,
            Path folder,
            SavedStates saved,
            Map<String, String> settings,
            CommonOptions options) {}

    private void train(Run run, Optional<TrainingCheckpoint> last) throws IOException {
        LanguageModel model = run.model;
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
                        new LanguageModelTrainer(model, optimizer, run.options.seed());
                StageProgress progress = new StageProgress(run.options)) {
            if (last.isPresent()) {
                SavedStates.explained(() -> last.get().restore(model, optimizer, trainer));
                progress.after("training", (int) trainer.batches());
            }
            for (int step = (int) trainer.batches(); step < steps; step++) {
                TokenBatch tokens = run.batches.at(step);
                run.losses[step] = trainer.step(tokens);
                progress.step("training", step + 1, steps, tokens.tokens(), run.losses[step]);
                if (run.saved.due(step + 1)) {
                    save(run, optimizer, step + 1);
                }
            }
        } finally {
            optimizer.close();
        }
    }

    private static void save(Run run, OffloadStreamAdamW optimizer, int step) throws IOException {
        TrainingState state =
                new TrainingState(
                        step, run.options.seed(), Arrays.copyOf(run.losses, step), run.settings);
        run.saved.in(run.folder).save(run.model, optimizer, state);
    }
}
