package org.djlmoe.tier;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.LinkedHashSet;
import java.util.Set;

/** State in the ordinary memory of the host. */
public final class HostTier implements Tier {

    private final Set<String> names = new LinkedHashSet<>();
    private NDManager manager;
    private long bytes;

    @Override
    public synchronized NDArray allocate(String name, long elements) {
        if (!names.add(name)) {
            throw new IllegalArgumentException("This tier holds " + name + " already");
        }
        if (manager == null) {
            manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        }
        bytes += elements * Float.BYTES;
        // Writing the zeros is the first touch: fresh pages cost more than any later pass.
        return manager.full(new Shape(elements), 0f, DataType.FLOAT32);
    }

    @Override
    public synchronized long bytes() {
        return bytes;
    }

    @Override
    public synchronized void close() {
        if (manager != null) {
            manager.close();
            manager = null;
        }
        names.clear();
        bytes = 0;
    }
}
