package org.djlmoe.maskcoft;

import ai.djl.nn.Parameter;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;

/**
 * Stage 1 on a model: runs the batch of every step under the masks that {@link MaskLearning}
 * proposes and hands it what its estimator needs: losses, or also the gradients of the combine
 * weights' factors. The weights stay as they are.
 */
public final class MaskSearch {

    private MaskSearch() {}

    /**
     * Learns a mask from the losses alone, with combine weights from all experts.
     *
     * @param model the model
     * @param batches the text; step i uses batch i
     * @param learning proposes and learns
     * @param steps how many updates
     * @param listener is told of every step, with the mean loss of its samples
     * @return the learned mask
     */
    public static ExpertMask run(
            LanguageModel model,
            PackedBatches batches,
            MaskLearning learning,
            int steps,
            StageListener listener) {
        return run(model, batches, learning, LoadTerm.NONE, MaskedWeights.ALL, steps, listener);
    }

    /**
     * Learns a mask.
     *
     * @param model the model
     * @param batches the text; step i uses batch i
     * @param learning proposes and learns
     * @param loads a term for loads in the loss of a mask
     * @param weights where combine weights come from under a mask
     * @param steps how many updates
     * @param listener is told of every step, with the mean loss of its samples, the term included
     * @return the learned mask
     * @throws IllegalArgumentException if there is a term for loads and the estimator cannot see it
     */
    public static ExpertMask run(
            LanguageModel model,
            PackedBatches batches,
            MaskLearning learning,
            LoadTerm loads,
            MaskedWeights weights,
            int steps,
            StageListener listener) {
        try {
            return run(
                    model,
                    batches,
                    learning,
                    loads,
                    weights,
                    0,
                    steps,
                    (step, all, tokens, loss) -> listener.step(step, all, tokens, loss));
        } catch (IOException e) {
            throw new UncheckedIOException("No file was to be touched", e);
        }
    }

    /** Is told of a step that is done, and may save. */
    @FunctionalInterface
    interface AfterStep {
        void run(int step, int steps, long tokens, double loss) throws IOException;
    }

    /** Learns on after the first steps, which the learner has done before. */
    static ExpertMask run(
            LanguageModel model,
            PackedBatches batches,
            MaskLearning learning,
            LoadTerm loads,
            MaskedWeights weights,
            int done,
            int steps,
            AfterStep after)
            throws IOException {
        Runner runner =
                learning.estimator().needsBackward()
                        ? backward(model, learning, loads, weights, done)
                        : new Forward(model, loads, weights);
        try (runner) {
            for (int step = done; step < steps; step++) {
                TokenBatch batch = batches.at(step);
                List<MaskSample> samples = learning.propose(step);
                List<MaskOutcome> outcomes = new ArrayList<>();
                for (MaskSample sample : samples) {
                    outcomes.add(runner.run(sample.mask(), batch));
                }
                learning.update(samples, outcomes);
                double mean =
                        outcomes.stream().mapToDouble(MaskOutcome::loss).average().orElseThrow();
                after.run(step + 1, steps, (long) batch.tokens() * samples.size(), mean);
            }
        }
        return learning.mask();
    }

    /** Refuses a load term that the estimator would not see. */
    static void check(MaskEstimator estimator, double lambda) {
        Checks.require(
                lambda == 0 || !estimator.needsBackward(),
                "loadWeight is %s, but the estimator (%s) does not see it: loads have no gradient;"
                        + " use Plackett-Luce",
                lambda,
                estimator);
    }

    private static Runner backward(
            LanguageModel model,
            MaskLearning learning,
            LoadTerm loads,
            MaskedWeights weights,
            int done) {
        check(learning.estimator(), loads.lambda());
        return new Backward(model, learning, weights, done);
    }

    /** Runs a batch under a mask. */
    private interface Runner extends AutoCloseable {

        MaskOutcome run(ExpertMask mask, TokenBatch batch);

        @Override
        void close();
    }

    private record Forward(LanguageModel model, LoadTerm loads, MaskedWeights weights)
            implements Runner {

        @Override
        public MaskOutcome run(ExpertMask mask, TokenBatch batch) {
            new ExpertPrior(mask, SelectionPrior.hardMask())
                    .withWeights(weights)
                    .apply(model.decoder());
            return MaskOutcome.of(loads.loss(model, batch));
        }

        @Override
        public void close() {
            ExpertPrior.clear(model.decoder());
        }
    }

    /** With every weight frozen, so that nothing but the masks' factors has a gradient. */
    private static final class Backward implements Runner {

        private final MaskBlocks masks;
        private final Map<Parameter, Boolean> frozen = new LinkedHashMap<>();
        private final LanguageModelTrainer trainer;

        Backward(LanguageModel model, MaskLearning learning, MaskedWeights weights, int done) {
            model.decoder()
                    .namedParameters()
                    .values()
                    .forEach(p -> frozen.put(p, !p.requiresGradient()));
            masks =
                    MaskBlocks.builder()
                            .setLayers(model.decoder().moeBlocks())
                            .setManager(model.manager())
                            .setBudget(learning.budget())
                            .optEstimator(learning.estimator())
                            .optWeights(weights)
                            .build();
            LanguageModelTrainer made = null;
            try {
                model.train(model.decoder().maskParameters()::containsKey);
                // Theta is the learner's: this one is never stepped.
                Optimizer none = Optimizer.sgd().setLearningRateTracker(Tracker.fixed(0)).build();
                made = new LanguageModelTrainer(model, none, 0);
            } finally {
                if (made == null) {
                    restore();
                }
            }
            trainer = made;
            trainer.resumeAt((long) done * learning.samples());
        }

        private void restore() {
            masks.detach();
            frozen.forEach(Parameter::freeze);
        }

        @Override
        public MaskOutcome run(ExpertMask mask, TokenBatch batch) {
            masks.applyWithUnitSlopes(mask);
            double loss = trainer.accumulate(batch);
            return new MaskOutcome(loss, masks.takeGradients());
        }

        @Override
        public void close() {
            trainer.close();
            restore();
        }
    }
}
