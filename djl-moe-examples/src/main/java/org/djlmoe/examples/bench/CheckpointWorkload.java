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
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.offload.SelectiveCheckpointOffload;
import org.djlmoe.tier.FileTier;

/**
 * Loss and gradients of decoder layers, whose boundaries are what is held from forward to backward:
 * in memory, or offloaded to files. DJL's own trainer holds everything else as well.
 */
public final class CheckpointWorkload implements Workload {

    static final String MEMORY = "memory";
    static final String STOCK = "stock";
    static final String FILE_TIER = "file-tier";
    static final String SLOW_TIER = "slow-tier";

    private static final double MB = 1 << 20;
    private static final long SLOT_ROUNDING = 4096;

    /** A transfer takes this share of the time of a segment. */
    private static final double SLOWNESS = 0.8;

    private final Model model;
    private final Trainer trainer;
    private final NDArray input;
    private NDArray loss;
    private final int segments;
    private final SlowedTier slowed;
    private double heldAfterForward;
    private double forwardSeconds;
    private double backwardSeconds;

    /**
     * Creates the workload.
     *
     * @param settings tokens, sequence, hidden, layers, heads, window, intermediate, seed, and the
     *     directory {@code tier}
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
        segments = 2 * settings.number("layers");
        Path directory = Path.of(settings.options().get("tier"));
        slowed = settings.name().equals(SLOW_TIER) ? new SlowedTier(new FileTier(directory)) : null;
        SelectiveCheckpointOffload.Builder offload =
                SelectiveCheckpointOffload.builder()
                        .setBudget((segments + 2L) * (4L * tokens * hidden + SLOT_ROUNDING));
        if (slowed != null) {
            config.addTrainingListeners(offload.optTier(() -> slowed).build());
        } else if (settings.name().equals(FILE_TIER)) {
            config.addTrainingListeners(offload.optFileTier(directory).build());
        }
        trainer =
                settings.name().equals(STOCK)
                        ? model.newTrainer(config)
                        : new BoundedTrainer(model, config, settings.number("seed"));
        trainer.initialize(new Shape(tokens, hidden));
        input = trainer.getManager().randomNormal(new Shape(tokens, hidden));
    }

    /**
     * Sets the pace of a slowed tier by the faster of two steps, after one that fresh memory slows
     * down. A run without this, for a peak, has an allocator under which times mean nothing, and so
     * the tier as it is.
     */
    @Override
    public void warmUp() {
        step();
        if (slowed != null) {
            step();
            double forward = forwardSeconds;
            double backward = backwardSeconds;
            step();
            slowed.slowDown(
                    SLOWNESS * Math.min(forward, forwardSeconds) / segments,
                    SLOWNESS * Math.min(backward, backwardSeconds) / segments);
        }
    }

    @Override
    public void run() {
        step();
    }

    private void step() {
        if (loss != null) {
            loss.close();
        }
        long before = ProcessStatus.held();
        try (NDManager batch = trainer.getManager().newSubManager();
                GradientCollector collector = trainer.newGradientCollector()) {
            for (Parameter parameter : model.getBlock().getParameters().values()) {
                Gradients.zero(parameter.getArray());
            }
            long start = System.nanoTime();
            NDArray y =
                    trainer.forward(new NDList(ArrayKernels.alias(batch, input)))
                            .singletonOrThrow();
            heldAfterForward = ProcessStatus.held() - before;
            long middle = System.nanoTime();
            NDArray value = y.square().mean();
            collector.backward(value);
            forwardSeconds = (middle - start) / 1e9;
            backwardSeconds = (System.nanoTime() - middle) / 1e9;
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
