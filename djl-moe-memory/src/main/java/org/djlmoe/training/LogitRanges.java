package org.djlmoe.training;

import ai.djl.ndarray.NDArray;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.function.Consumer;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.SelectionPrior;

/**
 * Measures D of every layer, the unit of {@link CachePriors} and of the scaled form of a static
 * prior: the mean over tokens of the largest minus the smallest router logit, see {@link
 * SelectionPrior#meanLogitRange}.
 */
public final class LogitRanges {

    private LogitRanges() {}

    /**
     * Measures a model as it is, with whatever mask or prior its routers have.
     *
     * @param model the model
     * @param text at least one batch
     * @return D a layer
     * @throws IllegalArgumentException if the text is empty, or a router gives all experts the same
     *     logit
     */
    public static List<Double> measure(LanguageModel model, Iterable<TokenBatch> text) {
        List<MoeBlock> layers = model.decoder().moeBlocks();
        double[] sums = new double[layers.size()];
        List<Consumer<NDArray>> before =
                layers.stream().map(layer -> layer.router().logitObserver()).toList();
        long tokens = 0;
        try {
            for (int l = 0; l < sums.length; l++) {
                int layer = l;
                layers.get(l)
                        .router()
                        .setLogitObserver(logits -> sums[layer] += sumOfRanges(logits));
            }
            for (TokenBatch batch : text) {
                model.loss(batch);
                tokens += (long) batch.batchSize() * batch.sequenceLength();
            }
        } finally {
            for (int l = 0; l < sums.length; l++) {
                layers.get(l).router().setLogitObserver(before.get(l));
            }
        }
        if (tokens == 0) {
            throw new IllegalArgumentException("The text to measure logit ranges on is empty");
        }
        List<Double> ranges = new ArrayList<>();
        for (int l = 0; l < sums.length; l++) {
            if (!(sums[l] > 0)) {
                throw new IllegalArgumentException(
                        "Layer " + l + " gives every expert the same logit: it has no range");
            }
            ranges.add(sums[l] / tokens);
        }
        return Collections.unmodifiableList(ranges);
    }

    private static double sumOfRanges(NDArray logits) {
        int experts = (int) logits.getShape().get(1);
        float[] z = logits.toFloatArray();
        double sum = 0;
        for (int row = 0; row < z.length; row += experts) {
            float least = z[row];
            float most = z[row];
            for (int e = 1; e < experts; e++) {
                least = Math.min(least, z[row + e]);
                most = Math.max(most, z[row + e]);
            }
            sum += (double) most - least;
        }
        return sum;
    }
}
