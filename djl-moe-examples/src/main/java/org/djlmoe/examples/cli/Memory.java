package org.djlmoe.examples.cli;

import ai.djl.training.tracker.Tracker;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.plan.MemoryBudget;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PeakMeter;
import org.djlmoe.plan.PlanSettings;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;
import picocli.CommandLine.Option;

/** The option {@code --budget} and the plan behind it; a mixin. */
final class Memory {

    private static final double MB = 1 << 20;

    @Option(
            names = "--budget",
            paramLabel = "SIZE",
            description =
                    "Memory that the plan must keep to, such as 900m or 2g: chunks shrink to fit, or the"
                            + " run is refused before it starts (default: no limit).")
    private String budget;

    /**
     * Plans a run: within the budget if there is one.
     *
     * @param config the model
     * @param settings the run; the runtime's own memory is measured now
     * @return the plan
     * @throws org.djlmoe.plan.BudgetExceededException if the run cannot fit
     */
    MemoryPlan plan(MoeConfig config, PlanSettings.Builder settings) {
        warmUp();
        PlanSettings run = settings.optRuntimeBytes(PeakMeter.start().stop().baseBytes()).build();
        return budget == null
                ? MemoryPlan.of(config, run)
                : MemoryPlan.fit(config, run, MemoryBudget.parse(budget));
    }

    /**
     * One step of a minute model. Native libraries, compiled kernels and the buffers of threads
     * belong to the runtime's share, so they must be there when that is measured.
     */
    private static void warmUp() {
        MoeConfig config =
                MoeConfig.builder()
                        .setVocabSize(4)
                        .setHiddenSize(8)
                        .setIntermediateSize(8)
                        .setNumLayers(1)
                        .setNumHeads(2)
                        .setNumExperts(2)
                        .setTopK(1)
                        .build();
        OffloadStreamAdamW optimizer =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(Tracker.fixed(0))
                        .optClipNorm(1)
                        .build();
        try (LanguageModel model = LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, 0);
                LanguageModelTrainer trainer = new LanguageModelTrainer(model, optimizer, 0)) {
            trainer.step(new TokenBatch(1, 2, new int[] {0, 1}, new int[] {1, 2}));
        } finally {
            optimizer.close();
        }
    }

    static LanguageModel.Chunks chunks(MemoryPlan plan) {
        return new LanguageModel.Chunks(
                plan.settings().moeChunkTokens(), plan.settings().vocabBlockTokens());
    }

    static double megabytes(long bytes) {
        return bytes / MB;
    }
}
