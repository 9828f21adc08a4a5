package org.djlmoe.maskcoft;

import java.util.ArrayList;
import java.util.List;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;

/**
 * Masked co-adaptive fine-tuning, the whole recipe: a model becomes cheap to serve from a small
 * cache of experts.
 *
 * <ol>
 *   <li>{@link MaskSearch} learns which experts a layer keeps, from forward losses alone, beginning
 *       with those that the validation text uses most.
 *   <li>{@link CoAdaptation} trains routers and adapters of the experts under that mask.
 *   <li>{@link PriorSweep} replaces the mask by a prior: kept experts rank higher by beta, none is
 *       forbidden. Beta is the one of fewest loads whose perplexity on validation text stays within
 *       a limit.
 * </ol>
 *
 * <p>Stages 1 and 2 and the additive prior follow arXiv 2609.34077 as far as its abstract tells;
 * the Plackett-Luce estimator, the last steps under a soft prior and the rule that chooses beta are
 * this project's own.
 *
 * <p>It pays where loading experts dominates decoding. A model whose experts are all resident gains
 * nothing.
 */
public final class MaskCoFT {

    /** The parts of the recipe, in order. */
    public enum Stage {
        /** Learning the mask. */
        MASK,
        /** Training routers and adapters. */
        ADAPT,
        /** Choosing beta. */
        PRIOR
    }

    /** Is told how the recipe gets on. */
    @FunctionalInterface
    public interface Listener {

        /**
         * Called after every step of a stage.
         *
         * @param stage the stage
         * @param step steps done in it
         * @param steps its steps in all
         * @param tokens tokens that this step ran through the model
         * @param loss the step's mean loss, in nats a token
         */
        void step(Stage stage, int step, int steps, long tokens, double loss);
    }

    /**
     * What came out. The adapters are still attached, the routers rank by their own logits.
     *
     * @param mask the learned mask
     * @param maskLosses mean loss of the samples of every mask step
     * @param losses loss of every training step
     * @param sweep the betas that were tried, and the chosen one
     */
    public record Result(ExpertMask mask, double[] maskLosses, float[] losses, PriorSweep sweep) {

        /**
         * Returns the prior to serve with.
         *
         * @return mask and chosen beta
         */
        public ExpertPrior prior() {
            return new ExpertPrior(mask, sweep.chosen().prior());
        }
    }

    private final LanguageModel model;
    private final PackedBatches batches;
    private final Iterable<TokenBatch> validation;
    private final int kept;
    private final int maskSteps;
    private final int maskSamples;
    private final int steps;
    private final double learningRate;
    private final double softBeta;
    private final double softShare;
    private final int cacheSize;
    private final EvictionPolicy.Type policy;
    private final double perplexityLimit;
    private final List<Double> betas;
    private final int rank;
    private final double alpha;
    private final long seed;

    private MaskCoFT(Builder builder) {
        model = builder.model;
        batches = builder.batches;
        validation = builder.validation;
        kept = builder.kept();
        maskSteps = builder.maskSteps;
        maskSamples = builder.maskSamples;
        steps = builder.steps;
        learningRate = builder.learningRate;
        softBeta = builder.softBeta;
        softShare = builder.softShare;
        cacheSize = builder.cacheSize();
        policy = builder.policy;
        perplexityLimit = builder.perplexityLimit;
        betas = List.copyOf(builder.betas);
        rank = builder.rank;
        alpha = builder.alpha;
        seed = builder.seed;
    }

    /**
     * Returns a builder.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Runs the recipe on a model without adapters.
     *
     * @param listener is told of every step
     * @return mask, losses and prior
     * @throws IllegalStateException if the experts have adapters
     */
    public Result run(Listener listener) {
        for (MoeBlock layer : model.decoder().moeBlocks()) {
            if (layer.experts().adapters() != null) {
                throw new IllegalStateException(
                        "The model's experts have adapters already: merge or detach them first");
            }
        }
        double[] maskLosses = new double[maskSteps];
        ExpertMask mask =
                MaskSearch.run(
                        model,
                        batches,
                        learning(),
                        maskSteps,
                        (step, steps, tokens, loss) -> {
                            maskLosses[step - 1] = loss;
                            listener.step(Stage.MASK, step, steps, tokens, loss);
                        });
        float[] losses =
                CoAdaptation.builder()
                        .setModel(model)
                        .setBatches(batches)
                        .setSteps(steps)
                        .optMask(mask)
                        .optSoftPrior(SelectionPrior.additive(softBeta), softShare)
                        .optAdapters(rank, alpha)
                        .optLearningRate(learningRate)
                        .optSeed(seed)
                        .build()
                        .run(
                                (step, steps, tokens, loss) ->
                                        listener.step(Stage.ADAPT, step, steps, tokens, loss));
        return new Result(mask, maskLosses, losses, sweep(mask, listener));
    }

