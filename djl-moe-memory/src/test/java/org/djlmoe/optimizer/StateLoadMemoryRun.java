package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import org.djlmoe.autograd.ParameterPaths;
import org.djlmoe.autograd.StepOptimizer.Slot;

/**
 * Prints by how many bytes the most memory of the process exceeds what it holds with the state of 4
 * M parameters: in a save, in a load over that state, and in a load into a new optimizer beyond its
 * state. Run with an allocator that returns memory.
 *
 * <p>Arguments: a folder on a disk.
 */
final class StateLoadMemoryRun {

    private static final int WIDTH = 1024;
    private static final int LAYERS = 4;

    private StateLoadMemoryRun() {}

    public static void main(String[] arguments) throws IOException {
        Path file = Path.of(arguments[0], "state.safetensors");
        SequentialBlock block = new SequentialBlock();
        for (int i = 0; i < LAYERS; i++) {
            block.add(Linear.builder().setUnits(WIDTH).optBias(false).build());
        }
        try (Model model = Model.newInstance("memory", Device.cpu(), "PyTorch");
                OffloadStreamAdamW small = optimizer();
                OffloadStreamAdamW first = optimizer();
                OffloadStreamAdamW second = optimizer()) {
            model.setBlock(block);
            NDManager manager = model.getNDManager();
            block.initialize(manager, DataType.FLOAT32, new Shape(1, WIDTH));
            // What the engine needs for its first calls is no state.
            Block tiny = Linear.builder().setUnits(2).build();
            tiny.initialize(manager, DataType.FLOAT32, new Shape(1, 2));
            step(small, manager, tiny);
            small.save(file);
            small.load(file, tiny);

            step(first, manager, block);
            long save = growth(() -> first.save(file));
            long over = growth(() -> first.load(file, block));
            long fresh = growth(() -> second.load(file, block));
            long state = 8L * LAYERS * WIDTH * WIDTH;
            System.out.printf(Locale.ROOT, "%d %d %d%n", save, over, fresh - state);
        }
    }

    private static OffloadStreamAdamW optimizer() {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(Tracker.fixed(1e-3f))
                .optBucketElements(OptimizerMemoryRun.BUCKET)
                .build();
    }

    private static void step(OffloadStreamAdamW optimizer, NDManager manager, Block block) {
        try (NDManager scope = manager.newSubManager()) {
            List<Slot> slots = new ArrayList<>();
            ParameterPaths.of(block)
                    .forEach(
                            (path, p) ->
                                    slots.add(
                                            new Slot(
                                                    path,
                                                    path,
                                                    p.getArray(),
                                                    scope.ones(p.getArray().getShape()))));
            optimizer.step(slots);
        }
    }

    private interface Action {
        void run() throws IOException;
    }

    private static long growth(Action action) throws IOException {
        System.gc();
        Files.writeString(Path.of("/proc/self/clear_refs"), "5");
        long before = kilobytes("VmRSS:");
        action.run();
        return 1024 * (kilobytes("VmHWM:") - before);
    }

    private static long kilobytes(String key) throws IOException {
        for (String line :
                Files.readAllLines(Path.of("/proc/self/status"), StandardCharsets.US_ASCII)) {
            if (line.startsWith(key)) {
                return Long.parseLong(line.replaceAll("[^0-9]", ""));
            }
        }
        throw new IOException("No " + key + " in /proc/self/status");
    }
}
