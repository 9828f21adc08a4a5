package org.djlmoe.examples.dropin;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.nn.transformer.IdEmbedding;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.EasyTrain;
import ai.djl.training.Trainer;
import ai.djl.training.evaluator.Accuracy;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.training.listener.EvaluatorTrainingListener;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;

/** A small language model, trained as DJL code is written. */
public final class StockTraining {

    private StockTraining() {}

    /**
     * Trains with the default settings.
     *
     * @param args none
     * @throws Exception if training fails
     */
    public static void main(String[] args) throws Exception {
        DropInSettings settings = DropInSettings.DEFAULT;
        try (Model model = Model.newInstance("language-model", "PyTorch");
                Trainer trainer =
                        trainer(
                                model,
                                settings,
                                new EvaluatorTrainingListener(),
                                new Tokens.Printer())) {
            EasyTrain.fit(
                    trainer,
                    settings.epochs(),
                    Tokens.dataset(trainer.getManager(), settings),
                    null);
        }
    }

    /**
     * Puts the model together.
     *
     * @param model an empty model
     * @param settings its shape
     * @param listeners listeners of training
     * @return the trainer, initialized
     */
    public static Trainer trainer(
            Model model, DropInSettings settings, TrainingListener... listeners) {
        Engine.getEngine("PyTorch").setRandomSeed(settings.seed());
        SequentialBlock network = new SequentialBlock();
        network.add(
                new IdEmbedding.Builder()
                        .setDictionarySize(settings.vocab())
                        .setEmbeddingSize(settings.hidden())
                        .build());
        for (int layer = 0; layer < settings.layers(); layer++) {
            network.add(new CausalEncoder(settings));
        }
        network.add(Linear.builder().setUnits(settings.vocab()).build());
        model.setBlock(network);
        Loss loss = Loss.softmaxCrossEntropyLoss();
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(loss)
                        .optInitializer(new NormalInitializer(0.02f), Parameter.Type.WEIGHT)
                        .addEvaluator(new Accuracy("accuracy", 2))
                        .optOptimizer(
                                Optimizer.adamW()
                                        .optLearningRateTracker(Tracker.fixed(1e-3f))
                                        .build())
                        .optDevices(new Device[] {Device.cpu()})
                        .addTrainingListeners(listeners);
        Trainer trainer = model.newTrainer(config);
        trainer.initialize(new Shape(settings.batch(), settings.sequence()));
        return trainer;
    }
}
