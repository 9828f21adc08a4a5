package org.djlmoe.training;

import java.util.ArrayList;
import java.util.List;
import org.djlmoe.cache.CachePrior;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertCache;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.TokenSelector;

/**
 * A {@link CachePrior} on every layer of a model, from an empty cache on; closing takes them off
 * again.
 *
 * <pre>{@code
 * List<Double> ranges = LogitRanges.measure(model, validation);
 * try (CachePriors priors =
 *         CachePriors.attach(model, 0.2, ranges, 4, EvictionPolicy.Type.LFU_LIFETIME, 1)) {
 *     Evaluation evaluation = Evaluation.of(model, text, t -> {});
 *     double loads = priors.loadsPerToken(); // what a replay of the trace counts
 * }
 * }</pre>
 *
 * <p>Teacher-forced evaluation runs layer by layer over all tokens of a batch, rows one after the
 * other. A layer's choices depend on its own cache alone, so this is the same as serving token by
 * token. The rows of a batch are requests in order, and the caches stay warm between them.
 */
public final class CachePriors implements AutoCloseable {

    private final List<MoeBlock> layers;
    private final List<TokenSelector> before = new ArrayList<>();
    private final List<CachePrior> priors;

    private CachePriors(List<MoeBlock> layers, List<CachePrior> priors) {
        this.layers = layers;
        this.priors = priors;
        for (int l = 0; l < layers.size(); l++) {
            before.add(layers.get(l).router().selector());
            layers.get(l).router().setSelector(priors.get(l));
        }
    }

    /**
     * Puts cache priors on a model. A static prior of its routers stays and adds up.
     *
     * @param model the model
     * @param lambda the strength in mean logit ranges, finite, 0 or above
     * @param logitRanges D of every layer, see {@link LogitRanges}
     * @param capacity C, experts a layer that the cache holds, at least topK
     * @param policy who leaves a full cache, as in a {@link org.djlmoe.cache.LoadReplay} with its
     *     default settings; neither STATIC nor BELADY
     * @param protectedTop J, how many of the router's own first choices are never displaced
     * @return the priors, to be closed
     * @throws IllegalArgumentException if an argument is out of range
     */
    public static CachePriors attach(
            LanguageModel model,
            double lambda,
            List<Double> logitRanges,
            int capacity,
            EvictionPolicy.Type policy,
            int protectedTop) {
        List<MoeBlock> layers = model.decoder().moeBlocks();
        if (logitRanges.size() != layers.size()) {
            throw new IllegalArgumentException(
                    logitRanges.size()
                            + " logit ranges for a model of "
                            + layers.size()
                            + " layers: give one a layer");
        }
        List<CachePrior> priors = new ArrayList<>();
        for (int l = 0; l < layers.size(); l++) {
            int experts = layers.get(l).router().experts();
            ExpertCache cache =
                    new ExpertCache(
                            experts,
                            layers.get(l).router().topK(),
                            capacity,
                            EvictionPolicy.of(
                                    policy,
                                    experts,
                                    EvictionPolicy.DEFAULT_GAMMA,
                                    null,
                                    EvictionPolicy.layerSeed(0, l, 0)),
                            EvictionPolicy.Admission.ALWAYS);
            priors.add(new CachePrior(cache, lambda, logitRanges.get(l), protectedTop));
        }
        return new CachePriors(layers, priors);
    }

    /**
     * Returns the loads of the tokens served so far.
     *
     * @return misses over all layers / tokens
     */
    public double loadsPerToken() {
        return (double) priors.stream().mapToLong(CachePrior::loads).sum() / priors.get(0).tokens();
    }

    /** Has the routers choose as before. */
    @Override
    public void close() {
        for (int l = 0; l < layers.size(); l++) {
            layers.get(l).router().setSelector(before.get(l));
        }
    }
}
