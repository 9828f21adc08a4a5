package org.djlmoe.plan;

import java.util.Objects;

/**
 * What a plan must know of a run besides the model's configuration.
 *
 * @param batch B, sequences a batch
 * @param sequence S, tokens a sequence
 * @param evaluation true for forward and loss without gradients
 * @param trained which parameters train
 * @param loraRank r, rank of the experts' adapters; 0 for none
 * @param ranks P, processes that the experts of a layer are spread over; 1 for one that has all
 * @param alpha how far a rank may be above the mean once routes are spread, at least 1
 * @param lambda the imbalance from which routes are spread, at least 0; infinity for never
 * @param maxForeign F, how many foreign experts a rank may hold; 0 for as many as it has
 * @param trainsMask whether an expert mask is learnt straight through
 * @param excludedExperts X, dropped experts a token that run along for the mask's gradient
 * @param sharedWidth S, width of the shared experts; 0 for none
 * @param sharedGate whether the shared experts have a gate
 * @param frozenHalf whether the frozen experts are BF16; all else is F32
 * @param stateTier where the optimizer's state lies
 * @param moeChunkTokens tokens a chunk in the MoE layers
 * @param maxChunks how many chunks a MoE layer has at most; where it binds, chunks grow
 * @param vocabBlockTokens tokens whose logits exist at a time
 * @param allocator what the native allocator does with freed memory
 * @param runtimeBytes what the process holds before the model: Java virtual machine, heap, native
 *     libraries
 */
