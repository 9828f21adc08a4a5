package org.djlmoe.training;

import ai.djl.Device;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.optimizer.Optimizer;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.vocab.RingDtpLoss;

/**
 * The training step of a {@link LanguageModel}: forward, bounded backward, update.
 *
 * <p>All random numbers of a batch, the engine's included, are decided by the seed and the batch's
 * number, so a run that goes on elsewhere needs no generator's state but {@link #batches}.
 */
public final class LanguageModelTrainer implements AutoCloseable {

    private final BoundedTrainer trainer;
    private final RingDtpLoss loss;
    private final Engine engine;
    private final long seed;

    /**
     * Creates a trainer. The model must outlive it.
     *
     * @param model the model; its frozen parameters stay as they are
     * @param optimizer updates the others
     * @param seed decides the random numbers of all steps
     */
    public LanguageModelTrainer(LanguageModel model, Optimizer optimizer, long seed) {
        loss = model.lossFunction();
        engine = model.manager().getEngine();
        this.seed = seed;
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(loss)
                        .optOptimizer(optimizer)
                        .optDevices(new Device[] {model.manager().getDevice()});
        trainer = new BoundedTrainer(model.model(), config, seed);
        trainer.initialize(new Shape(1, 1));
    }

    /**
     * Trains on a batch.
     *
     * @param batch inputs and targets
     * @return the mean loss before the update, in nats a token
     * @throws IllegalStateException if the loss is not finite; then nothing is updated
     */
    public float step(TokenBatch batch) {
        float value = accumulate(batch);
        trainer.step();
        return value;
    }

    /**
     * Adds the gradients of a batch to what the parameters have, without an update.
     *
     * @param batch inputs and targets
     * @return the mean loss, in nats a token
     * @throws IllegalStateException if the loss is not finite; then there are no gradients of it
     */
    public float accumulate(TokenBatch batch) {
        float value;
        engine.setRandomSeed(Long.hashCode(seed * 0x9E3779B97F4A7C15L + batches()));
        try (NDManager scope = trainer.getManager().newSubManager()) {
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDList out = trainer.forward(new NDList(batch.toInputs(scope)));
                NDArray mean = loss.evaluate(new NDList(batch.toTargets(scope)), out);
                value = mean.getFloat();
                if (!Float.isFinite(value)) {
                    throw new IllegalStateException(
                            "The loss is "
                                    + value
                                    + ": training has diverged and the weights are of no more use."
                                    + " Start again with a lower learning rate.");
                }
                collector.backward(mean);
            }
        }
        return value;
    }

    /**
     * Returns how many batches it has trained on, by {@link #step} or {@link #accumulate}.
     *
     * @return the number of batches, those before {@link #resumeAt} included
     */
    public long batches() {
        return trainer.collectors();
    }

    /**
     * Goes on where another run stopped, as far as random numbers are concerned.
     *
     * @param batches what {@link #batches} was there
     * @throws IllegalArgumentException if the number is negative
     */
    public void resumeAt(long batches) {
        trainer.setCollectors(batches);
    }

    @Override
    public void close() {
        trainer.close();
    }
}
