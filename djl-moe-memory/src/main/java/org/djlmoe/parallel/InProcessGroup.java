package org.djlmoe.parallel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import java.util.function.LongUnaryOperator;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * Ranks that are threads of one process: for tests, and to see what an exchange costs without a
 * network. Not for training: the ranks share the machine's cores and memory.
 *
 * <p>Each rank has a transport thread, which carries out its exchanges in order. A rank's rows are
 * fetched by those who receive them; an exchange ends on a rank when it has fetched its own and all
 * others have fetched theirs from it. {@link Hub} holds what the ranks share.
 */
public final class InProcessGroup implements ProcessGroup {

    private static final TorchKernels KERNELS =
            TorchKernels.load(InProcessGroup.class, "transport.py");

    private final int rank;
    private final Hub hub;
    private final LongUnaryOperator delay;
    private final ExecutorService transport;
    private long started;
    private boolean closed;

    private InProcessGroup(int rank, Hub hub, LongUnaryOperator delay) {
        this.rank = rank;
        this.hub = hub;
        this.delay = delay;
        this.transport =
                Executors.newSingleThreadExecutor(
                        task -> {
                            Thread thread = new Thread(task, "transport-" + rank);
                            thread.setDaemon(true);
                            return thread;
                        });
        transport.execute(ArrayKernels::stopRecording);
    }

    /** What a rank does. */
    @FunctionalInterface
    public interface RankTask<T> {

        /**
         * Runs on the rank's thread, with the gradient mode off.
         *
         * @param group the rank's view of the group, which is closed afterwards
         * @return the rank's result
         * @throws Exception ends the whole run
         */
        T run(ProcessGroup group) throws Exception;
    }

    /**
     * Runs a task on every rank of a new group and waits for all.
     *
     * @param <T> of a rank's result
     * @param size the number of ranks
     * @param task what each does
     * @return the results by rank
     * @throws ProcessGroupException if a rank fails; its cause is what the first one threw
     */
    public static <T> List<T> run(int size, RankTask<T> task) {
        return run(size, bytes -> 0, task);
    }

    /**
     * As {@link #run(int, RankTask)}, with a transport as slow as one likes.
     *
     * @param <T> of a rank's result
     * @param size the number of ranks
     * @param delayNanos from the bytes that a rank sends and receives in one exchange of rows to
     *     the nanoseconds that the exchange takes longer
     * @param task what each rank does
     * @return the results by rank
     */
    public static <T> List<T> run(int size, LongUnaryOperator delayNanos, RankTask<T> task) {
        List<ProcessGroup> ranks = create(size, delayNanos);
        Hub hub = ((InProcessGroup) ranks.get(0)).hub;
        ExecutorService threads = Executors.newFixedThreadPool(size);
        List<Future<T>> futures = new ArrayList<>();
        for (ProcessGroup group : ranks) {
            futures.add(threads.submit(() -> runRank(group, task)));
        }
        threads.shutdown();
        List<T> results = new ArrayList<>();
        Throwable other = null;
        boolean interrupted = false;
        for (int r = 0; r < size; r++) {
            try {
                results.add(futures.get(r).get());
            } catch (ExecutionException e) {
                other = e.getCause();
            } catch (InterruptedException e) {
                // The tasks still use their arrays: they must end before this returns.
                interrupted = true;
                hub.fail(-1, e);
                r--;
            }
        }
        if (interrupted) {
            Thread.currentThread().interrupt();
        }
        ProcessGroupException failure = hub.failure();
        if (failure != null) {
            throw failure;
        } else if (other != null) {
            throw new ProcessGroupException("A rank failed: " + other, other);
        }
        return results;
    }

    private static <T> T runRank(ProcessGroup group, RankTask<T> task) throws Exception {
        try {
            ArrayKernels.stopRecording();
            return task.run(group);
        } catch (Throwable e) {
            // before it leaves, or the others would be told that it left
            group.abort(e);
            throw e;
        } finally {
            group.close();
        }
    }

