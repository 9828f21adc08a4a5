package org.djlmoe.optimizer;

import ai.djl.metric.Metrics;
import ai.djl.metric.Unit;
import ai.djl.training.Trainer;
import ai.djl.training.listener.TrainingListenerAdapter;

/** Tells a trainer's metrics what each step of the optimizer took. */
final class OptimizerMetrics extends TrainingListenerAdapter {

    private final OffloadStreamAdamW optimizer;
    private int reported;

    OptimizerMetrics(OffloadStreamAdamW optimizer) {
        this.optimizer = optimizer;
        reported = optimizer.updates();
    }

    @Override
    public void onTrainingBatch(Trainer trainer, BatchData batchData) {
        report(trainer);
    }

    @Override
    public void onEpoch(Trainer trainer) {
        report(trainer);
    }

    private void report(Trainer trainer) {
        Metrics metrics = trainer.getMetrics();
        if (metrics == null || reported == optimizer.updates()) {
            return;
        }
        reported = optimizer.updates();
        OptimizerStatistics step = optimizer.lastStep();
        add(metrics, "optimizer-fetch", step.fetchSeconds());
        add(metrics, "optimizer-update", step.updateSeconds());
        add(metrics, "optimizer-write-back", step.writeBackSeconds());
        add(metrics, "optimizer-stall", step.stallSeconds());
    }

    private static void add(Metrics metrics, String name, double seconds) {
        metrics.addMetric(name, seconds * 1000, Unit.MILLISECONDS);
    }
}
