package org.djlmoe.inject;

import ai.djl.training.tracker.ParameterTracker;
import ai.djl.training.tracker.Tracker;
import java.nio.file.Path;
import java.util.Optional;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.maskcoft.MaskCoFTSettings;
import org.djlmoe.model.MoeConfig;

/**
 * What {@link MoeMemoryModule} wires from; immutable, and shareable as far as its tracker is.
 *
 * @param model sizes and constants of the decoder
 * @param learningRate the learning rate of every update
 * @param chunkTokens tokens a chunk in the MoE layers, at least 1
 * @param weightDecay decay of the matrices, at least 0; vectors are not decayed
 * @param clipNorm largest global norm of the gradients; infinity for no clipping
 * @param labelSmoothing share of the target spread evenly over the vocabulary, in [0, 1)
 * @param zLoss weight of the squared log-sum-exp in the loss, at least 0
 * @param balance coefficient of the routers' balance loss, at least 0
 * @param prior the experts that the routers prefer; empty for none
 * @param maskCoFT how to fine-tune by MaskCoFT; empty for training all weights
 * @param stateDirectory where the optimizer's state lies in mapped files; empty for memory
 * @param seed decides the weights and the random numbers of segments
 */
public record MoeMemorySettings(
        MoeConfig model,
        ParameterTracker learningRate,
        int chunkTokens,
        double weightDecay,
        double clipNorm,
        double labelSmoothing,
        double zLoss,
        double balance,
        Optional<ExpertPrior> prior,
        Optional<MaskCoFTSettings> maskCoFT,
        Optional<Path> stateDirectory,
        long seed) {

    /** Checks the ranges. */
    public MoeMemorySettings {
        require(model != null, "model is missing: setModel(MoeConfig)");
        require(
                learningRate != null,
                "learningRate is missing: setLearningRate(Tracker.fixed(1e-3f))");
        require(chunkTokens >= 1, "chunkTokens must be 1 or more, not " + chunkTokens);
        require(
                weightDecay >= 0 && Double.isFinite(weightDecay),
                "weightDecay must be 0 or more and finite, not " + weightDecay);
        require(
                clipNorm > 0,
                "clipNorm must be above 0 (infinity for no clipping), not " + clipNorm);
        require(
                labelSmoothing >= 0 && labelSmoothing < 1,
                "labelSmoothing must be at least 0 and below 1, not " + labelSmoothing);
        require(zLoss >= 0 && Double.isFinite(zLoss), "zLoss must be 0 or more, not " + zLoss);
        require(
                balance >= 0 && Double.isFinite(balance),
                "balance must be 0 or more, not " + balance);
        require(prior != null, "prior is null: leave it out for none");
        require(maskCoFT != null, "maskCoFT is null: leave it out for none");
        require(
                prior.isEmpty() || maskCoFT.isEmpty(),
                "prior and maskCoFT are both given: MaskCoFT decides how routers rank");
        require(
                maskCoFT.isEmpty() || maskCoFT.get().estimator().needsBackward(),
                "maskCoFT has an estimator that learns from forward losses: a trainer takes"
                        + " MaskEstimator.gumbel() or dense()");
        require(stateDirectory != null, "stateDirectory is null: leave it out for memory");
    }

    private static void require(boolean holds, String problem) {
        if (!holds) {
            throw new IllegalArgumentException(problem);
        }
    }

    /**
     * Creates a builder.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Builds {@link MoeMemorySettings}; {@code set} methods are required, {@code opt} methods are
     * not.
     */
    public static final class Builder {

        private MoeConfig model;
        private ParameterTracker learningRate;
        private int chunkTokens = 4096;
        private double weightDecay = 0.01;
        private double clipNorm = Double.POSITIVE_INFINITY;
        private double labelSmoothing;
        private double zLoss;
        private double balance;
        private ExpertPrior prior;
        private MaskCoFTSettings maskCoFT;
        private Path stateDirectory;
        private long seed;

        private Builder() {}

        /**
         * Sets the decoder's sizes.
         *
         * @param config sizes and constants
         * @return this builder
         */
        public Builder setModel(MoeConfig config) {
            model = config;
            return this;
        }

        /**
         * Sets the learning rate, for instance {@link Tracker#fixed} or a {@code
         * WarmupCosineTracker}.
         *
         * @param tracker gives each update its rate
         * @return this builder
         */
        public Builder setLearningRate(ParameterTracker tracker) {
            learningRate = tracker;
            return this;
        }

        /**
         * Sets how many tokens a MoE layer works on at a time; 4096 by default.
         *
         * @param tokens at least 1
         * @return this builder
         */
        public Builder optChunkTokens(int tokens) {
            chunkTokens = tokens;
            return this;
        }

        /**
         * Sets the weight decay of the matrices; 0.01 by default.
         *
         * @param decay at least 0
         * @return this builder
         */
        public Builder optWeightDecay(double decay) {
            weightDecay = decay;
            return this;
        }

        /**
         * Sets the largest global norm of the gradients; no clipping by default.
         *
         * @param norm above 0
         * @return this builder
         */
        public Builder optClipNorm(double norm) {
            clipNorm = norm;
            return this;
        }

        /**
         * Sets the label smoothing; none by default.
         *
         * @param share in [0, 1)
         * @return this builder
         */
        public Builder optLabelSmoothing(double share) {
            labelSmoothing = share;
            return this;
        }

        /**
         * Sets the weight of the squared log-sum-exp; 0 by default.
         *
         * @param weight at least 0
         * @return this builder
         */
        public Builder optZLoss(double weight) {
            zLoss = weight;
            return this;
        }

        /**
         * Sets the coefficient of the routers' balance loss; 0 by default.
         *
         * @param coefficient at least 0
         * @return this builder
         */
        public Builder optBalance(double coefficient) {
            balance = coefficient;
            return this;
        }

        /**
         * Has the routers prefer some experts; by default they rank by their own logits. Weights
         * are saved without it: {@link ExpertPrior#save} puts it beside them.
         *
         * @param preferred mask and strength
         * @return this builder
         */
        public Builder optPrior(ExpertPrior preferred) {
            prior = preferred;
            return this;
        }

        /**
         * Has the trainer go through the stages of MaskCoFT in place of training all weights: the
         * mask, then routers and adapters. The learning rate is that of the tracker; give the
         * settings the same.
         *
         * @param settings stages, estimator, budget and prior
         * @return this builder
         */
        public Builder optMaskCoFT(MaskCoFTSettings settings) {
            maskCoFT = settings;
            return this;
        }

        /**
         * Puts the optimizer's state into mapped files instead of memory. They are gone when the
         * optimizer is closed.
         *
         * @param directory an existing folder on a disk; a bad one is refused when the optimizer is
         *     made
         * @return this builder
         */
        public Builder optStateDirectory(Path directory) {
            stateDirectory = directory;
            return this;
        }

        /**
         * Sets what decides everything random; 0 by default.
         *
         * @param value the seed
         * @return this builder
         */
        public Builder optSeed(long value) {
            seed = value;
            return this;
        }

        /**
         * Checks the settings.
         *
         * @return the settings
         * @throws IllegalArgumentException if something required is missing or out of its range
         */
        public MoeMemorySettings build() {
            return new MoeMemorySettings(
                    model,
                    learningRate,
                    chunkTokens,
                    weightDecay,
                    clipNorm,
                    labelSmoothing,
                    zLoss,
                    balance,
                    Optional.ofNullable(prior),
                    Optional.ofNullable(maskCoFT),
                    Optional.ofNullable(stateDirectory),
                    seed);
        }
    }
}
