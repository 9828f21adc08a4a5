package org.djlmoe.offload;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import java.util.ArrayList;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Future;
import java.util.function.Consumer;
import org.djlmoe.autograd.BoundaryPolicy;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.tier.SlotTier;

/**
 * The boundaries of one tape.
 *
 * <p>A boundary is written while the next segment runs forward, and its memory is freed by the
 * tape's thread after that: never while a read or write of it is under way. One write is under way
 * at a time. In backward the boundaries of the segment before are fetched while one runs.
 */
final class OffloadSession implements BoundaryPolicy.Session, BoundaryArray.LateReads {

    private static final Set<DataType> TYPES =
            Set.of(
                    DataType.FLOAT32,
                    DataType.FLOAT64,
                    DataType.FLOAT16,
                    DataType.INT64,
                    DataType.INT32);

    private final NDManager manager;
    private final SlotPool pool;
    private final WorkerThread thread;
    private final long minBytes;
    private final Consumer<OffloadStatistics> atEnd;

    private final Map<NDArray, Held> held = new IdentityHashMap<>();
    private final List<Use> recorded = new ArrayList<>();
    private final List<Held> writing = new ArrayList<>();
    private final List<BoundaryArray> lateReads = new ArrayList<>();
    private Future<Void> write;
    private boolean closed;

    private long bytesOut;
    private long bytesBack;
    private long waitNanos;
    private long onDevice;
    private long peak;

    OffloadSession(
            NDManager manager,
            SlotPool pool,
            WorkerThread thread,
            long minBytes,
            Consumer<OffloadStatistics> atEnd) {
        this.manager = manager;
        this.pool = pool;
        this.thread = thread;
        this.minBytes = minBytes;
        this.atEnd = atEnd;
    }

    @Override
    public NDArray handOut(NDArray output, NDArray anchor) {
        return BoundaryArray.inPlaceOf(output, anchor, this);
    }

    @Override
    public boolean isUnchanged(NDArray array, long version) {
        return ((BoundaryArray) array).isUnchanged();
    }

    @Override
    public BoundaryPolicy.Boundaries keep(NDList inputs) {
        if (write != null && write.isDone()) {
            finishWrite(inputs);
        }
        Use use = new Use();
        try {
            for (NDArray input : inputs) {
                Held one = held.computeIfAbsent(input, Held::new);
                one.users++;
                use.inputs.add(one);
                one.restore();
            }
        } catch (RuntimeException | Error e) {
            use.close();
            throw e;
        }
        return use;
    }

    @Override
    public boolean restored(BoundaryArray array) {
        bytesBack += bytes(array);
        if (!closed) {
            lateReads.add(array);
            count(bytes(array));
        }
        return !closed;
    }

    /** Waits for the write under way and frees the memory of what it wrote. */
    private void finishWrite(List<NDArray> stillNeeded) {
        if (write == null) {
            return;
        }
        try {
            timed(write, "a boundary was being written to its tier");
        } catch (RuntimeException | Error e) {
            if (!write.isDone()) {
                // Interrupted: close() waits for it.
                throw e;
            }
            write = null;
            writing.forEach(Held::unstore);
            writing.clear();
            throw e;
        }
        write = null;
        List<Held> written = new ArrayList<>(writing);
        writing.clear();
        for (Held one : written) {
            bytesOut += one.bytes;
            if (one.isModified()) {
                // What was written may be half of each; its backward will say so.
                one.unstore();
            } else if (stillNeeded.stream().noneMatch(needed -> needed == one.input)) {
                one.drop();
            }
        }
    }

    private <T> T timed(Future<T> job, String doing) {
        if (job.isDone()) {
            return WorkerThread.await(job, doing);
        }
        long start = System.nanoTime();
        try {
            return WorkerThread.await(job, doing);
        } finally {
            waitNanos += System.nanoTime() - start;
        }
    }

    private void startWrite(List<Held> candidates) {
        List<Held> next = new ArrayList<>();
        List<StoredBoundary> places = new ArrayList<>();
        List<NDArray> arrays = new ArrayList<>();
        try {
            for (Held one : candidates) {
                if (!one.isMovable() || one.stored != null) {
                    continue;
                }
                SlotTier.Slot slot = pool.acquire(one.bytes);
                if (slot != null) {
                    one.stored = new StoredBoundary(pool, thread, slot, one.device);
                    next.add(one);
                    places.add(one.stored);
                    arrays.add(one.device);
                }
            }
            if (!next.isEmpty()) {
                write =
                        thread.submit(
                                () -> {
                                    for (int i = 0; i < places.size(); i++) {
                                        places.get(i).write(arrays.get(i));
                                    }
                                    return null;
                                });
                writing.addAll(next);
            }
        } catch (RuntimeException | Error e) {
            next.forEach(Held::unstore);
            throw e;
        }
    }

    private void evictAgain() {
        for (BoundaryArray array : lateReads) {
            array.evictAgain();
            count(-bytes(array));
        }
        lateReads.clear();
    }

    private void count(long change) {
        onDevice += change;
        peak = Math.max(peak, onDevice);
    }

    private static long bytes(NDArray array) {
        DataType type = array.getDataType();
        return TYPES.contains(type) ? array.size() * type.getNumOfBytes() : 0;
    }

