package org.djlmoe.plan;

import java.util.Optional;
import java.util.function.IntFunction;
import org.djlmoe.model.MoeConfig;

/** Looks for settings that fit a budget: chunk sizes first, then what else would have to change. */
final class BudgetSearch {

    private static final int SMALLEST = 16;
    private static final int SUGGESTED_RANK = 8;

    private final MoeConfig config;
    private final MemoryBudget budget;

    BudgetSearch(MoeConfig config, MemoryBudget budget) {
        this.config = config;
        this.budget = budget;
    }

    MemoryPlan fit(PlanSettings settings) {
        return tryFit(settings).orElseThrow(() -> refusal(settings));
    }

    private boolean fits(MemoryPlan plan) {
        return plan.peakBytes() <= budget.bytes();
    }

    /**
     * MoE chunks decide their phases alone and vocabulary blocks theirs, so each is looked for with
     * the other at its smallest.
     */
    private Optional<MemoryPlan> tryFit(PlanSettings settings) {
        PlanSettings least = smallest(settings);
        if (!fits(MemoryPlan.of(config, least))) {
            return Optional.empty();
        }
        int chunk =
                largest(
                        settings.moeChunkTokens(),
                        n -> least.toBuilder().optMoeChunkTokens(n).build());
        int block =
                largest(
                        settings.vocabBlockTokens(),
                        n -> least.toBuilder().optVocabBlockTokens(n).build());
        return Optional.of(
                MemoryPlan.of(
                        config,
                        settings.toBuilder()
                                .optMoeChunkTokens(chunk)
                                .optVocabBlockTokens(block)
                                .build()));
    }

    private static PlanSettings smallest(PlanSettings settings) {
        return settings.toBuilder()
                .optMoeChunkTokens(Math.min(SMALLEST, settings.moeChunkTokens()))
                .optVocabBlockTokens(Math.min(SMALLEST, settings.vocabBlockTokens()))
                .build();
    }

    private int largest(int limit, IntFunction<PlanSettings> with) {
        int size = limit;
        while (size > SMALLEST && !fits(MemoryPlan.of(config, with.apply(size)))) {
            int below = Integer.highestOneBit(size);
            size = Math.max(SMALLEST, below < size ? below : size / 2);
        }
        return size;
    }

    private BudgetExceededException refusal(PlanSettings settings) {
        MemoryPlan least = MemoryPlan.of(config, smallest(settings));
        Component largest = least.largest();
        return new BudgetExceededException(
                String.format(
                        "needs %s MB with the smallest chunks (the runtime alone %s MB), over a budget"
                                + " of %s MB; the largest part of the model's is %s (%s MB); %s",
                        Megabytes.of(least.peakBytes()),
                        Megabytes.of(settings.runtimeBytes()),
                        Megabytes.of(budget.bytes()),
                        largest.name(),
                        Megabytes.of(largest.bytes(least.peakPhase())),
                        suggestion(settings)),
                least.peakBytes(),
                budget.bytes());
    }

    private String suggestion(PlanSettings settings) {
        String how = "";
        PlanSettings current = settings;
        String found = smaller(current);
        // Adapters make room for gradients and optimizer state, which an evaluation has none of.
        if (found == null
                && !current.evaluation()
                && current.trained() == PlanSettings.Trained.ALL) {
            current = current.toBuilder().optAdapters(SUGGESTED_RANK).build();
            how = "training only routers and adapters of rank " + SUGGESTED_RANK;
            found = smaller(current);
        }
        if (found == null) {
            PlanSettings least = smallest(current.toBuilder().setBatch(1).setSequence(1).build());
            return String.format(
                    "no setting fits this model: %s and a single token it still needs %s MB",
                    how.isEmpty() ? "with these settings" : "with " + how,
                    Megabytes.of(MemoryPlan.of(config, least).peakBytes()));
        }
        if (how.isEmpty()) {
            return found + " fits";
        }
        return (found.isEmpty() ? how : how + " and " + found) + " fits";
    }

    /** The least reduction of the batch that fits: empty for none, null if there is no such. */
    private String smaller(PlanSettings settings) {
        if (tryFit(settings).isPresent()) {
            return "";
        }
        int rows = highest(settings.batch(), n -> settings.toBuilder().setBatch(n).build());
        if (rows > 0) {
            return String.format(
                    "a batch of %d row%s instead of %d",
                    rows, rows == 1 ? "" : "s", settings.batch());
        }
        int sequence =
                highest(
                        settings.sequence(),
                        n -> settings.toBuilder().setBatch(1).setSequence(n).build());
        if (sequence > 0) {
            return String.format(
                    "%sa sequence of %d tokens instead of %d",
                    settings.batch() == 1 ? "" : "a batch of 1 row and ",
                    sequence,
                    settings.sequence());
        }
        return null;
    }

    /**
     * A number below a limit that fits, 0 if none is found. It is the largest as far as needs grow
     * with it, which they do but for the rounding of chunks.
     */
    private int highest(int limit, IntFunction<PlanSettings> with) {
        int fitting = 0;
        int exceeding = limit;
        while (exceeding - fitting > 1) {
            int middle = (fitting + exceeding) >>> 1;
            if (tryFit(with.apply(middle)).isPresent()) {
                fitting = middle;
            } else {
                exceeding = middle;
            }
        }
        return fitting;
    }
}
