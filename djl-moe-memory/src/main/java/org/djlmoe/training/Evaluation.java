package org.djlmoe.training;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.function.LongConsumer;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.RoutingObserver;

/**
 * What a model makes of held-out text, every token predicted from the text before it (teacher
 * forcing).
 *
 * @param loss mean cross-entropy in nats a token
 * @param tokens how many tokens were predicted
 * @param trace the experts that every layer chose; each row is a request
 */
public record Evaluation(double loss, long tokens, ExpertTrace trace) {

    /**
     * Evaluates a model as it is, with whatever mask or prior its routers have. Observers of its
     * routers see nothing meanwhile and are back afterwards.
     *
     * @param model the model
     * @param text the held-out text, at least one batch
     * @param progress is told the number of tokens done
     * @return loss and trace
     * @throws IllegalArgumentException if the text is empty
     */
    public static Evaluation of(
            LanguageModel model, Iterable<TokenBatch> text, LongConsumer progress) {
        List<MoeBlock> layers = model.decoder().moeBlocks();
        int topK = model.decoder().config().topK();
        ExpertTrace.Builder trace =
                ExpertTrace.builder()
                        .setNumExperts(model.decoder().config().numExperts())
                        .setTopK(topK)
                        .setNumLayers(layers.size());
        long[][] chosen = new long[layers.size()][];
        List<RoutingObserver> observers = new ArrayList<>();
        for (int l = 0; l < chosen.length; l++) {
            int layer = l;
            observers.add(layers.get(l).router().observer());
            layers.get(l).router().setObserver(ids -> chosen[layer] = ids.toLongArray());
        }
        double total = 0;
        long tokens = 0;
        try {
            for (TokenBatch batch : text) {
                total += model.loss(batch) * batch.tokens();
                tokens += batch.tokens();
                int ids = batch.sequenceLength() * topK;
                for (int row = 0; row < batch.batchSize(); row++) {
                    trace.beginRequest();
                    for (int l = 0; l < chosen.length; l++) {
                        trace.append(l, Arrays.copyOfRange(chosen[l], row * ids, (row + 1) * ids));
                    }
                }
                progress.accept(tokens);
            }
        } finally {
            for (int l = 0; l < chosen.length; l++) {
                layers.get(l).router().setObserver(observers.get(l));
            }
        }
        if (tokens == 0) {
            throw new IllegalArgumentException(
                    "The text to evaluate on is empty: give at least one batch");
        }
        return new Evaluation(total / tokens, tokens, trace.build());
    }

    /**
     * Returns the perplexity.
     *
     * @return e to the loss
     */
    public double perplexity() {
        return Math.exp(loss);
    }
}