    /**
     * Starts from what the model itself uses: an expert that nobody asks for is not worth keeping
     * by default.
     */
    private MaskLearning learning() {
        MoeConfig config = model.decoder().config();
        Evaluation usage = Evaluation.of(model, validation, tokens -> {});
        return MaskLearning.builder()
                .setNumLayers(config.numLayers())
                .setNumExperts(config.numExperts())
                .setKept(kept)
                .setTopK(config.topK())
                .optSamples(maskSamples)
                .optInitialUsage(usage.trace().usage(), 1)
                .optSeed(seed)
                .build();
    }

    private PriorSweep sweep(ExpertMask mask, Listener listener) {
        List<SelectionPrior> priors = new ArrayList<>();
        betas.forEach(beta -> priors.add(SelectionPrior.additive(beta)));
        List<PriorSweep.Point> points =
                PriorSweep.measure(
                        model,
                        mask,
                        priors,
                        validation,
                        cacheSize,
                        policy,
                        (step, steps, tokens, loss) ->
                                listener.step(Stage.PRIOR, step, steps, tokens, loss));
        return PriorSweep.choose(
                points,
                Double.isNaN(perplexityLimit)
                        ? PriorSweep.TOLERANCE * PriorSweep.lowestPerplexity(points)
                        : perplexityLimit);
    }

    /** Builds a {@link MaskCoFT}. */
    public static final class Builder {

        private LanguageModel model;
        private PackedBatches batches;
        private Iterable<TokenBatch> validation;
        private Integer kept;
        private int maskSteps = 60;
        private int maskSamples = 6;
        private int steps = 200;
        private double learningRate = 1e-3;
        private double softBeta = 4;
        private double softShare = 1.0 / 3;
        private Integer cacheSize;
        private EvictionPolicy.Type policy = EvictionPolicy.Type.LFU_LIFETIME;
        private double perplexityLimit = Double.NaN;
        private long seed;
        private List<Double> betas = List.of(0.5, 1.0, 2.0, 4.0, 8.0);
        private int rank = 16;
        private double alpha = 32;

        Builder() {}

        /**
         * Sets the model; its experts have no adapters.
         *
         * @param value the model
         * @return this builder
         */
        public Builder setModel(LanguageModel value) {
            model = value;
            return this;
        }

        /**
         * Sets the text to train on, for the mask as well.
         *
         * @param value the batches
         * @return this builder
         */
        public Builder setBatches(PackedBatches value) {
            batches = value;
            return this;
        }

        /**
         * Sets the text that beta is chosen on. How often the model uses its experts on it is also
         * where the mask begins. So figures that are reported come from another text.
         *
         * @param value batches, gone through several times
         * @return this builder
         */
        public Builder setValidation(Iterable<TokenBatch> value) {
            validation = value;
            return this;
        }

        /**
         * Sets the betas to try, each 0 or above; infinity is the hard mask. Default: 0.5, 1, 2, 4,
         * 8.
         *
         * @param values at least one
         * @return this builder
         */
        public Builder optBetas(List<Double> values) {
            betas = values;
            return this;
        }

        /**
         * Sets the adapters' rank and scaling numerator. Default: 16 and 32.
         *
         * @param r the rank, at least 1
         * @param a the numerator, above 0
         * @return this builder
         */
        public Builder optAdapters(int r, double a) {
            rank = r;
            alpha = a;
            return this;
        }

        /**
         * Sets how many experts a layer keeps. Default: three quarters of them.
         *
         * @param value from the experts that a token uses to all
         * @return this builder
         */
        public Builder optKept(int value) {
            kept = value;
            return this;
        }

        /**
         * Sets the updates of the mask. Default: 60. With 0 the mask keeps the experts that the
         * validation text uses most.
         *
         * @param value 0 or more
         * @return this builder
         */
        public Builder optMaskSteps(int value) {
            maskSteps = value;
            return this;
        }

        /**
         * Sets the sampled masks an update. Default: 6.
         *
         * @param value at least 2
         * @return this builder
         */
        public Builder optMaskSamples(int value) {
            maskSamples = value;
            return this;
        }