    @Override
    public void close() {
        if (closed) {
            return;
        }
        closed = true;
        if (write != null) {
            WorkerThread.settle(write);
            boolean failed = !succeeded(write);
            write = null;
            if (failed) {
                writing.forEach(Held::unstore);
            }
            writing.clear();
        }
        new ArrayList<>(held.values()).forEach(Held::release);
        held.clear();
        recorded.clear();
        evictAgain();
        atEnd.accept(new OffloadStatistics(bytesOut, bytesBack, waitNanos / 1e9, peak));
    }

    private static boolean succeeded(Future<?> job) {
        try {
            WorkerThread.await(job, "closing");
            return true;
        } catch (RuntimeException | Error e) {
            return false;
        }
    }

    /** An array that is the input of one or several recorded segments. */
    private final class Held {

        final NDArray input;
        final long bytes;
        // What of it is in the sum of bytes on the device.
        long counted;
        long version;
        int users;
        // Backward computations that are using it; it must not be freed under them.
        int running;
        NDManager home;
        NDArray device;
        StoredBoundary stored;
        Future<NDArray> fetch;

        Held(NDArray input) {
            this.input = input;
            home = manager.newSubManager();
            device = BoundaryPolicy.withoutHistory(input, home);
            bytes = OffloadSession.bytes(device);
            version = ArrayKernels.version(device);
            if (input instanceof BoundaryArray) {
                count(counted = bytes);
            }
        }

        /**
         * Whether letting go of it frees memory. What no segment made may belong to anybody: it may
         * be a weight.
         */
        boolean isMovable() {
            return input instanceof BoundaryArray && bytes >= Math.max(1, minBytes);
        }

        boolean isWritten() {
            return stored != null && !writing.contains(this);
        }

        /** Frees the memory, which can be brought back. */
        void drop() {
            if (!isWritten() || running > 0) {
                return;
            }
            abandonFetch();
            if (device != null) {
                letGo();
            }
            ((BoundaryArray) input).evict(stored);
        }

        private void letGo() {
            home.close();
            home = null;
            device = null;
            count(-counted);
            counted = 0;
        }

        void startFetch() {
            if (device == null && fetch == null) {
                NDManager place = manager.newSubManager();
                try {
                    fetch = stored.fetch(place);
                } catch (RuntimeException | Error e) {
                    place.close();
                    throw e;
                }
                home = place;
                count(counted = bytes);
                bytesBack += bytes;
            }
        }

        void restore() {
            startFetch();
            if (fetch != null) {
                device = timed(fetch, "a boundary was being read from its tier");
                version = ArrayKernels.version(device);
                fetch = null;
            }
            if (isModified()) {
                throw new IllegalStateException(
                        "An array of shape "
                                + device.getShape()
                                + " was changed in place after a segment had taken it as input, so"
                                + " the segment's gradients would be wrong: change a copy instead");
            }
        }

        boolean isModified() {
            return device != null && ArrayKernels.version(device) != version;
        }

        private void abandonFetch() {
            if (fetch != null) {
                WorkerThread.settle(fetch);
                fetch = null;
                letGo();
            }
        }

        void unstore() {
            stored.discard();
            stored = null;
        }

        void removeUser(boolean neededNext) {
            if (--users == 0) {
                release();
                held.remove(input);
            } else if (!neededNext) {
                drop();
            }
        }

        /** Frees memory and slot; what the caller holds keeps its values. */
        void release() {
            if (writing.contains(this)) {
                WorkerThread.settle(write);
                if (succeeded(write)) {
                    finishWrite(List.of());
                } else {
                    writing.forEach(Held::unstore);
                    writing.clear();
                    write = null;
                }
            }
            drop();
            abandonFetch();
            if (device != null) {
                letGo();
            }
            if (stored != null) {
                stored.release();
                stored = null;
            }
        }
    }

    /** The boundaries of one segment. */
    private final class Use implements BoundaryPolicy.Boundaries {

        final List<Held> inputs = new ArrayList<>();
        boolean running;
        private int inUse;
        private boolean done;

        @Override
        public NDList arrays() {
            NDList arrays = new NDList();
            inputs.forEach(one -> arrays.add(one.device));
            return arrays;
        }

        @Override
        public void recorded() {
            finishWrite(List.of());
            evictAgain();
            inputs.forEach(Held::drop);
            recorded.add(this);
            startWrite(inputs);
        }

        @Override
        public void beforeBackward() {
            running = true;
            evictAgain();
            if (write != null && write.isDone()) {
                finishWrite(inputs.stream().map(one -> one.input).toList());
            }
            for (Held one : inputs) {
                one.restore();
                one.running++;
                inUse++;
            }
            Use next = before();
            for (Use other : recorded) {
                if (other != next && !other.running) {
                    other.inputs.stream()
                            .filter(one -> one.fetch != null)
                            .filter(one -> next == null || !next.inputs.contains(one))
                            .forEach(Held::abandonFetch);
                }
            }
            if (next != null) {
                next.inputs.forEach(Held::startFetch);
            }
        }

        /** The segment whose backward comes next, as far as can be told. */
        private Use before() {
            for (int i = recorded.lastIndexOf(this) - 1; i >= 0; i--) {
                if (!recorded.get(i).running) {
                    return recorded.get(i);
                }
            }
            return null;
        }

        @Override
        public void close() {
            if (!done) {
                done = true;
                Use next = before();
                recorded.remove(this);
                for (Held one : inputs) {
                    if (inUse > 0) {
                        one.running--;
                        inUse--;
                    }
                    if (!closed) {
                        one.removeUser(next != null && next.inputs.contains(one));
                    }
                }
                inputs.clear();
            }
        }
    }
}
