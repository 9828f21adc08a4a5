package org.djlmoe.maskcoft;

import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.Trainer;
import ai.djl.training.listener.TrainingListenerAdapter;
import java.util.ArrayList;
import java.util.Collections;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Set;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.expert.Experts;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;

/**
 * Stages 1 and 2 of MaskCoFT for a DJL training loop of one's own, {@code EasyTrain} or
 * hand-written: a listener that decides what trains, and under which mask.
 *
 * <pre>{@code
 * MaskCoFTStages stages = MaskCoFTStages.attach(moeBlocks, model.getNDManager(), settings);
 * config.addTrainingListeners(stages);
 * try (BoundedTrainer trainer = new BoundedTrainer(model, config)) {
 *     trainer.initialize(shape);
 *     EasyTrain.fit(trainer, epochs, dataset, null);
 * }
 * stages.prior(beta).save(folder, stages.theta());
 * }</pre>
 *
 * <ol>
 *   <li>{@code maskSteps} batches: only the mask logits train, each batch under its own sampled
 *       mask. It takes an estimator that runs backward.
 *   <li>{@code steps} batches: routers and adapters train under the learned mask, all else is
 *       frozen; the last {@code softShare} of them under the soft prior. Further batches go on so.
 * </ol>
 *
 * <p>A stage ends after a step, when no gradients are pending. The optimizer's learning rate is
 * that of stage 2; mask logits move {@code maskLearningRate / learningRate} times as far, as long
 * as its rate is the one of the settings. All parameters are there from the beginning, frozen until
 * their stage, so that the optimizer knows them. A hand-written loop calls {@code
 * trainer.notifyListeners(l -> l.onTrainingBatch(trainer, batchData))} before each {@code step}, as
 * {@code EasyTrain} does.
 *
 * <p>When training ends, the masks are taken out, routers rank by their own logits and the adapters
 * stay. Beta is then chosen by {@link PriorSweep}, or by hand.
 */
public final class MaskCoFTStages extends TrainingListenerAdapter {

    /** What trains. */
    public enum Stage {
        /** The mask logits. */
        MASK,
        /** Routers and adapters under the hard mask. */
        ADAPT,
        /** Routers and adapters under the soft prior. */
        ADAPT_SOFT
    }

    private final List<MoeBlock> layers;
    private final MaskCoFTSettings settings;
    private final MaskBlocks masks;
    private final int softFrom;
    private Stage stage;
    private int batches;
    private ExpertMask mask;
    private double[][] theta;
    private boolean attached = true;

    private MaskCoFTStages(List<MoeBlock> layers, MaskBlocks masks, MaskCoFTSettings settings) {
        this.layers = layers;
        this.masks = masks;
        this.settings = settings;
        softFrom =
                settings.maskSteps()
                        + (int) Math.round(settings.steps() * (1 - settings.softShare()));
    }

    /**
     * Gives layers mask logits and adapters, before their trainer is made.
     *
     * @param layers the model's MoE layers, without adapters
     * @param manager the model's manager, owner of the new parameters
     * @param settings of both stages
     * @return the listener
     * @throws IllegalArgumentException if the settings do not fit the layers, or the estimator does
     *     not run backward
     * @throws IllegalStateException if a layer has adapters or mask logits; then none are added
     */
    public static MaskCoFTStages attach(
            List<MoeBlock> layers, NDManager manager, MaskCoFTSettings settings) {
        Checks.require(!layers.isEmpty(), "MaskCoFT needs at least one MoE layer");
        Checks.require(
                settings.form() != SelectionPrior.Form.SCALED,
                "form is SCALED: the range of a layer's logits is not known in a loop of one's own;"
                        + " use ADDITIVE or PROBABILITY");
        int experts = layers.get(0).router().experts();
        int topK = layers.get(0).router().topK();
        MaskBlocks masks =
                MaskBlocks.builder()
                        .setLayers(layers)
                        .setManager(manager)
                        .setBudget(settings.budget(layers.size(), experts, topK))
                        .optEstimator(settings.estimator())
                        .optTemperature(settings.temperature())
                        .optScale(settings.maskLearningRate() / settings.learningRate())
                        .optWeights(settings.weights())
                        .optSeed(settings.seed())
                        .build();
        List<Experts> done = new ArrayList<>();
        try {
            for (MoeBlock layer : layers) {
                if (settings.halfExperts()) {
                    layer.experts().narrowWeights(manager);
                }
                layer.experts().attachAdapters(settings.rank(), settings.alpha());
                done.add(layer.experts());
                layer.experts().adapters().initialize(manager, DataType.FLOAT32, new Shape(1));
            }
        } catch (RuntimeException e) {
            done.forEach(Experts::detachAdapters);
            masks.detach();
            throw e;
        }
        return new MaskCoFTStages(List.copyOf(layers), masks, settings);
    }

