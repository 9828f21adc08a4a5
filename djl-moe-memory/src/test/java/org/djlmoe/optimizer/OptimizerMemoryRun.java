package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.reference.ProcessMemory;

/**
 * Prints by how many bytes a process has grown with an optimizer of 4 M parameters after 20 steps,
 * by how many more after 220, and the size of the staging buffers after the first step and the
 * last. Run with an allocator that returns memory.
 *
 * <p>Arguments: memory, files, staged or staged-files; a folder on a disk.
 */
final class OptimizerMemoryRun {

    static final int ELEMENTS = 1 << 22;
    static final int BUCKET = 1 << 19;

    private OptimizerMemoryRun() {}

    public static void main(String[] arguments) {
        String way = arguments[0];
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            // What the engine needs for its first calls is no state.
            OffloadStreamAdamW.Builder warm = builder(way, arguments[1]).optBucketElements(64);
            try (OffloadStreamAdamW optimizer = warm.build()) {
                step(optimizer, slots(manager, 1000), 3);
            }
            List<Slot> slots = slots(manager, ELEMENTS / 8);
            System.gc();
            long before = ProcessMemory.nativeBytes();
            try (OffloadStreamAdamW optimizer = builder(way, arguments[1]).build()) {
                step(optimizer, slots, 1);
                long staging = optimizer.lastStep().stagingBytes();
                step(optimizer, slots, 19);
                long grown = ProcessMemory.nativeBytes();
                step(optimizer, slots, 200);
                System.out.printf(
                        Locale.ROOT,
                        "%d %d %d %d%n",
                        grown - before,
                        ProcessMemory.nativeBytes() - grown,
                        staging,
                        optimizer.lastStep().stagingBytes());
            }
        }
    }

    private static OffloadStreamAdamW.Builder builder(String way, String folder) {
        OffloadStreamAdamW.Builder builder =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(Tracker.fixed(1e-3f))
                        .optBucketElements(BUCKET)
                        .optStaged(way.startsWith("staged"));
        return way.endsWith("files") ? builder.optFileTier(Path.of(folder)) : builder;
    }

    private static List<Slot> slots(NDManager manager, int elements) {
        List<Slot> slots = new ArrayList<>();
        for (int i = 0; i < 8; i++) {
            NDArray weight = manager.full(new Shape(elements), 1f, DataType.FLOAT32);
            NDArray gradient = manager.full(new Shape(elements), 1f, DataType.FLOAT32);
            slots.add(new Slot("w" + i, "w" + i, weight, gradient));
        }
        return slots;
    }

    private static void step(OffloadStreamAdamW optimizer, List<Slot> slots, int steps) {
        for (int step = 0; step < steps; step++) {
            optimizer.step(slots);
        }
    }
}
