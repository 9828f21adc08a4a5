package org.djlmoe.examples.bench;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.util.Pair;
import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.kernel.ArrayKernels;

/**
 * Loss and gradients of decoder layers, whose boundaries are what is held from forward to backward:
 * under the tape, or under DJL's own trainer, which holds everything else as well.
 */
public final class CheckpointWorkload implements Workload {

    static final String MEMORY = "memory";
    static final String STOCK = "stock";

    private static final double MB = 1 << 20;

    private final Model model;
    private final Trainer trainer;
    private final NDArray input;
    private NDArray loss;
    private double heldAfterForward;

    /**
     * Creates the workload.
     *
     * @param settings tokens, sequence, hidden, layers, heads, window, intermediate, seed
     */
    public CheckpointWorkload(CaseSettings settings) {
        int tokens = settings.number("tokens");
        int sequence = settings.number("sequence");
        int hidden = settings.number("hidden");
        if (tokens % sequence != 0) {
            throw new IllegalArgumentException(
                    tokens + " tokens are no whole number of sequences of " + sequence);
        }
        model = Model.newInstance("checkpoint", "PyTorch");
        model.getNDManager().getEngine().setRandomSeed(settings.number("seed"));
        model.setBlock(new DecoderLayers(settings));
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.l2Loss()).optDevices(new Device[] {Device.cpu()});
        trainer =
                settings.name().equals(STOCK)
                        ? model.newTrainer(config)
                        : new BoundedTrainer(model, config, settings.number("seed"));
        trainer.initialize(new Shape(tokens, hidden));
        input = trainer.getManager().randomNormal(new Shape(tokens, hidden));
    }

    @Override
    public void run() {
        if (loss != null) {
            loss.close();
        }
        long before = ProcessStatus.held();
        try (NDManager batch = trainer.getManager().newSubManager();
                GradientCollector collector = trainer.newGradientCollector()) {
            for (Parameter parameter : model.getBlock().getParameters().values()) {
                Gradients.zero(parameter.getArray());
            }
            NDArray y =
                    trainer.forward(new NDList(ArrayKernels.alias(batch, input)))
                            .singletonOrThrow();
            heldAfterForward = ProcessStatus.held() - before;
            NDArray value = y.square().mean();
            collector.backward(value);
            loss = trainer.getManager().create(value.getFloat());
        }
    }

    @Override
    public Map<String, Double> figures() {
        return Map.of("forward_mb", heldAfterForward / MB);
    }

    @Override
    public Map<String, NDArray> results() {
        Map<String, NDArray> results = new LinkedHashMap<>();
        results.put("loss", loss.toType(DataType.FLOAT32, true));
        for (Pair<String, Parameter> parameter : model.getBlock().getParameters()) {
            NDArray gradient = Gradients.of(parameter.getValue());
            // the weight of a router with one expert has none
            if (gradient != null) {
                results.put(parameter.getKey(), gradient);
            }
        }
        return results;
    }

    @Override
    public void close() {
        trainer.close();
        model.close();
    }
}