        /**
         * Sets the training steps. Default: 200.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder optSteps(int value) {
            steps = value;
            return this;
        }

        /**
         * Sets the highest learning rate of routers and adapters. Default: 1e-3.
         *
         * @param value finite, above 0
         * @return this builder
         */
        public Builder optLearningRate(double value) {
            learningRate = value;
            return this;
        }

        /**
         * Sets the beta of the soft prior that the last training steps run under. Default: 4.
         *
         * @param value 0 or above, or infinity
         * @return this builder
         */
        public Builder optSoftBeta(double value) {
            softBeta = value;
            return this;
        }

        /**
         * Sets the part of the training steps that run under the soft prior. Default: a third.
         *
         * @param value 0 to 1
         * @return this builder
         */
        public Builder optSoftShare(double value) {
            softShare = value;
            return this;
        }

        /**
         * Sets the cache that betas are judged by, in experts a layer. Default: half of the
         * experts.
         *
         * @param value at least the experts that a token uses
         * @return this builder
         */
        public Builder optCacheSize(int value) {
            cacheSize = value;
            return this;
        }

        /**
         * Sets the policy of that cache. Default: keep the most frequent by lifetime counts.
         *
         * @param value the setting
         * @return this builder
         */
        public Builder optPolicy(EvictionPolicy.Type value) {
            policy = value;
            return this;
        }

        /**
         * Sets the highest validation perplexity that a beta may have. Default: 1.01 times the
         * lowest of all betas; to compare with another way of fine-tuning, give 1.01 times its
         * perplexity.
         *
         * @param value the setting
         * @return this builder
         */
        public Builder optPerplexityLimit(double value) {
            perplexityLimit = value;
            return this;
        }

        /**
         * Sets the seed of masks and adapters. Default: 0.
         *
         * @param value the setting
         * @return this builder
         */
        public Builder optSeed(long value) {
            seed = value;
            return this;
        }

        /**
         * Builds the recipe.
         *
         * @return the recipe
         * @throws IllegalArgumentException if something is missing or out of range
         */
        public MaskCoFT build() {
            if (model == null || batches == null || validation == null) {
                throw new IllegalArgumentException(
                        "MaskCoFT needs a model, training batches and validation batches");
            }
            MoeConfig config = model.decoder().config();
            int topK = config.topK();
            require(
                    kept() >= topK && kept() <= config.numExperts(),
                    "kept is %d: a layer keeps from topK = %d to %d experts",
                    kept(),
                    topK,
                    config.numExperts());
            require(maskSteps >= 0, "maskSteps is %d: set 0 or more", maskSteps);
            require(
                    maskSamples >= 2,
                    "maskSamples is %d: two masks are needed to compare",
                    maskSamples);
            require(steps >= 1, "steps is %d: set 1 or more", steps);
            require(
                    learningRate > 0 && Double.isFinite(learningRate),
                    "learningRate is %s: it must be finite and above 0",
                    learningRate);
            require(softBeta >= 0, "softBeta is %s: it must be 0 or above, or infinity", softBeta);
            require(
                    softShare >= 0 && softShare <= 1,
                    "softShare is %s: it must be from 0 to 1",
                    softShare);
            require(
                    cacheSize() >= topK,
                    "cacheSize is %d: a token uses topK = %d experts of a layer at once",
                    cacheSize(),
                    topK);
            require(policy != null, "policy is null: name an eviction policy");
            require(
                    !(perplexityLimit <= 0),
                    "perplexityLimit is %s: it must be above 0",
                    perplexityLimit);
            require(betas != null && !betas.isEmpty(), "betas is empty: at least one is tried");
            for (Double beta : betas) {
                require(
                        beta != null && beta >= 0,
                        "betas has %s: each must be 0 or above, or infinity",
                        beta);
            }
            require(rank >= 1, "The adapters' rank is %d: set 1 or more", rank);
            require(
                    alpha > 0 && Double.isFinite(alpha),
                    "The adapters' alpha is %s: it must be finite and above 0",
                    alpha);
            return new MaskCoFT(this);
        }

        private int kept() {
            MoeConfig config = model.decoder().config();
            return kept == null ? Math.max(config.topK(), (3 * config.numExperts() + 2) / 4) : kept;
        }

        private int cacheSize() {
            MoeConfig config = model.decoder().config();
            return cacheSize == null ? Math.max(config.topK(), config.numExperts() / 2) : cacheSize;
        }

        private static void require(boolean holds, String message, Object... args) {
            if (!holds) {
                throw new IllegalArgumentException(message.formatted(args));
            }
        }
    }
}
