package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import java.util.concurrent.atomic.LongAdder;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.optimizer.StateBuckets.Bucket;
import org.djlmoe.tier.Tier;

/**
 * Updates buckets one after the other, in one of three ways.
 *
 * <ul>
 *   <li>In place in memory: nothing but the update, on the calling thread.
 *   <li>In place in files: while a bucket is updated, another thread reads the next one ahead and a
 *       third writes the last one.
 *   <li>Staged, where the update cannot run where the state lies, as on a GPU: while a bucket is
 *       updated in one staging buffer, the next is fetched to the other, once what that one held is
 *       written back. Two buffers, made once; all is written back when a run returns.
 * </ul>
 */
final class BucketPipeline implements AutoCloseable {

    /** Elements [first, last) of a bucket. */
    record Job(Bucket bucket, long first, long last) {}

    /** The update of one bucket, whose state is at hand. */
    interface Update {
        void run(Job job, AdamWKernels.State state);
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

    /** Buckets of files that are being read ahead of a later run, or written behind this one. */
    private final Map<Bucket, Future<?>> ahead = new HashMap<>();

    private final Map<Bucket, Future<?>> behind = new HashMap<>();

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
        boolean files = tier.isBackedByFiles();
        if (staged) {
            makeSlots(jobs, device);
        }
        if (!files && (!staged || jobs.size() == 1)) {
            for (Job job : jobs) {
                AdamWKernels.State state = timed(fetchNanos, () -> fetch(job, 0, staged));
                updated(update, job, state);
                timed(writeNanos, () -> write(job, 0, staged));
            }
            return;
        }
        overlapped(jobs, next, staged, update);
    }

    private void overlapped(List<Job> jobs, Bucket next, boolean staged, Update update) {
        startThreads();
        reportFailures();
        List<Future<AdamWKernels.State>> fetches = new ArrayList<>();
        List<Future<?>> writes = new ArrayList<>();
        try {
            for (int k = 0; k < jobs.size(); k++) {
                while (fetches.size() < jobs.size() && fetches.size() <= k + 1) {
                    int i = fetches.size();
                    Future<?> before = i < SLOTS || !staged ? null : writes.get(i - SLOTS);
                    fetches.add(submitFetch(jobs.get(i), i % SLOTS, staged, before));
                }
                AdamWKernels.State state = stalled(fetches.get(k));
                Job job = jobs.get(k);
                updated(update, job, state);
                int slot = k % SLOTS;
                if (staged) {
                    writes.add(
                            writer.submit(() -> timed(writeNanos, () -> write(job, slot, true))));
                } else {
                    writeBehind(job.bucket);
                }
            }
            for (Future<?> write : writes) {
                stalled(write);
            }
            if (next != null && tier.isBackedByFiles() && !ahead.containsKey(next)) {
                ahead.put(next, fetcher.submit(() -> timed(fetchNanos, () -> readAhead(next))));
            }
        } finally {
            // What still runs touches buffers that the next step uses.
            fetches.forEach(WorkerThread::settle);
            writes.forEach(WorkerThread::settle);
        }
    }

    private Future<AdamWKernels.State> submitFetch(
            Job job, int slot, boolean staged, Future<?> before) {
        Future<?> early = ahead.remove(job.bucket);
        return fetcher.submit(
                () -> {
                    if (before != null) {
                        WorkerThread.await(before, "writing back the optimizer's state");
                    }
                    if (early != null) {
                        WorkerThread.settle(early);
                    }
                    return timed(fetchNanos, () -> fetch(job, slot, staged));
                });
    }

    private AdamWKernels.State fetch(Job job, int slot, boolean staged) {
        tier.readAhead(job.bucket.name);
        if (!staged) {
            return job.bucket.state;
        }
        kernels.move(slots[slot], job.bucket.state, job.first, job.last);
        return inSlot(job, slot);
    }

    private AdamWKernels.State inSlot(Job job, int slot) {
        AdamWKernels.State state = job.bucket.state;
        return new AdamWKernels.State(slots[slot], state.elements(), state.master());
    }

    private Void readAhead(Bucket bucket) {
        tier.readAhead(bucket.name);
        return null;
    }

    private Void write(Job job, int slot, boolean staged) {
        if (staged) {
            kernels.move(job.bucket.state.array(), inSlot(job, slot), job.first, job.last);
        }
        tier.writeBehind(job.bucket.name);
        return null;
    }

    /** Nobody waits for it: a mapped file is right without. One request a bucket at a time. */
    private void writeBehind(Bucket bucket) {
        Future<?> last = behind.get(bucket);
        if (last == null || last.isDone()) {
            behind.put(
                    bucket,
                    writer.submit(
                            () ->
                                    timed(
                                            writeNanos,
                                            () -> {
                                                tier.writeBehind(bucket.name);
                                                return null;
                                            })));
        }
    }

    private void reportFailures() {
        List<Future<?>> done = new ArrayList<>();
        behind.values().stream().filter(Future::isDone).forEach(done::add);
        behind.values().removeAll(done);
        done.forEach(write -> WorkerThread.await(write, "writing the optimizer's state"));
    }

    private void startThreads() {
        if (fetcher == null) {
            fetcher = new WorkerThread("optimizer-fetch");
            writer = new WorkerThread("optimizer-write");
        }
    }

    private interface Stage<T> {
        T run();
    }

    private static <T> T timed(LongAdder nanos, Stage<T> stage) {
        long start = System.nanoTime();
        try {
            return stage.run();
        } finally {
            nanos.add(System.nanoTime() - start);
        }
    }

    private <T> T stalled(Future<T> job) {
        return timed(stallNanos, () -> WorkerThread.await(job, "moving the optimizer's state"));
    }

    private void updated(Update update, Job job, AdamWKernels.State state) {
        timed(
                updateNanos,
                () -> {
                    update.run(job, state);
                    return null;
                });
    }

    private void makeSlots(List<Job> jobs, Device device) {
        long needed = 0;
        for (Job job : jobs) {
            AdamWKernels.State state = job.bucket.state;
            needed = Math.max(needed, (state.master() ? 3 : 2) * state.elements());
        }
        if (slots[0] == null || slots[0].size() < needed) {
            for (int i = 0; i < SLOTS; i++) {
                slots[i] = replaced(slots[i], device, needed);
            }
        }
    }

    /** Returns a buffer to widen the gradients of a bucket of half precision. */
    NDArray scratch(long elements, Device device) {
        if (scratch == null || scratch.size() < elements) {
            scratch = replaced(scratch, device, elements);
        }
        return scratch;
    }

    static NDArray noScratch() {
        return TorchKernels.nothing();
    }

    private NDArray replaced(NDArray old, Device device, long elements) {
        if (old != null) {
            old.close();
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
        }
    }
}
