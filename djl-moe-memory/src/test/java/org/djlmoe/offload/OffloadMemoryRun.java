package org.djlmoe.offload;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.SequentialBlock;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.loss.Loss;
import java.nio.file.Path;
import java.util.Locale;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.Checkpointed;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.reference.ProcessMemory;

/**
 * Prints by how many boundaries a process has grown at the end of forward: of a decoder of 8 layers
 * and of a chain of 16 blocks whose outputs all stay in the caller's lists, each without and with
 * offload to files. Run with an allocator that returns memory.
 *
 * <p>Arguments: a folder on a disk.
 */
final class OffloadMemoryRun {

    private static final int TOKENS = 4096;
    private static final int HIDDEN = 256;
    private static final double BOUNDARY = 4.0 * TOKENS * HIDDEN;

    private OffloadMemoryRun() {}

    public static void main(String[] arguments) {
        Path directory = Path.of(arguments[0]);
        StringBuilder line = new StringBuilder();
        for (boolean decoder : new boolean[] {true, false}) {
            for (boolean offloaded : new boolean[] {false, true}) {
                line.append(
                        String.format(
                                Locale.ROOT,
                                " %.2f",
                                growth(decoder, offloaded ? directory : null) / BOUNDARY));
            }
        }
        System.out.println(line);
    }

    private static Block decoder() {
        return new MoeDecoder(
                MoeConfig.builder()
                        .setVocabSize(64)
                        .setHiddenSize(HIDDEN)
                        .setIntermediateSize(64)
                        .setNumLayers(8)
                        .setNumHeads(4)
                        .setNumExperts(4)
                        .setTopK(1)
                        .optSlidingWindow(128)
                        .build(),
                1024);
    }

    private static Block chain() {
        SequentialBlock chain =
                new SequentialBlock().add(new Checkpointed(TrainedNetwork.linear(HIDDEN)));
        for (int i = 0; i < 15; i++) {
            chain.add(new Checkpointed(TrainedNetwork.linear(HIDDEN)));
        }
        return chain;
    }

    private static double growth(boolean decoder, Path directory) {
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(Loss.l2Loss()).optDevices(new Device[] {Device.cpu()});
        if (directory != null) {
            config.addTrainingListeners(
                    SelectiveCheckpointOffload.builder()
                            .setBudget(1L << 30)
                            .optFileTier(directory)
                            .build());
        }
        try (Model model = Model.newInstance("memory", "PyTorch")) {
            model.setBlock(decoder ? decoder() : chain());
            Shape shape = decoder ? new Shape(TOKENS / 512, 512) : new Shape(TOKENS, HIDDEN);
            try (BoundedTrainer trainer = new BoundedTrainer(model, config)) {
                trainer.initialize(shape);
                double growth = 0;
                // The first step makes gradients and files.
                for (int step = 0; step < 2; step++) {
                    try (NDManager batch = trainer.getManager().newSubManager()) {
                        NDArray x = batch.zeros(shape, decoder ? DataType.INT64 : DataType.FLOAT32);
                        if (!decoder) {
                            x.addi(0.5f);
                        }
                        try (GradientCollector collector = trainer.newGradientCollector()) {
                            double before = ProcessMemory.nativeBytes();
                            NDList out = trainer.forward(new NDList(x));
                            growth = ProcessMemory.nativeBytes() - before;
                            collector.backward(out.head().mean());
                        }
                    }
                }
                return growth;
            }
        }
    }
}
