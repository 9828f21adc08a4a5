package org.djlmoe.integration;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Map;
import java.util.Optional;
import java.util.stream.IntStream;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.optimizer.IdleExperts;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.WarmupCosineTracker;
import org.djlmoe.training.ExpertTokens;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;
import org.djlmoe.training.TrainingCheckpoint;
import org.djlmoe.training.TrainingCheckpoints;
import org.djlmoe.training.TrainingState;

/**
 * The process that {@link ResumeAfterKillTest} kills: goes on from the last checkpoint, and says
 * what it does: {@code step N BITS} with the bits of the loss, {@code saving N}, {@code saved N}.
 *
 * <p>Arguments: the folder of the checkpoints; the number of steps.
 */
final class KilledRun {

    static final int SAVE_EVERY = 2;
    private static final long SEED = 11;

    private KilledRun() {}

    public static void main(String[] arguments) throws IOException {
        int steps = Integer.parseInt(arguments[1]);
        TrainingCheckpoints checkpoints = new TrainingCheckpoints(Path.of(arguments[0]), 1);
        Optional<TrainingCheckpoint> last = checkpoints.latest();
        PackedBatches batches =
                PackedTokens.of(IntStream.range(0, 500).map(i -> i * i % 97).toArray(), 8)
                        .batches(2, SEED);
        try (LanguageModel model =
                        last.isPresent()
                                ? last.get().loadModel(LanguageModel.Chunks.DEFAULT)
                                : LanguageModel.create(
                                        config(), LanguageModel.Chunks.DEFAULT, SEED);
                ExpertTokens tokens = ExpertTokens.observe(model.decoder());
                OffloadStreamAdamW optimizer =
                        OffloadStreamAdamW.builder()
                                .setLearningRateTracker(
                                        WarmupCosineTracker.builder()
                                                .setPeak(0.01)
                                                .setUpdates(steps)
                                                .optWarmup(10)
                                                .build())
                                .optClipNorm(1)
                                .optIdleExperts(IdleExperts.SKIP, tokens::take)
                                .build()) {
            model.train(path -> true);
            try (LanguageModelTrainer trainer = new LanguageModelTrainer(model, optimizer, SEED)) {
                float[] losses = new float[0];
                if (last.isPresent()) {
                    last.get().restore(model, optimizer, trainer);
                    losses = last.get().state().losses();
                }
                for (int step = (int) trainer.batches(); step < steps; step++) {
                    losses = Arrays.copyOf(losses, step + 1);
                    losses[step] = trainer.step(batches.at(step));
                    say("step " + step + " " + Float.floatToRawIntBits(losses[step]));
                    if ((step + 1) % SAVE_EVERY == 0) {
                        say("saving " + step);
                        checkpoints.save(
                                model,
                                optimizer,
                                new TrainingState(step + 1, SEED, losses, Map.of()));
                        say("saved " + step);
                    }
                }
            }
        }
    }

    private static MoeConfig config() {
        return MoeConfig.builder()
                .setVocabSize(97)
                .setHiddenSize(32)
                .setIntermediateSize(64)
                .setNumLayers(2)
                .setNumHeads(2)
                .setNumExperts(8)
                .setTopK(1)
                .build();
    }

    private static void say(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