    /**
     * Creates a group.
     *
     * @param size the number of ranks
     * @param delayNanos as for {@link #run(int, LongUnaryOperator, RankTask)}
     * @return the ranks, each to be used and closed by a thread of its own
     */
    public static List<ProcessGroup> create(int size, LongUnaryOperator delayNanos) {
        if (size < 1) {
            throw new IllegalArgumentException("A group needs at least one rank, not " + size);
        }
        Hub hub = new Hub(size);
        List<ProcessGroup> ranks = new ArrayList<>();
        for (int r = 0; r < size; r++) {
            ranks.add(new InProcessGroup(r, hub, delayNanos));
        }
        return ranks;
    }

    @Override
    public int rank() {
        return rank;
    }

    @Override
    public int size() {
        return hub.size();
    }

    @Override
    public long[][] allGather(long[] values) {
        long[][] all = new long[size()][];
        await(
                start(
                        () -> {
                            Round round = join("all-gather", values.clone());
                            for (int r = 0; r < size(); r++) {
                                all[r] = ((long[]) hub.contribution(round, rank, r)).clone();
                            }
                            hub.leave(round, rank);
                            return null;
                        }));
        return all;
    }

    /** The rows that a rank offers. */
    private record Rows(NDArray array, long[] count) {

        long first(int rank) {
            return Arrays.stream(count).limit(rank).sum();
        }
    }

    @Override
    public Transfer startAllToAll(
            NDArray send, long[] sendRows, NDArray receive, long[] receiveRows) {
        checkRows("send", send, sendRows);
        checkRows("receive", receive, receiveRows);
        Rows offered = new Rows(send, sendRows.clone());
        Rows wanted = new Rows(receive, receiveRows.clone());
        return transfer(
                () -> {
                    Round round = join("all-to-all", offered);
                    // Beginning after oneself spreads the load.
                    for (int i = 1; i < size(); i++) {
                        int from = (rank + i) % size();
                        fetch((Rows) hub.contribution(round, rank, from), wanted, from);
                    }
                    pause(bytes(offered) + bytes(wanted));
                    hub.leave(round, rank);
                    return null;
                });
    }

    private void checkRows(String what, NDArray array, long[] rows) {
        if (rows.length != size() || rows[rank] != 0 || Arrays.stream(rows).anyMatch(n -> n < 0)) {
            throw new IllegalArgumentException(
                    "Rows to "
                            + what
                            + " need one count for each of "
                            + size()
                            + " ranks, and 0 for rank "
                            + rank
                            + " itself: "
                            + Arrays.toString(rows));
        }
        long sum = Arrays.stream(rows).sum();
        if (array.getShape().dimension() != 2 || array.getShape().get(0) < sum) {
            throw new IllegalArgumentException(
                    "An array of shape " + array.getShape() + " cannot hold " + sum + " rows");
        }
    }

    private void fetch(Rows offered, Rows wanted, int from) {
        long rows = offered.count[rank];
        if (rows != wanted.count[from]) {
            throw new IllegalStateException(
                    "rank "
                            + from
                            + " sends "
                            + rows
                            + " rows, but rank "
                            + rank
                            + " expects "
                            + wanted.count[from]);
        }
        if (rows > 0) {
            checkAlike(
                    offered.array.getShape().get(1),
                    offered.array.getDataType(),
                    wanted.array.getShape().get(1),
                    wanted.array.getDataType(),
                    from);
            hub.touch(
                    rank,
                    () ->
                            KERNELS.run(
                                    "copy_rows",
                                    offered.array,
                                    offered.first(rank),
                                    rows,
                                    wanted.array,
                                    wanted.first(from)));
        }
    }

    private void checkAlike(
            Object sent, DataType sentType, Object wanted, DataType wantedType, int from) {
        if (!sent.equals(wanted) || sentType != wantedType) {
            throw new IllegalStateException(
                    String.format(
                            "rank %d sends %s of %s, but rank %d expects %s of %s",
                            from, sentType, sent, rank, wantedType, wanted));
        }
    }

    private static long bytes(Rows rows) {
        long width = rows.array.getShape().get(1) * rows.array.getDataType().getNumOfBytes();
        return Arrays.stream(rows.count).sum() * width;
    }

