package org.djlmoe.maskcoft;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LogitRanges;
import org.djlmoe.training.TrainingCheckpoint;

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
 * the Plackett-Luce estimator, training under the soft prior and the rule that chooses beta are
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
     * @param hard the learned mask as a hard prior, with what other strengths need
     * @param theta the mask logits, [layers, experts]
     * @param maskLosses mean loss of the samples of every mask step
     * @param losses loss of every training step
     * @param sweep the betas that were tried, and the chosen one
     */
    public record Result(
            ExpertPrior hard,
            double[][] theta,
            double[] maskLosses,
            float[] losses,
            PriorSweep sweep) {

        /**
         * Returns the learned mask.
         *
         * @return the mask
         */
        public ExpertMask mask() {
            return hard.mask();
        }

        /**
         * Returns the prior to serve with.
         *
         * @return mask and chosen beta
         */
        public ExpertPrior prior() {
            return hard.withPrior(sweep.chosen().prior());
        }

        /**
         * Writes prior, mask and mask logits into a checkpoint folder, beside the weights.
         *
         * @param folder the folder
         * @throws IOException if writing fails
         */
        public void save(Path folder) throws IOException {
            prior().save(folder, theta);
        }
    }

    private static final String LEARNING_FILE = "mask_learning.safetensors";

    private final LanguageModel model;
    private final PackedBatches batches;
    private final Iterable<TokenBatch> validation;
    private final MaskCoFTSettings settings;
    private final MaskBudget budget;
    private final int cacheSize;

    private MaskCoFT(Builder builder, MaskCoFTSettings settings) {
        model = builder.model;
        batches = builder.batches;
        validation = builder.validation;
        this.settings = settings;
        MoeConfig config = model.decoder().config();
        budget = settings.budget(config.numLayers(), config.numExperts(), config.topK());
        cacheSize = settings.cacheSize(config.numExperts(), config.topK());
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
        try {
            return run(listener, RunSaves.NONE);
        } catch (IOException e) {
            throw new UncheckedIOException("No file was to be touched", e);
        }
    }

    /**
     * Does the same, and saves its state on the way or goes on from a saved one, in whatever stage
     * that is. States are saved in the first two stages; the third, which only measures, is run
     * again as a whole.
     *
     * @param listener is told of every step that this call does
     * @param saves where, how often, from where
     * @return mask, losses and prior, of all steps, those before a saved state included
     * @throws IllegalStateException if the experts have adapters
     * @throws CheckpointException if the saved state is not of this run; the message says what
     *     differs and what to do
     * @throws IOException if reading or writing fails
     */
    public Result run(Listener listener, RunSaves saves) throws IOException {
        for (MoeBlock layer : model.decoder().moeBlocks()) {
            if (layer.experts().adapters() != null) {
                throw new IllegalStateException(
                        "The model's experts have adapters already: merge or detach them first");
            }
        }
        if (settings.halfExperts()) {
            model.narrowExperts();
        }
        SavedRun saved =
                SavedRun.of(
                        saves,
                        getClass(),
                        settings.seed(),
                        settings.byName(),
                        model,
                        batches,
                        Math.max(settings.maskSteps(), settings.steps()),
                        validation);
        MaskLearning learning = learning(saves.from());
        saved.with(folder -> learning.save(folder.resolve(LEARNING_FILE)));
        ExpertMask mask =
                MaskSearch.run(
                        model,
                        batches,
                        learning,
                        new LoadTerm(settings.loadWeight(), cacheSize, settings.policy()),
                        settings.weights(),
                        (int) learning.updates(),
                        settings.maskSteps(),
                        (step, steps, tokens, loss) -> {
                            listener.step(Stage.MASK, step, steps, tokens, loss);
                            saved.saveMask(step, steps);
                        });
        float[] losses =
                CoAdaptation.builder()
                        .setModel(model)
                        .setBatches(batches)
                        .optValues(settings.values())
                        .optMask(mask)
                        .optSoftPrior(settings.prior(settings.softBeta()), settings.softShare())
                        .optLogitRanges(ranges())
                        .build()
                        .run(
                                (step, steps, tokens, loss) ->
                                        listener.step(Stage.ADAPT, step, steps, tokens, loss),
                                saved);
        // Measured again: the routers have trained.
        ExpertPrior hard =
                new ExpertPrior(mask, SelectionPrior.hardMask())
                        .withWeights(settings.weights())
                        .withLogitRanges(ranges());
        return new Result(hard, learning.theta(), learning.losses(), losses, sweep(hard, listener));
    }

    /** D of every layer where the form asks for it. */
    private List<Double> ranges() {
        return settings.form() == SelectionPrior.Form.SCALED
                ? LogitRanges.measure(model, validation)
                : Collections.nCopies(model.decoder().config().numLayers(), 1.0);
    }

    /**
     * Starts from what the model itself uses: an expert that nobody asks for is not worth keeping
     * by default. Or from what was saved.
     */
    private MaskLearning learning(TrainingCheckpoint from) throws IOException {
        MoeConfig config = model.decoder().config();
        MaskLearning.Builder builder =
                MaskLearning.builder()
                        .setNumLayers(config.numLayers())
                        .setNumExperts(config.numExperts())
                        .setBudget(budget)
                        .setTopK(config.topK())
                        .optEstimator(settings.estimator())
                        .optSamples(settings.maskSamples())
                        .optTemperature(settings.temperature())
                        .optLearningRate(settings.maskLearningRate())
                        .optSeed(settings.seed());
        if (from == null) {
            Evaluation usage = Evaluation.of(model, validation, tokens -> {});
            return builder.optInitialUsage(usage.trace().usage(), 1).build();
        }
        MaskLearning learning = builder.build();
        learning.load(from.folder().resolve(LEARNING_FILE));
        boolean masked = from.state().stage().equals(SavedRun.ADAPT);
        long expected = masked ? settings.maskSteps() : from.state().step();
        if (learning.updates() != expected) {
            throw new CheckpointException(
                    from.folder()
                            + " is damaged: its "
                            + LEARNING_FILE
                            + " has seen "
                            + learning.updates()
                            + " updates, not "
                            + expected
                            + ". Delete it to go on from the one before");
        }
        return learning;
    }

    private PriorSweep sweep(ExpertPrior hard, Listener listener) {
        List<ExpertPrior> priors = new ArrayList<>();
        settings.betas().forEach(beta -> priors.add(hard.withPrior(settings.prior(beta))));
        List<PriorSweep.Point> points =
                PriorSweep.measure(
                        model,
                        priors,
                        validation,
                        cacheSize,
                        settings.policy(),
                        (step, steps, tokens, loss) ->
                                listener.step(Stage.PRIOR, step, steps, tokens, loss));
        double limit = settings.perplexityLimit();
        return PriorSweep.choose(
                points,
                Double.isNaN(limit)
                        ? PriorSweep.TOLERANCE * PriorSweep.lowestPerplexity(points)
                        : limit);
    }

    /** Builds a {@link MaskCoFT}. */
    public static final class Builder extends MaskCoFTOptions<Builder> {

        private LanguageModel model;
        private PackedBatches batches;
        private Iterable<TokenBatch> validation;

        Builder() {}

        @Override
        Builder self() {
            return this;
        }

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
         * Builds the recipe.
         *
         * @return the recipe
         * @throws IllegalArgumentException if something is missing or out of range
         */
        public MaskCoFT build() {
            Checks.require(
                    model != null && batches != null && validation != null,
                    "MaskCoFT needs a model, training batches and validation batches");
            return new MaskCoFT(this, settings());
        }
    }
}
