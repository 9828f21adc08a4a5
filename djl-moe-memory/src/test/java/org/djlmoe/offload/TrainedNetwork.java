package org.djlmoe.offload;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Activation;
import ai.djl.nn.Block;
import ai.djl.nn.LambdaBlock;
import ai.djl.nn.ParallelBlock;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.nn.norm.BatchNorm;
import ai.djl.nn.norm.Dropout;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.EasyTrain;
import ai.djl.training.Trainer;
import ai.djl.training.dataset.ArrayDataset;
import ai.djl.training.listener.EvaluatorTrainingListener;
import ai.djl.training.listener.TrainingListenerAdapter;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import ai.djl.util.Pair;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.Checkpointed;
import org.djlmoe.autograd.Gradients;

/** Small networks of checkpointed blocks under {@code EasyTrain.fit}, with and without offload. */
final class TrainedNetwork {

    static final int BATCH = 16;
    static final int WIDTH = 12;
    static final int STEPS = 12;
    static final long BOUNDARY = BATCH * WIDTH * Float.BYTES;

    enum Kind {
        CHAIN,
        RESIDUAL_OUTSIDE,
        RESIDUAL_OVER_TWO,
        BATCH_NORM,
        DROPOUT,
        NESTED,
        SHARED_BY_TWO,
        SHARED_BY_ALL
    }

    /** Losses, the gradients of the first batch, and the parameters at the end. */
    record Run(List<Float> losses, Map<String, float[]> first, Map<String, float[]> last) {}

    private TrainedNetwork() {}

    static Block block(Kind kind) {
        SequentialBlock net =
                new SequentialBlock().add(linear(WIDTH)).add(new Checkpointed(linear(WIDTH)));
        switch (kind) {
            case CHAIN:
                net.add(checkpointed()).add(checkpointed()).add(checkpointed());
                break;
            case RESIDUAL_OUTSIDE:
                net.add(residual(checkpointed())).add(residual(checkpointed()));
                break;
            case RESIDUAL_OVER_TWO:
                net.add(
                        residual(
                                new SequentialBlock()
                                        .add(checkpointed())
                                        .add(Activation::tanh)
                                        .add(residual(checkpointed()))));
                break;
            case BATCH_NORM:
                net.add(
                                new Checkpointed(
                                        new SequentialBlock()
                                                .add(linear(WIDTH))
                                                .add(BatchNorm.builder().build())))
                        .add(checkpointed());
                break;
            case DROPOUT:
                for (int i = 0; i < 2; i++) {
                    net.add(
                            new Checkpointed(
                                    new SequentialBlock()
                                            .add(linear(WIDTH))
                                            .add(Dropout.builder().optRate(0.5f).build())));
                }
                break;
            case NESTED:
                net.add(
                                new Checkpointed(
                                        new SequentialBlock()
                                                .add(checkpointed())
                                                .add(checkpointed())
                                                .add(checkpointed())))
                        .add(checkpointed());
                break;
            case SHARED_BY_TWO:
                net.add(sum(checkpointed(), checkpointed())).add(checkpointed());
                break;
            default:
                // x reaches three segments, far apart
                net.add(
                        residual(
                                new SequentialBlock()
                                        .add(sum(checkpointed(), identity()))
                                        .add(checkpointed())
                                        .add(sum(checkpointed(), checkpointed()))));
                break;
        }
        return net.add(new Checkpointed(linear(5)));
    }

    private static Block checkpointed() {
        return new Checkpointed(
                new SequentialBlock().add(linear(24)).add(Activation::tanh).add(linear(WIDTH)));
    }

    static Block linear(int units) {
        return Linear.builder().setUnits(units).build();
    }

    private static Block identity() {
        return new LambdaBlock(x -> x);
    }

    private static Block residual(Block inner) {
        return sum(inner, identity());
    }

    private static Block sum(Block left, Block right) {
        return new ParallelBlock(
                branches ->
                        new NDList(
                                branches.get(0)
                                        .singletonOrThrow()
                                        .add(branches.get(1).singletonOrThrow())),
                List.of(left, right));
    }

    static DefaultTrainingConfig config() {
        return new DefaultTrainingConfig(Loss.softmaxCrossEntropyLoss())
                .optOptimizer(Optimizer.adam().optLearningRateTracker(Tracker.fixed(0.01f)).build())
                .optDevices(new Device[] {Device.cpu()})
                .addTrainingListeners(new EvaluatorTrainingListener());
    }

    static Run train(Kind kind, SelectiveCheckpointOffload offload) {
        Engine.getEngine("PyTorch").setRandomSeed(7);
        Block block = block(kind);
        List<Float> losses = new ArrayList<>();
        Map<String, float[]> first = new LinkedHashMap<>();
        DefaultTrainingConfig config =
                config().addTrainingListeners(
                                new TrainingListenerAdapter() {
                                    @Override
                                    public void onTrainingBatch(Trainer trainer, BatchData batch) {
                                        losses.add(
                                                trainer.getLoss()
                                                        .getAccumulator(
                                                                EvaluatorTrainingListener
                                                                        .TRAIN_ALL));
                                        if (first.isEmpty()) {
                                            first.putAll(gradients(block));
                                        }
                                    }
                                });
        if (offload != null) {
            config.addTrainingListeners(offload);
        }
        try (Model model = Model.newInstance("offload", "PyTorch")) {
            model.setBlock(block);
            try (BoundedTrainer trainer = new BoundedTrainer(model, config, 3)) {
                trainer.initialize(new Shape(BATCH, 9));
                NDManager manager = trainer.getManager();
                NDArray x = manager.randomNormal(new Shape(4 * BATCH, 9));
                NDArray y = manager.arange(4 * BATCH).mod(5).toType(x.getDataType(), false);
                ArrayDataset data =
                        new ArrayDataset.Builder()
                                .setData(x)
                                .optLabels(y)
                                .setSampling(BATCH, false)
                                .build();
                EasyTrain.fit(trainer, STEPS / 4, data, null);
            } catch (Exception e) {
                throw new AssertionError(e);
            }
            Map<String, float[]> last = new LinkedHashMap<>();
            for (Pair<String, Parameter> p : block.getParameters()) {
                last.put(p.getKey(), p.getValue().getArray().toFloatArray());
            }
            return new Run(losses, first, last);
        }
    }

    static Map<String, float[]> gradients(Block block) {
        Map<String, float[]> all = new LinkedHashMap<>();
        for (Pair<String, Parameter> p : block.getParameters()) {
            try (NDArray gradient = Gradients.of(p.getValue())) {
                if (gradient != null) {
                    all.put(p.getKey(), gradient.toFloatArray());
                }
            }
        }
        return all;
    }
}
