package org.djlmoe.moe;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.kernel.ExpertKernels.Weights;

/** What tests of a layer have in common: a trainer for it, and its weights by name. */
final class MoeLayers {

    private MoeLayers() {}

    /** Adam at a rate of 0.01. */
    static Trainer trainer(Model model, Block block, boolean bounded, Shape shape) {
        model.setBlock(block);
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.l2Loss())
                        .optOptimizer(
                                Optimizer.adam()
                                        .optLearningRateTracker(Tracker.fixed(0.01f))
                                        .build())
                        .optDevices(new Device[] {Device.cpu()});
        Trainer trainer = bounded ? new BoundedTrainer(model, config) : model.newTrainer(config);
        trainer.initialize(shape);
        return trainer;
    }

    /** The parameters that the layer has, in the kernels' order. */
    static Map<Weights, Parameter> parameters(MoeBlock block) {
        List<Parameter> all = new ArrayList<>();
        all.add(block.norm());
        all.add(block.router().weight());
        all.addAll(block.experts().weights());
        all.addAll(block.sharedWeights());
        Map<Weights, Parameter> named = new EnumMap<>(Weights.class);
        for (Weights w : Weights.values()) {
            if (all.get(w.ordinal()) != null) {
                named.put(w, all.get(w.ordinal()));
            }
        }
        return named;
    }

    /** Their values, for a reference. */
    static Map<Weights, double[]> numbers(MoeBlock block) {
        Map<Weights, double[]> weights = new EnumMap<>(Weights.class);
        parameters(block)
                .forEach(
                        (w, p) -> {
                            float[] floats = p.getArray().toFloatArray();
                            double[] numbers = new double[floats.length];
                            Arrays.setAll(numbers, i -> floats[i]);
                            weights.put(w, numbers);
                        });
        return weights;
    }
}
