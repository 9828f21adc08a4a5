package org.djlmoe.moe;

import ai.djl.metric.Metrics;
import ai.djl.nn.Block;
import ai.djl.training.Trainer;
import ai.djl.training.listener.TrainingListenerAdapter;
import java.util.Collections;
import java.util.IdentityHashMap;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import org.djlmoe.autograd.Checkpointed;
import org.djlmoe.routing.RoutingStatistics;

/**
 * Adds what the routers of a model's {@link MoeBlock}s do to the trainer's {@link Metrics},
 * whatever trainer it is.
 *
 * <p>After every batch, for the l-th block of the model: {@code moe-l-max-over-mean} (1 is even, E
 * is all on one expert), {@code moe-l-entropy} of the load in nats, {@code moe-l-idle-experts},
 * {@code moe-l-balance-loss} and {@code moe-l-z-loss}. At the end of an epoch {@code
 * moe-l-expert-e-routes}, the routes of each expert in that epoch. Tokens that a mask excludes do
 * not count.
 *
 * <p>Everything was computed by the forward pass; a batch costs a few additions. The listener keeps
 * one number an expert and block. {@link Metrics} keeps every value, unless its own limit is set
 * ({@link Metrics#setLimit}). Without metrics on the trainer nothing happens.
 */
public final class RoutingMetrics extends TrainingListenerAdapter {

    private final Map<MoeBlock, long[]> epoch = new LinkedHashMap<>();

    @Override
    public void onTrainingBegin(Trainer trainer) {
        epoch.clear();
        Set<Block> seen = Collections.newSetFromMap(new IdentityHashMap<>());
        collect(trainer.getModel().getBlock(), seen);
    }

    private void collect(Block block, Set<Block> seen) {
        Block actual = Checkpointed.unwrap(block);
        if (!seen.add(actual)) {
            return;
        }
        if (actual instanceof MoeBlock) {
            MoeBlock moe = (MoeBlock) actual;
            epoch.put(moe, new long[moe.router().experts()]);
        }
        actual.getChildren().values().forEach(child -> collect(child, seen));
    }

    @Override
    public void onTrainingBatch(Trainer trainer, BatchData batchData) {
        Metrics metrics = trainer.getMetrics();
        if (metrics == null) {
            return;
        }
        int layer = 0;
        for (Map.Entry<MoeBlock, long[]> entry : epoch.entrySet()) {
            String prefix = "moe-" + layer++;
            RoutingStatistics s = entry.getKey().statistics().orElse(null);
            if (s == null) {
                continue;
            }
            long[] routes = s.routes();
            for (int e = 0; e < routes.length; e++) {
                entry.getValue()[e] += routes[e];
            }
            metrics.addMetric(prefix + "-max-over-mean", s.maxOverMean());
            metrics.addMetric(prefix + "-entropy", s.entropy());
            metrics.addMetric(prefix + "-idle-experts", s.idleExperts());
            metrics.addMetric(prefix + "-balance-loss", s.balanceLoss());
            metrics.addMetric(prefix + "-z-loss", s.zLoss());
        }
    }

    @Override
    public void onEpoch(Trainer trainer) {
        Metrics metrics = trainer.getMetrics();
        int layer = 0;
        for (long[] routes : epoch.values()) {
            String prefix = "moe-" + layer++ + "-expert-";
            for (int e = 0; e < routes.length; e++) {
                if (metrics != null) {
                    metrics.addMetric(prefix + e + "-routes", routes[e]);
                }
                routes[e] = 0;
            }
        }
    }
}