    private void pause(long bytes) throws InterruptedException {
        long nanos = delay.applyAsLong(bytes);
        if (nanos > 0) {
            TimeUnit.NANOSECONDS.sleep(nanos);
        }
    }

    @Override
    public Transfer startSend(NDArray array, int to) {
        checkPeer(to);
        return message(array, rank, to);
    }

    @Override
    public Transfer startReceive(NDArray array, int from) {
        checkPeer(from);
        return message(array, from, rank);
    }

    private void checkPeer(int other) {
        if (other < 0 || other >= size() || other == rank) {
            throw new IllegalArgumentException(
                    "Rank " + rank + " of " + size() + " cannot exchange a tensor with " + other);
        }
    }

    /** Whoever comes second to a message copies it; who comes first does not hold up the queue. */
    private Transfer message(NDArray array, int from, int to) {
        Hub.Message mine = new Hub.Message(array, from, to, from == rank);
        Future<?> posted =
                start(
                        () -> {
                            Hub.Message other = hub.match(mine, rank);
                            if (other != null) {
                                deliver(mine.sends() ? mine : other, mine.sends() ? other : mine);
                                hub.delivered(mine, other);
                            }
                            return null;
                        });
        return () -> {
            await(posted);
            hub.awaitDelivery(mine, rank);
        };
    }

    private void deliver(Hub.Message from, Hub.Message to) {
        NDArray source = from.array();
        NDArray target = to.array();
        checkAlike(
                source.getShape(),
                source.getDataType(),
                target.getShape(),
                target.getDataType(),
                from.from());
        hub.touch(rank, () -> KERNELS.run("copy", source, target));
    }

    @Override
    public void sum(NDArray array) {
        try (NDManager scratch = array.getManager().newSubManager()) {
            NDList total = new NDList();
            await(
                    start(
                            () -> {
                                Round round = join("sum", array);
                                List<NDArray> parts = new ArrayList<>();
                                for (int r = 0; r < size(); r++) {
                                    NDArray part = (NDArray) hub.contribution(round, rank, r);
                                    checkAlike(
                                            part.getShape(),
                                            part.getDataType(),
                                            array.getShape(),
                                            array.getDataType(),
                                            r);
                                    parts.add(part);
                                }
                                hub.touch(
                                        rank,
                                        () -> total.addAll(KERNELS.call(scratch, "sum_of", parts)));
                                // Nobody writes before all have read.
                                hub.leave(round, rank);
                                return null;
                            }));
            KERNELS.run("copy", total.head(), array);
        }
    }

    @Override
    public void barrier() {
        await(
                start(
                        () -> {
                            hub.leave(join("barrier", this), rank);
                            return null;
                        }));
    }

    private Round join(String what, Object contribution) {
        return hub.join(started++, rank, what, contribution);
    }

    private Future<?> start(Callable<Void> job) {
        if (closed) {
            throw new IllegalStateException("Rank " + rank + " has left the group");
        }
        return transport.submit(
                () -> {
                    try {
                        return job.call();
                    } catch (ProcessGroupException e) {
                        throw e;
                    } catch (Throwable e) {
                        hub.fail(rank, e);
                        throw e;
                    }
                });
    }

    private Transfer transfer(Callable<Void> job) {
        Future<?> future = start(job);
        return () -> await(future);
    }

    private void await(Future<?> future) {
        boolean interrupted = false;
        try {
            while (true) {
                try {
                    future.get();
                    break;
                } catch (InterruptedException e) {
                    interrupted = true;
                    hub.fail(rank, e);
                } catch (ExecutionException e) {
                    break;
                }
            }
            hub.check();
        } finally {
            if (interrupted) {
                Thread.currentThread().interrupt();
            }
        }
    }

    @Override
    public void abort(Throwable cause) {
        hub.fail(rank, cause);
    }

    @Override
    public void close() {
        if (!closed) {
            closed = true;
            // after what has been started
            transport.execute(() -> hub.leaveGroup(rank));
            transport.shutdown();
        }
    }

    @Override
    public String toString() {
        return "rank " + rank + " of " + size() + " in one process";
    }
}
