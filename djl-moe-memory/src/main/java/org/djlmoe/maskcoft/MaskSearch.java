package org.djlmoe.maskcoft;

import java.util.Arrays;
import java.util.List;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.LanguageModel;

/**
 * Stage 1 on a model: runs the batch of every step under the masks that {@link MaskLearning}
 * proposes and hands it the losses. Only forward passes; the weights stay as they are.
 */
public final class MaskSearch {

    private MaskSearch() {}

    /**
     * Learns a mask.
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
        try {
            for (int step = 0; step < steps; step++) {
                TokenBatch batch = batches.at(step);
                List<MaskSample> samples = learning.propose(step);
                double[] losses = new double[samples.size()];
                for (int i = 0; i < losses.length; i++) {
                    new ExpertPrior(samples.get(i).mask(), SelectionPrior.hardMask())
                            .apply(model.decoder());
                    losses[i] = model.loss(batch);
                }
                learning.update(samples, losses);
                double mean = Arrays.stream(losses).average().orElseThrow();
                listener.step(step + 1, steps, (long) batch.tokens() * losses.length, mean);
            }
        } finally {
            ExpertPrior.clear(model.decoder());
        }
        return learning.mask();
    }
}
