package org.djlmoe.examples.dropin;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.metric.Metrics;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Activation;
import ai.djl.nn.Block;
import ai.djl.nn.Blocks;
import ai.djl.nn.ParallelBlock;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.nn.norm.LayerNorm;
import ai.djl.nn.transformer.IdEmbedding;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.EasyTrain;
import ai.djl.training.Trainer;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.training.listener.EvaluatorTrainingListener;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.util.List;
import java.util.Locale;
import java.util.function.Supplier;
import java.util.stream.Stream;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.Checkpointed;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.moe.RoutingMetrics;
import org.djlmoe.vocab.RingDtpLoss;
import org.djlmoe.vocab.VocabProjection;

/** A transformer of DJL's blocks, with a {@link MoeBlock} in place of each feed-forward block. */
public final class MoeTraining {

    private MoeTraining() {}

    /**
     * Trains with the default settings and prints how even the routers' load is.
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
                                experts(settings),
                                new EvaluatorTrainingListener(),
                                new Tokens.Printer(),
                                new RoutingMetrics())) {
            Metrics metrics = new Metrics();
            trainer.setMetrics(metrics);
            EasyTrain.fit(
                    trainer,
                    settings.epochs(),
                    Tokens.dataset(trainer.getManager(), settings),
                    null);
            for (int layer = 0; layer < settings.layers(); layer++) {
                System.out.printf(
                        Locale.ROOT,
                        "layer %d: the busiest expert gets %.2f times the mean%n",
                        layer,
                        metrics.latestMetric("moe-" + layer + "-max-over-mean").getValue());
            }
        }
    }

    /**
     * Makes the feed-forward half of a layer as it was: x + two layers of norm(x).
     *
     * @param settings the model's shape
     * @return one block a layer
     */
    public static List<Block> dense(DropInSettings settings) {
        return repeated(
                settings,
                () ->
                        new ParallelBlock(
                                        both ->
                                                new NDList(
                                                        both.get(0).head().add(both.get(1).head())))
                                .add(Blocks.identityBlock())
                                .add(
                                        new SequentialBlock()
                                                .add(LayerNorm.builder().axis(2).build())
                                                .add(
                                                        Linear.builder()
                                                                .setUnits(4L * settings.hidden())
                                                                .build())
                                                .add(Activation::relu)
                                                .add(
                                                        Linear.builder()
                                                                .setUnits(settings.hidden())
                                                                .build())));
    }

    /**
     * Makes what replaces it: x + experts(norm(x)).
     *
     * @param settings the model's shape
     * @return one block a layer
     */
    public static List<Block> experts(DropInSettings settings) {
        return repeated(
                settings,
                () ->
                        MoeBlock.builder()
                                .setHiddenSize(settings.hidden())
                                .setIntermediateSize(2 * settings.hidden())
                                .setNumExperts(8)
                                .setTopK(2)
                                .optNorm(1e-5)
                                .optResidual(true)
                                .optBalanceCoefficient(0.01)
                                .optZCoefficient(0.001)
                                .build());
    }

    private static List<Block> repeated(DropInSettings settings, Supplier<Block> block) {
        return Stream.generate(block).limit(settings.layers()).toList();
    }

    /**
     * Puts the model together.
     *
     * @param model an empty model
     * @param settings its shape
     * @param feedForward the feed-forward half of every layer
     * @param listeners listeners of training
     * @return the trainer, initialized
     */
    public static Trainer trainer(
            Model model,
            DropInSettings settings,
            List<Block> feedForward,
            TrainingListener... listeners) {
        model.setBlock(network(settings, feedForward));
        Trainer trainer = new BoundedTrainer(model, config(listeners));
        trainer.initialize(new Shape(settings.batch(), settings.sequence()));
        return trainer;
    }

    static SequentialBlock network(DropInSettings settings, List<Block> feedForward) {
        Engine.getEngine("PyTorch").setRandomSeed(settings.seed());
        SequentialBlock network = new SequentialBlock();
        network.add(
                new IdEmbedding.Builder()
                        .setDictionarySize(settings.vocab())
                        .setEmbeddingSize(settings.hidden())
                        .build());
        for (Block half : feedForward) {
            network.add(new Checkpointed(new CausalAttention(settings)));
            network.add(half);
        }
        network.add(VocabProjection.builder().setVocabSize(settings.vocab()).build());
        return network;
    }

    static DefaultTrainingConfig config(TrainingListener... listeners) {
        return new DefaultTrainingConfig(RingDtpLoss.builder().build())
                .optInitializer(new NormalInitializer(0.02f), Parameter.Type.WEIGHT)
                .optOptimizer(
                        Optimizer.adamW().optLearningRateTracker(Tracker.fixed(1e-3f)).build())
                .optDevices(new Device[] {Device.cpu()})
                .addTrainingListeners(listeners);
    }
}
