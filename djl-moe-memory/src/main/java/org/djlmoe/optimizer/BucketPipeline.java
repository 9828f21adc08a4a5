package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.LongAdder;
import java.util.function.Supplier;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.optimizer.StateBuckets.Bucket;
import org.djlmoe.tier.Tier;

/**
 * Updates buckets one after the other, each in one of three ways.
 *
 * <ul>
 *   <li>In memory, in place: nothing but the update, on the calling thread.
 *   <li>In files that are in memory, in place: another thread sees beforehand that they are.
 *   <li>Staged, where the update cannot run where the state lies, as on a GPU, or where files are
 *       not in memory: while a bucket is updated in one staging buffer, another thread fetches the
 *       next to the other, once a third has written back what that one held. Two buffers, made
 *       once; all is written back when a run returns.
 * </ul>
 */
final class BucketPipeline implements AutoCloseable {

    /** Elements [first, last) of a bucket. */
    record Job(Bucket bucket, long first, long last) {}

    /** The update of one bucket, whose state is at hand. */
    interface Update {
        void run(Job job, BucketState state);
    }

    private static final int SLOTS = 2;

    private final Tier tier;
    private final AdamWKernels kernels;
    private final boolean alwaysStaged;
    private WorkerThread fetcher;
    private WorkerThread writer;

    private NDManager manager;
    private final NDArray[] slots = new NDArray[SLOTS];
    private NDArray scratch;

    /** Buckets of files that are being read ahead of a later run. */
    private final Map<Bucket, Future<?>> ahead = new HashMap<>();

    private final LongAdder fetchNanos = new LongAdder();
    private final LongAdder updateNanos = new LongAdder();
    private final LongAdder writeNanos = new LongAdder();
    private final LongAdder stallNanos = new LongAdder();

    BucketPipeline(Tier tier, AdamWKernels kernels, boolean alwaysStaged) {
        this.tier = tier;
        this.kernels = kernels;
        this.alwaysStaged = alwaysStaged;
    }

    /**
     * Updates buckets.
     *
     * @param jobs each bucket once
     * @param next the bucket that a later run will probably begin with, or null
     * @param device where the weights are
     * @param update updates one of them
     */
    void run(List<Job> jobs, Bucket next, Device device, Update update) {
        boolean staged = alwaysStaged || device.isGpu();
        if (staged) {
            makeSlots(jobs, device);
        }
        if (!tier.isBackedByFiles() && (!staged || jobs.size() == 1)) {
            for (Job job : jobs) {
                Fetched fetched = timed(fetchNanos, () -> fetch(job, 0, staged));
                timed(updateNanos, () -> update.run(job, fetched.state));
                timed(writeNanos, () -> write(job, fetched));
            }
            return;
        }
        overlapped(jobs, next, staged, device, update);
    }

    /** State where it is updated, and how it came there and goes back. */
    private record Fetched(BucketState state, Origin origin) {}

    private enum Origin {
        IN_PLACE,
        COPIED,
        READ
    }

    private void overlapped(
            List<Job> jobs, Bucket next, boolean staged, Device device, Update update) {
        startThreads();
        List<Future<Fetched>> fetches = new ArrayList<>();
        List<Future<?>> writes = new ArrayList<>();
        try {
            for (int k = 0; k < jobs.size(); k++) {
                while (fetches.size() < jobs.size() && fetches.size() <= k + 1) {
                    int i = fetches.size();
                    Future<?> before = i < SLOTS ? null : writes.get(i - SLOTS);
                    fetches.add(submitFetch(jobs, i, before, staged, device));
                }
                Fetched fetched = stalled(fetches.get(k));
                Job job = jobs.get(k);
                timed(updateNanos, () -> update.run(job, fetched.state));
                writes.add(
                        fetched.origin == Origin.IN_PLACE
                                ? null
                                : writer.submit(
                                        () -> timed(writeNanos, () -> write(job, fetched))));
            }
            for (Future<?> write : writes) {
                if (write != null) {
                    stalled(write);
                }
            }
            if (next != null && tier.isBackedByFiles() && !ahead.containsKey(next)) {
                ahead.put(
                        next,
                        fetcher.submit(() -> timed(fetchNanos, () -> tier.readAhead(next.name))));
            }
        } finally {
            // What still runs touches buffers that the next step uses.
            fetches.forEach(WorkerThread::settle);
            writes.stream().filter(Objects::nonNull).forEach(WorkerThread::settle);
        }
    }

