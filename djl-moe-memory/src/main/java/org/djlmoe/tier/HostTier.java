package org.djlmoe.tier;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.HashMap;
import java.util.Map;
import org.djlmoe.kernel.TorchKernels;

/**
 * The ordinary memory of the host, for state and for slots.
 *
 * <p>Where the device is the CPU itself, slots here free nothing: what leaves the device lies in
 * the same memory again. They are of use with a GPU (and in tests); on the CPU a {@link FileTier}
 * is what helps.
 */
public final class HostTier implements Tier, SlotTier {

    private static final TorchKernels KERNELS = TorchKernels.load(HostTier.class, "slots.py");

    private final Map<String, NDArray> arrays = new HashMap<>();
    private NDManager manager;
    private long bytes;

    @Override
    public synchronized NDArray allocate(String name, long elements) {
        if (arrays.containsKey(name)) {
            throw new IllegalArgumentException(
                    "This tier holds " + name + " already: give each optimizer a tier of its own");
        }
        // Writing the zeros is the first touch: fresh pages cost more than any later pass.
        NDArray array = manager().full(new Shape(elements), 0f, DataType.FLOAT32);
        NDScope.unregister(array);
        arrays.put(name, array);
        bytes += elements * Float.BYTES;
        return array;
    }

    @Override
    public synchronized void free(String name) {
        NDArray array = arrays.remove(name);
        if (array != null) {
            bytes -= array.size() * Float.BYTES;
            array.close();
        }
    }

    private synchronized NDManager manager() {
        if (manager == null) {
            manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        }
        return manager;
    }

    @Override
    public synchronized long bytes() {
        return bytes;
    }

    private synchronized void count(long change) {
        bytes += change;
    }

    @Override
    public long sizeOf(long bytes) {
        return bytes;
    }

    @Override
    public long available() {
        return Long.MAX_VALUE;
    }

    @Override
    public Slot newSlot(long bytes) {
        count(bytes);
        return new HostSlot(bytes);
    }

    @Override
    public synchronized void close() {
        if (manager != null) {
            manager.close();
            manager = null;
        }
        arrays.clear();
        bytes = 0;
    }

    private final class HostSlot implements Slot {

        private final long capacity;
        private NDArray array;
        private boolean closed;

        HostSlot(long capacity) {
            this.capacity = capacity;
        }

        @Override
        public void write(NDArray source) {
            DataType type = source.getDataType();
            long size = source.size() * type.getNumOfBytes();
            if (size > capacity) {
                throw new IllegalArgumentException(
                        "An array of " + size + " bytes does not fit a slot of " + capacity);
            }
            if (array == null || array.getDataType() != type) {
                free();
                array = manager().create(new Shape(capacity / type.getNumOfBytes()), type);
                NDScope.unregister(array);
            }
            KERNELS.run("store", array, source);
        }

        @Override
        public void read(NDArray target) {
            KERNELS.run("load", array, target);
        }

        private void free() {
            if (array != null) {
                array.close();
                array = null;
            }
        }

        @Override
        public void close() {
            free();
            if (!closed) {
                closed = true;
                count(-capacity);
            }
        }
    }
}
