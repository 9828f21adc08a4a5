package org.djlmoe.examples.cli;

import org.djlmoe.model.MoeConfig;
import org.djlmoe.plan.MemoryBudget;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PeakMeter;
import org.djlmoe.plan.PlanSettings;
import org.djlmoe.training.LanguageModel;
import picocli.CommandLine.Option;

/** The option {@code --budget} and the plan behind it; a mixin. */
final class Memory {

    private static final double MB = 1 << 20;

    @Option(
            names = "--budget",
            paramLabel = "SIZE",
            description =
                    "Most memory the process may take, such as 900m or 2g: chunks shrink to fit, or the"
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
        PlanSettings run = settings.optRuntimeBytes(PeakMeter.start().stop().baseBytes()).build();
        return budget == null
                ? MemoryPlan.of(config, run)
                : MemoryPlan.fit(config, run, MemoryBudget.parse(budget));
    }

    static LanguageModel.Chunks chunks(MemoryPlan plan) {
        return new LanguageModel.Chunks(
                plan.settings().moeChunkTokens(), plan.settings().vocabBlockTokens());
    }

    static double megabytes(long bytes) {
        return bytes / MB;
    }
}
