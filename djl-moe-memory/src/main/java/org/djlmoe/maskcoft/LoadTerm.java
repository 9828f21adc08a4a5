package org.djlmoe.maskcoft;

import java.util.List;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;

/**
 * A term lambda * (expert loads a token) that is added to the loss of a sampled mask, so that the
 * search optimises what serving pays for. The loads are replayed from the routing of the batch
 * under the mask, so the term has no gradient: only estimators that learn from losses see it.
 *
 * @param lambda weight in nats a load, finite, at least 0
 * @param cacheSize experts a layer that the replayed cache holds
 * @param policy the cache's policy
 */
public record LoadTerm(double lambda, int cacheSize, EvictionPolicy.Type policy) {

    /** No such term. */
    public static final LoadTerm NONE = new LoadTerm(0, 1, EvictionPolicy.Type.LFU_LIFETIME);

    /** Checks the ranges. */
    public LoadTerm {
        Checks.require(
                lambda >= 0 && Double.isFinite(lambda),
                "loadWeight is %s: it must be finite and 0 or more",
                lambda);
        Checks.require(policy != null, "policy is null: name an eviction policy");
    }

    /** The loss of a batch with this term, under whatever mask the routers have. */
    double loss(LanguageModel model, TokenBatch batch) {
        if (lambda == 0) {
            return model.loss(batch);
        }
        Evaluation evaluation = Evaluation.of(model, List.of(batch), tokens -> {});
        LoadReplay replay = LoadReplay.builder().setCapacity(cacheSize).build();
        return evaluation.loss() + lambda * replay.run(evaluation.trace(), policy).loadsPerToken();
    }
}
