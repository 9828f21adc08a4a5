package org.djlmoe.training;

import ai.djl.Device;
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

/** The training step of a {@link LanguageModel}: forward, bounded backward, update. */
public final class LanguageModelTrainer implements AutoCloseable {

    private final BoundedTrainer trainer;
    private final RingDtpLoss loss;

    /**
     * Creates a trainer. The model must outlive it.
     *
     * @param model the model; its frozen parameters stay as they are
     * @param optimizer updates the others
     * @param seed decides the random numbers of segments
     */
    public LanguageModelTrainer(LanguageModel model, Optimizer optimizer, long seed) {
        loss = model.lossFunction();
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

    @Override
    public void close() {
        trainer.close();
    }
}
