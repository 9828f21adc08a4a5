package org.djlmoe.serving;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import org.djlmoe.kernel.DecodeKernels;

/** Memory for a fixed number of experts, made once. */
final class ExpertSlots implements AutoCloseable {

    private final NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    private final ExpertLayout layout;
    private final ByteBuffer[] memory;
    private final NDArray[] gateUp;
    private final NDArray[] down;

    ExpertSlots(ExpertLayout layout, int count) {
        this.layout = layout;
        memory = new ByteBuffer[count];
        gateUp = new NDArray[count];
        down = new NDArray[count];
        for (int s = 0; s < count; s++) {
            NDArray flat = DecodeKernels.expertMemory(manager, layout.elements(), layout.half());
            NDList views =
                    DecodeKernels.expertViews(manager, flat, layout.inner(), layout.hidden());
            memory[s] = flat.toByteBuffer(true).order(ByteOrder.LITTLE_ENDIAN);
            gateUp[s] = views.get(0);
            down[s] = views.get(1);
        }
    }

    int count() {
        return memory.length;
    }

    long bytes() {
        return (long) memory.length * layout.bytes();
    }

    /** Where a slot's record is read into. */
    ByteBuffer memory(int slot) {
        return memory[slot];
    }

    NDArray gateUp(int slot) {
        return gateUp[slot];
    }

    NDArray down(int slot) {
        return down[slot];
    }

    @Override
    public void close() {
        manager.close();
    }
}