public record PlanSettings(
        int batch,
        int sequence,
        boolean evaluation,
        Trained trained,
        int loraRank,
        int ranks,
        double alpha,
        double lambda,
        int maxForeign,
        boolean trainsMask,
        int excludedExperts,
        int sharedWidth,
        boolean sharedGate,
        boolean frozenHalf,
        StateTier stateTier,
        int moeChunkTokens,
        int maxChunks,
        int vocabBlockTokens,
        Allocator allocator,
        long runtimeBytes) {

    /** What the native allocator does with freed memory. */
    public enum Allocator {
        /**
         * It keeps most of it for the next array, as glibc does unless told otherwise. The process
         * then holds holes besides arrays.
         */
        KEEPS,
        /** It gives it back at once: {@code MALLOC_MMAP_THRESHOLD_=1048576}. Exact, and slow. */
        RETURNS
    }

    /** Which parameters train. */
    public enum Trained {
        /** All of them. */
        ALL,
        /** Routers and the experts' adapters; the rest is frozen. */
        ROUTERS_AND_ADAPTERS
    }

    /** Where an optimizer's state lies: two F32 numbers a trained parameter. */
    public enum StateTier {
        /** There is none: plain gradient descent. */
        NONE,
        /** In the process's memory, updated in place. */
        HOST,
        /**
         * In mapped files ({@code optFileTier} of {@code OffloadStreamAdamW}), whose pages the
         * system may drop and read again: updated in place, without buffers.
         */
        FILE
    }

    /** Checks the numbers. */
    public PlanSettings {
        positive("batch", batch);
        positive("sequence", sequence);
        positive("moeChunkTokens", moeChunkTokens);
        positive("maxChunks", maxChunks);
        positive("vocabBlockTokens", vocabBlockTokens);
        positive("ranks", ranks);
        if (ranks > 1 && loraRank > 0) {
            throw new IllegalArgumentException(
                    "Experts with adapters cannot be dispatched over ranks: plan for one rank");
        }
        if (!(alpha >= 1 && alpha < Double.POSITIVE_INFINITY)) {
            throw new IllegalArgumentException("alpha must be 1 or more and finite, not " + alpha);
        }
        if (!(lambda >= 0)) {
            throw new IllegalArgumentException("lambda must be 0 or more, not " + lambda);
        }
        if (maxForeign < 0) {
            throw new IllegalArgumentException("maxForeign must not be negative: " + maxForeign);
        }
        if (excludedExperts < 0) {
            throw new IllegalArgumentException(
                    "excludedExperts must not be negative: " + excludedExperts);
        }
        if (trainsMask && (ranks > 1 || evaluation)) {
            throw new IllegalArgumentException(
                    "A mask is learnt in training, in one process: plan for one rank");
        }
        Objects.requireNonNull(trained, "trained");
        Objects.requireNonNull(stateTier, "stateTier");
        Objects.requireNonNull(allocator, "allocator");
        if (loraRank < 0) {
            throw new IllegalArgumentException("loraRank must not be negative: " + loraRank);
        }
        if (sharedWidth < 0) {
            throw new IllegalArgumentException("sharedWidth must not be negative: " + sharedWidth);
        }
        if (trained == Trained.ROUTERS_AND_ADAPTERS && loraRank == 0) {
            throw new IllegalArgumentException(
                    "Training adapters needs their rank: optAdapters(rank)");
        }
        if (frozenHalf && trained == Trained.ALL) {
            throw new IllegalArgumentException(
                    "frozenHalf is for frozen weights, but all parameters train: optAdapters(rank)");
        }
        if (runtimeBytes < 0) {
            throw new IllegalArgumentException("runtimeBytes must not be negative");
        }
    }

    private static void positive(String name, int value) {
        if (value < 1) {
            throw new IllegalArgumentException(name + " must be positive, not " + value);
        }
    }

    /**
     * Returns N.
     *
     * @return tokens a batch
     */
    public long tokens() {
        return (long) batch * sequence;
    }

    /**
     * Returns the tokens of a MoE chunk, as {@code MoeBlock} cuts them.
     *
     * @return ceil(N / K)
     */
    public long chunk() {
        long chunks = Math.max(1, Math.min(ceil(tokens(), moeChunkTokens), maxChunks));
        return ceil(tokens(), chunks);
    }

    /** Whether ranks compute for one another. */
    boolean spreadsRoutes() {
        return ranks > 1 && lambda < Double.POSITIVE_INFINITY;
    }

    static long ceil(long a, long b) {
        return (a + b - 1) / b;
    }

    /**
     * Returns a builder that starts from these settings.
     *
     * @return the builder
     */
    public Builder toBuilder() {
        return new Builder(this);
    }

    /**
     * Returns a builder.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Builds {@link PlanSettings}. */
    public static final class Builder {

        private int batch;
        private int sequence;
        private boolean evaluation;
        private Trained trained = Trained.ALL;
        private int loraRank;
        private int ranks = 1;
        private double alpha = 1.0;
        private double lambda = 1.3;
        private int maxForeign;
        private boolean trainsMask;
        private int excludedExperts;
        private int sharedWidth;
        private boolean sharedGate;
        private boolean frozenHalf;
        private StateTier stateTier = StateTier.HOST;
        private int moeChunkTokens = 4096;
        private int maxChunks = 10;
        private int vocabBlockTokens = 512;
        private Allocator allocator = Allocator.KEEPS;
        private long runtimeBytes = MemoryPlan.RUNTIME_BYTES;

        private Builder() {}

        private Builder(PlanSettings from) {
            batch = from.batch;
            sequence = from.sequence;
            evaluation = from.evaluation;
            trained = from.trained;
            loraRank = from.loraRank;
            ranks = from.ranks;
            alpha = from.alpha;
            lambda = from.lambda;
            maxForeign = from.maxForeign;
            trainsMask = from.trainsMask;
            excludedExperts = from.excludedExperts;
            sharedWidth = from.sharedWidth;
            sharedGate = from.sharedGate;
            frozenHalf = from.frozenHalf;
            stateTier = from.stateTier;
            moeChunkTokens = from.moeChunkTokens;
            maxChunks = from.maxChunks;
            vocabBlockTokens = from.vocabBlockTokens;
            allocator = from.allocator;
            runtimeBytes = from.runtimeBytes;
        }

        /**
         * Sets B.
         *
         * @param rows sequences a batch
         * @return this builder
         */
        public Builder setBatch(int rows) {
            batch = rows;
            return this;
        }

        /**
         * Sets S.
         *
         * @param tokens tokens a sequence
         * @return this builder
         */
        public Builder setSequence(int tokens) {
            sequence = tokens;
            return this;
        }

        /**
         * Plans forward and loss without gradients. Default: training.
         *
         * @param value true for evaluation
         * @return this builder
         */
        public Builder optEvaluation(boolean value) {
            evaluation = value;
            return this;
        }

        /**
         * Trains routers and adapters of the experts; everything else is frozen. Default: all
         * parameters train and there are no adapters.
         *
         * @param rank the adapters' rank
         * @return this builder
         */
        public Builder optAdapters(int rank) {
            trained = Trained.ROUTERS_AND_ADAPTERS;
            loraRank = rank;
            return this;
        }

        /**
         * Spreads the experts of a layer over ranks, each of which has a batch of this size, by a
         * {@code PipelinedDispatch} in its default mode; give its planner's settings here too.
         * Default: 1, no exchange.
         *
         * @param number P, at most the number of experts
         * @return this builder
         */
        public Builder optRanks(int number) {
            ranks = number;
            return this;
        }

        /**
         * Sets how far a rank may be above the mean once routes are spread. Default: 1, as in
         * {@code PipelinedDispatch}.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder optAlpha(double value) {
            alpha = value;
            return this;
        }

        /**
         * Sets the imbalance from which routes are spread. Default: 1.3, as in {@code
         * PipelinedDispatch}. Without spreading a rank may get every row of all, and no expert is
         * lent.
         *
         * @param value at least 0; infinity for never
         * @return this builder
         */
        public Builder optLambda(double value) {
            lambda = value;
            return this;
        }

        /**
         * Sets how many foreign experts a rank may hold. Default: ceil(E / P), as in {@code
         * PipelinedDispatch}, whose planner exceeds a smaller number up to that.
         *
         * @param value F, at least 1
         * @return this builder
         */
        public Builder optMaxForeign(int value) {
            if (value < 1) {
                throw new IllegalArgumentException("maxForeign must be positive, not " + value);
            }
            maxForeign = value;
            return this;
        }

        /**
         * Plans for an expert mask that is learnt straight through, beside whatever else trains.
         * Default: none. One that is learnt from forward losses alone takes no more than an
         * evaluation.
         *
         * @param excluded X, dropped experts a token that run along ({@code
         *     MaskEstimator.excludedExperts}); 0 for none
         * @return this builder
         */
        public Builder optMask(int excluded) {
            trainsMask = true;
            excludedExperts = excluded;
            return this;
        }

        /**
         * Plans for experts that every token goes to. Default: none.
         *
         * @param width their width together; 0 for none
         * @param gated whether they have a gate
         * @return this builder
         */
        public Builder optSharedExperts(int width, boolean gated) {
            sharedWidth = width;
            sharedGate = gated;
            return this;
        }

        /**
         * Sets whether the frozen experts are BF16, as {@code Experts.narrowWeights} makes them.
         * All else stays F32. Default: false.
         *
         * @param value true for BF16
         * @return this builder
         */
        public Builder optFrozenHalf(boolean value) {
            frozenHalf = value;
            return this;
        }

        /**
         * Sets where the optimizer's state lies. Default: the host's memory.
         *
         * @param tier the place
         * @return this builder
         */
        public Builder optStateTier(StateTier tier) {
            stateTier = tier;
            return this;
        }

        /**
         * Sets the tokens of a MoE chunk. Default: 4096.
         *
         * @param tokens at most so many, unless there would be more than {@code maxChunks}
         * @return this builder
         */
        public Builder optMoeChunkTokens(int tokens) {
            moeChunkTokens = tokens;
            return this;
        }

        /**
         * Sets how many chunks a MoE layer has at most. Default: 10.
         *
         * @param chunks the number
         * @return this builder
         */
        public Builder optMaxChunks(int chunks) {
            maxChunks = chunks;
            return this;
        }

        /**
         * Sets how many tokens have logits at a time. Default: 512.
         *
         * @param tokens the number
         * @return this builder
         */
        public Builder optVocabBlockTokens(int tokens) {
            vocabBlockTokens = tokens;
            return this;
        }

        /**
         * Sets what the native allocator does with freed memory. Default: it keeps it.
         *
         * @param behaviour its behaviour
         * @return this builder
         */
        public Builder optAllocator(Allocator behaviour) {
            allocator = behaviour;
            return this;
        }

        /**
         * Sets what the process holds before there is a model. Default: {@link
         * MemoryPlan#RUNTIME_BYTES}.
         *
         * @param bytes the size
         * @return this builder
         */
        public Builder optRuntimeBytes(long bytes) {
            runtimeBytes = bytes;
            return this;
        }

        /**
         * Builds the settings.
         *
         * @return the settings
         * @throws IllegalArgumentException if batch or sequence is missing, or a number senseless
         */
        public PlanSettings build() {
            return new PlanSettings(
                    batch,
                    sequence,
                    evaluation,
                    trained,
                    loraRank,
                    ranks,
                    alpha,
                    lambda,
                    maxForeign,
                    trainsMask,
                    excludedExperts,
                    sharedWidth,
                    sharedGate,
                    frozenHalf,
                    stateTier,
                    moeChunkTokens,
                    maxChunks,
                    vocabBlockTokens,
                    allocator,
                    runtimeBytes);
        }
    }
}
