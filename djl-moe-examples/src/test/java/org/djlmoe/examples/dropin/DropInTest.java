package org.djlmoe.examples.dropin;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Model;
import ai.djl.training.EasyTrain;
import ai.djl.training.Trainer;
import ai.djl.training.evaluator.Evaluator;
import ai.djl.training.listener.EvaluatorTrainingListener;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.listener.TrainingListenerAdapter;
import java.util.ArrayList;
import java.util.List;
import org.junit.jupiter.api.Test;

/** The two programs of the example, side by side. */
class DropInTest {

    private static final DropInSettings SMALL = new DropInSettings(211, 16, 3, 2, 4, 12, 5, 2, 7);

    private interface Program {
        Trainer trainer(Model model, DropInSettings settings, TrainingListener... listeners);
    }

    private record Run(List<Float> losses, List<Float> accuracies) {}

    private static Run train(Program program) throws Exception {
        Run run = new Run(new ArrayList<>(), new ArrayList<>());
        TrainingListener record =
                new TrainingListenerAdapter() {
                    @Override
                    public void onTrainingBatch(Trainer trainer, BatchData batch) {
                        String key = EvaluatorTrainingListener.TRAIN_ALL;
                        run.losses.add(trainer.getLoss().getAccumulator(key));
                        for (Evaluator evaluator : trainer.getEvaluators()) {
                            if (evaluator.getName().equals("accuracy")) {
                                run.accuracies.add(evaluator.getAccumulator(key));
                            }
                        }
                    }
                };
        try (Model model = Model.newInstance("language-model", "PyTorch");
                Trainer trainer =
                        program.trainer(model, SMALL, new EvaluatorTrainingListener(), record)) {
            EasyTrain.fit(
                    trainer, SMALL.epochs(), Tokens.dataset(trainer.getManager(), SMALL), null);
        }
        return run;
    }

    @Test
    void fit_bothPrograms_haveEqualLossesAndAccuracies() throws Exception {
        Run stock = train(StockTraining::trainer);
        Run bounded = train(BoundedTraining::trainer);

        assertEquals(10, stock.losses.size());
        assertEquals(10, bounded.losses.size());
        for (int i = 0; i < 10; i++) {
            assertEquals(stock.losses.get(i), bounded.losses.get(i), 1e-5f, "step " + i);
            // one token of several hundred may be predicted otherwise where two ids are as likely
            assertEquals(stock.accuracies.get(i), bounded.accuracies.get(i), 0.005f, "step " + i);
        }
        assertTrue(stock.losses.get(9) < stock.losses.get(0), stock.losses::toString);
    }
}
