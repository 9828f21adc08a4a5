package org.djlmoe.maskcoft;

import ai.djl.engine.Engine;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.function.Predicate;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.expert.Experts;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.StateReport;
import org.djlmoe.optimizer.WarmupCosineTracker;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LanguageModelTrainer;
import org.djlmoe.training.LogitRanges;
import org.djlmoe.training.TrainingCheckpoint;

/**
 * Stage 2: routers and low-rank adapters of the experts train together under a fixed mask, with
 * cross-entropy alone; everything else is frozen.
 *
 * <p>Without a mask it is the control that MaskCoFT is compared with: the same weights train on the
 * same tokens.
 *
 * <p>With a soft prior, the last part of the steps trains under it instead of the hard mask, so
 * that experts and routers know the ranking they are served with. (This part is not in the method's
 * source.)
 *
 * <p>Source of the method: arXiv 2609.34077.
 */
public final class CoAdaptation {

    private final LanguageModel model;
    private final PackedBatches batches;
    private final AdaptationValues values;
    private final ExpertMask mask;
    private final SelectionPrior softPrior;
    private final List<Double> logitRanges;
    private final boolean trainRouters;

    private CoAdaptation(Builder builder) {
        model = builder.model;
        batches = builder.batches;
        values = builder.values.copy();
        mask = builder.mask;
        softPrior = builder.softPrior;
        logitRanges = builder.logitRanges;
        trainRouters = builder.trainRouters;
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
     * Attaches adapters and trains. Afterwards the adapters are still attached, the routers rank by
     * their own logits, and all other weights stay frozen.
     *
     * <p>If anything fails, the adapters are detached again, so that the model can be used as
     * before; routers keep what they have learned so far, and narrowed experts stay narrowed.
     *
     * @param listener is told of every step
     * @return the loss of every step, before its update
     * @throws IllegalStateException if the experts have adapters already
     */
    public float[] run(StageListener listener) {
        try {
            return run(listener, RunSaves.NONE);
        } catch (IOException e) {
            throw new UncheckedIOException("No file was to be touched", e);
        }
    }

    /**
     * Does the same, and saves its state on the way or goes on from a saved one.
     *
     * @param listener is told of every step that this call does
     * @param saves where, how often, from where
     * @return the loss of every step, those before a saved state included
     * @throws IllegalStateException if the experts have adapters already
     * @throws CheckpointException if the saved state is not of this run; the message says what
     *     differs and what to do
     * @throws IOException if reading or writing fails
     */
    public float[] run(StageListener listener, RunSaves saves) throws IOException {
        if (values.halfExperts) {
            model.narrowExperts();
        }
        return run(
                listener,
                SavedRun.of(
                        saves,
                        getClass(),
                        values.seed,
                        options(),
                        model,
                        batches,
                        values.steps,
                        List.of()));
    }

    private Map<String, Object> options() {
        Map<String, Object> options = values.byName();
        options.put("mask", mask == null ? "none" : mask.toJson());
        options.put("softPrior", softPrior);
        options.put("logitRanges", logitRanges);
        options.put("trainRouters", trainRouters);
        return options;
    }

    /** For experts that are narrowed already, if they are to be. */
    float[] run(StageListener listener, SavedRun saved) throws IOException {
        Engine.getEngine("PyTorch").setRandomSeed((int) values.seed);
        List<Experts> attached = new ArrayList<>();
        boolean done = false;
        try {
            for (MoeBlock layer : model.decoder().moeBlocks()) {
                LoraExperts adapters = layer.experts().attachAdapters(values.rank, values.alpha);
                attached.add(layer.experts());
                adapters.initialize(model.manager(), DataType.FLOAT32, new Shape(1));
            }
            float[] losses = train(listener, saved);
            done = true;
            return losses;
        } finally {
            if (!done) {
                attached.forEach(Experts::detachAdapters);
            }
        }
    }

    private float[] train(StageListener listener, SavedRun saved) throws IOException {
        TrainingCheckpoint from = saved.from(SavedRun.ADAPT);
        if (from != null) {
            from.loadAdapters(model, trainRouters);
        }
        int steps = values.steps;
        Predicate<String> adapter = path -> path.contains(".lora_");
        model.train(trainRouters ? adapter.or(path -> path.endsWith("mlp.gate.weight")) : adapter);
        OffloadStreamAdamW optimizer =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(
                                WarmupCosineTracker.builder()
                                        .setPeak(values.learningRate)
                                        .setUpdates(steps)
                                        .optWarmup(steps / 20)
                                        .build())
                        .optBlock(model.decoder())
                        .optClipNorm(1)
                        .build();
        float[] losses = new float[steps];
        int softFrom = softPrior == null ? steps : (int) Math.round(steps * (1 - values.softShare));
        try (LanguageModelTrainer trainer =
                new LanguageModelTrainer(model, optimizer, values.seed)) {
            int done = from == null ? 0 : restore(from, optimizer, trainer, losses);
            for (int step = done; step < steps; step++) {
                if (mask != null && (step == done || step == softFrom)) {
                    SelectionPrior prior = step >= softFrom ? softPrior : SelectionPrior.hardMask();
                    new ExpertPrior(mask, SelectionPrior.hardMask())
                            .withWeights(values.weights)
                            .withLogitRanges(
                                    logitRanges == null
                                            ? Collections.nCopies(
                                                    mask.numLayers(), prior.logitRange())
                                            : logitRanges)
                            .withPrior(prior)
                            .apply(model.decoder());
                }
                TokenBatch batch = batches.at(step);
                losses[step] = trainer.step(batch);
                listener.step(step + 1, steps, batch.tokens(), losses[step]);
                saved.saveAdapters(step + 1, steps, model, trainRouters, optimizer, losses);
            }
        } finally {
            optimizer.close();
            ExpertPrior.clear(model.decoder());
        }
        return losses;
    }

    /** Returns the number of steps that were done before. */
    private int restore(
            TrainingCheckpoint from,
            OffloadStreamAdamW optimizer,
            LanguageModelTrainer trainer,
            float[] losses)
            throws IOException {
        StateReport report = from.restore(model, optimizer, trainer);
        float[] before = from.state().losses();
        if (!report.isComplete()
                || before.length != from.state().step()
                || before.length > losses.length) {
            throw new CheckpointException(
                    from.folder()
                            + " is not complete: "
                            + before.length
                            + " losses of "
                            + from.state().step()
                            + " steps. "
                            + report);
        }
        System.arraycopy(before, 0, losses, 0, before.length);
        return before.length;
    }

    /** Builds a {@link CoAdaptation}. */
    public static final class Builder extends AdaptationOptions<Builder> {

        private LanguageModel model;
        private PackedBatches batches;
        private ExpertMask mask;
        private SelectionPrior softPrior;
        private List<Double> logitRanges;
        private boolean trainRouters = true;

        private AdaptationValues values = new AdaptationValues(0);

        Builder() {}

        @Override
        AdaptationValues values() {
            return values;
        }

        /** Takes over the options of the whole recipe. */
        Builder optValues(AdaptationValues from) {
            values = from.copy();
            return this;
        }

        @Override
        Builder self() {
            return this;
        }

        /**
         * Sets the model; its experts have no adapters yet.
         *
         * @param value the model
         * @return this builder
         */
        public Builder setModel(LanguageModel value) {
            model = value;
            return this;
        }

        /**
         * Sets the text; step i uses batch i.
         *
         * @param value the batches
         * @return this builder
         */
        public Builder setBatches(PackedBatches value) {
            batches = value;
            return this;
        }

        /**
         * Sets the number of updates.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder setSteps(int value) {
            values.steps = value;
            return this;
        }

        /**
         * Sets the experts that tokens may go to. Default: all.
         *
         * @param value the mask, or null for the control
         * @return this builder
         */
        public Builder optMask(ExpertMask value) {
            mask = value;
            return this;
        }

        /**
         * Trains the last part of the steps under a soft prior. Default: never.
         *
         * @param prior the prior, or null for none
         * @param share the part of the steps, 0 to 1
         * @return this builder
         */
        public Builder optSoftPrior(SelectionPrior prior, double share) {
            softPrior = prior;
            values.softShare = share;
            return this;
        }

        /**
         * Sets the logit range of every layer for a soft prior of the scaled form. Default: the
         * prior's own in all of them.
         *
         * @param value D a layer, see {@link LogitRanges}
         * @return this builder
         */
        public Builder optLogitRanges(List<Double> value) {
            logitRanges = value;
            return this;
        }

        /**
         * Sets whether routers train. Default: true.
         *
         * @param value whether they do
         * @return this builder
         */
        public Builder optTrainRouters(boolean value) {
            trainRouters = value;
            return this;
        }

        /**
         * Builds the stage.
         *
         * @return the stage
         * @throws IllegalArgumentException if something is missing or out of range
         */
        public CoAdaptation build() {
            Checks.require(
                    model != null && batches != null, "CoAdaptation needs a model and batches");
            values.check();
            Checks.require(
                    softPrior == null || mask != null, "A soft prior needs a mask: call optMask");
            return new CoAdaptation(this);
        }
    }
}
