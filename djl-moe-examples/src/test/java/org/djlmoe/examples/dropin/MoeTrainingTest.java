package org.djlmoe.examples.dropin;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Model;
import ai.djl.metric.Metrics;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.training.EasyTrain;
import ai.djl.training.Trainer;
import ai.djl.training.listener.EvaluatorTrainingListener;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.listener.TrainingListenerAdapter;
import ai.djl.util.Pair;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Function;
import org.djlmoe.moe.RoutingMetrics;
import org.junit.jupiter.api.Test;

/** Feed-forward blocks of a DJL transformer become Mixtures of Experts. */
class MoeTrainingTest {

    private static final DropInSettings SMALL = new DropInSettings(211, 16, 2, 2, 4, 12, 5, 2, 7);

    private record Run(List<Float> losses, Map<String, Boolean> moved, Metrics metrics) {}

    private static Run train(Function<DropInSettings, List<Block>> feedForward, boolean bounded)
            throws Exception {
        List<Float> losses = new ArrayList<>();
        Metrics metrics = new Metrics();
        Map<String, Boolean> moved = new LinkedHashMap<>();
        TrainingListener record =
                new TrainingListenerAdapter() {
                    @Override
                    public void onTrainingBatch(Trainer trainer, BatchData batch) {
                        String key = EvaluatorTrainingListener.TRAIN_ALL;
                        losses.add(trainer.getLoss().getAccumulator(key));
                    }
                };
        TrainingListener[] listeners = {
            new EvaluatorTrainingListener(), new RoutingMetrics(), record
        };
        try (Model model = Model.newInstance("language-model", "PyTorch");
                Trainer trainer = trainer(model, feedForward, bounded, listeners)) {
            trainer.setMetrics(metrics);
            Map<String, float[]> before = new LinkedHashMap<>();
            for (Pair<String, Parameter> p : model.getBlock().getParameters()) {
                before.put(p.getKey(), p.getValue().getArray().toFloatArray());
            }
            EasyTrain.fit(
                    trainer, SMALL.epochs(), Tokens.dataset(trainer.getManager(), SMALL), null);
            for (Pair<String, Parameter> p : model.getBlock().getParameters()) {
                float[] after = p.getValue().getArray().toFloatArray();
                moved.put(p.getKey(), !Arrays.equals(before.get(p.getKey()), after));
            }
        }
        return new Run(losses, moved, metrics);
    }

    private static Trainer trainer(
            Model model,
            Function<DropInSettings, List<Block>> feedForward,
            boolean bounded,
            TrainingListener... listeners) {
        if (bounded) {
            return MoeTraining.trainer(model, SMALL, feedForward.apply(SMALL), listeners);
        }
        model.setBlock(MoeTraining.network(SMALL, feedForward.apply(SMALL)));
        Trainer trainer = model.newTrainer(MoeTraining.config(listeners));
        trainer.initialize(new Shape(SMALL.batch(), SMALL.sequence()));
        return trainer;
    }

    @Test
    void fit_expertsForFeedForward_lossesOfDjlsTrainerAndEverythingLearns() throws Exception {
        Run stock = train(MoeTraining::experts, false);
        Run bounded = train(MoeTraining::experts, true);
        assertEquals(10, bounded.losses.size());
        for (int i = 0; i < 10; i++) {
            assertEquals(stock.losses.get(i), bounded.losses.get(i), 1e-4f, "step " + i);
        }
        assertTrue(bounded.losses.get(9) < bounded.losses.get(0), bounded.losses::toString);
        bounded.moved.forEach((name, moved) -> assertTrue(moved, name + " has not moved"));
        for (int layer = 0; layer < SMALL.layers(); layer++) {
            String name = "moe-" + layer + "-balance-loss";
            assertEquals(10, bounded.metrics.getMetric(name).size());
            assertEquals(
                    stock.metrics.latestMetric(name).getValue(),
                    bounded.metrics.latestMetric(name).getValue(),
                    1e-3);
            long routes = 0;
            for (int e = 0; e < 8; e++) {
                String expert = "moe-" + layer + "-expert-" + e + "-routes";
                assertEquals(2, bounded.metrics.getMetric(expert).size());
                routes += bounded.metrics.latestMetric(expert).getValue().longValue();
            }
            // five batches of 4 x 12 tokens, two experts each: nothing is dropped
            assertEquals(5 * 4 * 12 * 2, routes);
        }
    }

    @Test
    void fit_feedForwardAsItWas_sameProgramWithoutExperts() throws Exception {
        Run dense = train(MoeTraining::dense, true);
        assertTrue(dense.losses.get(9) < dense.losses.get(0), dense.losses::toString);
        assertFalse(dense.metrics.hasMetric("moe-0-balance-loss"));
    }
}