    private Future<Fetched> submitFetch(
            List<Job> jobs, int number, Future<?> before, boolean staged, Device device) {
        Job job = jobs.get(number);
        Future<?> early = ahead.remove(job.bucket);
        return fetcher.submit(
                () -> {
                    if (before != null) {
                        WorkerThread.await(before, "writing back the optimizer's state");
                    }
                    if (early != null) {
                        WorkerThread.await(early, "reading the optimizer's state");
                    }
                    // Asked once: a page may be dropped between two questions.
                    if (!device.isGpu() && !tier.isInMemory(job.bucket.name)) {
                        makeSlots(jobs, device);
                        return timed(fetchNanos, () -> read(job, number % SLOTS));
                    }
                    return timed(fetchNanos, () -> fetch(job, number % SLOTS, staged));
                });
    }

    private Fetched read(Job job, int slot) {
        tier.read(job.bucket.name, slots[slot]);
        return new Fetched(inSlot(job, slot), Origin.READ);
    }

    private Fetched fetch(Job job, int slot, boolean staged) {
        tier.readAhead(job.bucket.name);
        if (!staged) {
            return new Fetched(job.bucket.state, Origin.IN_PLACE);
        }
        kernels.move(slots[slot], job.bucket.state, job.first, job.last);
        return new Fetched(inSlot(job, slot), Origin.COPIED);
    }

    private BucketState inSlot(Job job, int slot) {
        BucketState state = job.bucket.state;
        return new BucketState(slots[slot], state.elements(), state.master());
    }

    private void write(Job job, Fetched fetched) {
        if (fetched.origin == Origin.COPIED) {
            kernels.move(job.bucket.state.array(), fetched.state, job.first, job.last);
        } else if (fetched.origin == Origin.READ) {
            tier.write(job.bucket.name, fetched.state.array());
        }
    }

    private void startThreads() {
        if (fetcher == null) {
            fetcher = new WorkerThread("optimizer-fetch");
            writer = new WorkerThread("optimizer-write");
        }
    }

    private static <T> T timed(LongAdder nanos, Supplier<T> stage) {
        long start = System.nanoTime();
        try {
            return stage.get();
        } finally {
            nanos.add(System.nanoTime() - start);
        }
    }

    private static Void timed(LongAdder nanos, Runnable stage) {
        return timed(
                nanos,
                () -> {
                    stage.run();
                    return null;
                });
    }

    private <T> T stalled(Future<T> job) {
        return timed(stallNanos, () -> WorkerThread.await(job, "moving the optimizer's state"));
    }

    private void makeSlots(List<Job> jobs, Device device) {
        long needed = 0;
        for (Job job : jobs) {
            BucketState state = job.bucket.state;
            needed = Math.max(needed, BucketState.size(state.elements(), state.master()));
        }
        for (int i = 0; i < SLOTS; i++) {
            slots[i] = atLeast(needed, slots[i], device);
        }
    }

    /** Returns a buffer to widen gradients of half precision. */
    NDArray scratch(long elements, Device device) {
        scratch = atLeast(elements, scratch, device);
        return scratch;
    }

    /** The fetching thread makes slots while the calling one may make scratch. */
    private synchronized NDArray atLeast(long elements, NDArray buffer, Device device) {
        if (buffer != null) {
            if (buffer.size() >= elements) {
                return buffer;
            }
            buffer.close();
        }
        if (manager == null) {
            manager = NDManager.newBaseManager(device, "PyTorch");
        }
        NDArray array = manager.full(new Shape(elements), 0f, DataType.FLOAT32);
        NDScope.unregister(array);
        return array;
    }

    /** Forgets the times of the step before. */
    void beginStep() {
        fetchNanos.reset();
        updateNanos.reset();
        writeNanos.reset();
        stallNanos.reset();
    }

    OptimizerStatistics statistics() {
        return new OptimizerStatistics(
                fetchNanos.sum() / 1e9,
                updateNanos.sum() / 1e9,
                writeNanos.sum() / 1e9,
                stallNanos.sum() / 1e9,
                stagingBytes());
    }

    private long stagingBytes() {
        long elements = scratch == null ? 0 : scratch.size();
        for (NDArray slot : slots) {
            elements += slot == null ? 0 : slot.size();
        }
        return elements * Float.BYTES;
    }

    /** Waits for the threads and frees the buffers. */
    @Override
    public void close() {
        if (fetcher != null) {
            fetcher.close();
            writer.close();
            fetcher = null;
        }
        if (manager != null) {
            manager.close();
            manager = null;
            Arrays.fill(slots, null);
            scratch = null;
        }
    }
}