    @Override
    public void onTrainingBegin(Trainer trainer) {
        if (!(trainer instanceof BoundedTrainer)) {
            throw new IllegalArgumentException(
                    "MaskCoFTStages changes what trains between steps: train with BoundedTrainer");
        }
        enter(trainer);
    }

    @Override
    public void onTrainingBatch(Trainer trainer, BatchData batchData) {
        ((BoundedTrainer) trainer)
                .afterStep(
                        () -> {
                            batches++;
                            enter(trainer);
                        });
    }

    @Override
    public void onTrainingEnd(Trainer trainer) {
        if (attached) {
            theta = masks.theta();
            masks.detach();
            attached = false;
        }
    }

    private void enter(Trainer trainer) {
        if (batches < settings.maskSteps()) {
            if (stage != Stage.MASK) {
                stage = Stage.MASK;
                train(trainer, masks.parameters());
            }
            masks.draw(batches, 0);
            return;
        }
        if (stage == null || stage == Stage.MASK) {
            stage = Stage.ADAPT;
            mask = masks.mask();
            masks.stop();
            List<Parameter> parameters = new ArrayList<>();
            for (MoeBlock layer : layers) {
                parameters.add(layer.router().weight());
                parameters.addAll(layer.experts().adapters().weights());
            }
            train(trainer, parameters);
            apply(hard());
        }
        if (stage == Stage.ADAPT && batches >= softFrom) {
            stage = Stage.ADAPT_SOFT;
            apply(prior(settings.softBeta()));
        }
    }

    private static void train(Trainer trainer, List<Parameter> parameters) {
        Set<Parameter> chosen = Collections.newSetFromMap(new IdentityHashMap<>());
        chosen.addAll(parameters);
        trainer.getModel()
                .getBlock()
                .getParameters()
                .values()
                .forEach(parameter -> parameter.freeze(!chosen.contains(parameter)));
    }

    private void apply(ExpertPrior prior) {
        for (int l = 0; l < layers.size(); l++) {
            layers.get(l).router().setPrior(prior.mask().kept(l), prior.prior(), prior.weights());
        }
    }

    private ExpertPrior hard() {
        return new ExpertPrior(mask(), SelectionPrior.hardMask()).withWeights(settings.weights());
    }

    /**
     * Returns what trains now.
     *
     * @return the stage, null before training begins
     */
    public Stage stage() {
        return stage;
    }

    /**
     * Returns whether both stages have had their batches.
     *
     * @return whether they have
     */
    public boolean isDone() {
        return batches >= settings.maskSteps() + settings.steps();
    }

    /**
     * Returns the learned mask.
     *
     * @return the mask
     * @throws IllegalStateException if stage 1 has not ended
     */
    public ExpertMask mask() {
        if (mask == null) {
            throw new IllegalStateException(
                    "The mask is still learnt: %d of %d steps are done"
                            .formatted(batches, settings.maskSteps()));
        }
        return mask;
    }

    /**
     * Returns the mask logits.
     *
     * @return [layers, experts]
     */
    public double[][] theta() {
        return attached ? masks.theta() : theta;
    }

    /**
     * Sets where the mask logits begin, for instance at the logarithms of how often experts are
     * used. Zeros at first.
     *
     * @param initial [layers, experts], finite
     */
    public void setTheta(double[][] initial) {
        masks.setTheta(initial);
    }

    /**
     * Returns the prior of the learned mask to serve with.
     *
     * @param beta the strength, 0 or above, or infinity
     * @return the prior
     * @throws IllegalStateException if stage 1 has not ended
     */
    public ExpertPrior prior(double beta) {
        return hard().withPrior(settings.prior(beta));
    }
}
