package org.djlmoe.parallel;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** A hang is a failure: every test has a limit far above what it needs. */
@Timeout(60)
class ProcessGroupTest {

    /** A number that names sender, receiver and place. */
    private static float mark(int from, int to, long row, long column) {
        return from * 1000 + to * 100 + row * 10 + column;
    }

    @Test
    void allGather_differentLengths_everyRankHasAll() {
        List<long[][]> all =
                InProcessGroup.run(
                        4,
                        group -> {
                            long[] mine = new long[group.rank()];
                            Arrays.fill(mine, 7 * group.rank());
                            return group.allGather(mine);
                        });
        for (long[][] seen : all) {
            assertEquals("[[], [7], [14, 14], [21, 21, 21]]", Arrays.deepToString(seen));
        }
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 2, 3, 8})
    void allToAll_unevenRows_everyRowArrivesUnchanged(int size) {
        InProcessGroup.run(
                size,
                group -> {
                    int me = group.rank();
                    try (NDManager manager = NDManager.newBaseManager()) {
                        // Rank r sends (r + 2 d) mod 4 rows to d, some none, two exchanges at once.
                        long[] out = new long[size];
                        long[] in = new long[size];
                        for (int r = 0; r < size; r++) {
                            out[r] = r == me ? 0 : (me + 2 * r) % 4;
                            in[r] = r == me ? 0 : (r + 2 * me) % 4;
                        }
                        NDArray send = manager.create(new Shape(Arrays.stream(out).sum() + 1, 3));
                        float[] values = new float[(int) send.size()];
                        int n = 0;
                        for (int r = 0; r < size; r++) {
                            for (int row = 0; row < out[r]; row++) {
                                for (int c = 0; c < 3; c++) {
                                    values[n++] = mark(me, r, row, c);
                                }
                            }
                        }
                        send.set(values);
                        long rows = Arrays.stream(in).sum();
                        NDArray first = manager.full(new Shape(rows + 2, 3), Float.NaN);
                        NDArray second = manager.full(new Shape(rows + 2, 3), -1f);
                        Transfer a = group.startAllToAll(send, out, first, in);
                        Transfer b = group.startAllToAll(send, out, second, in);
                        b.await();
                        a.await();
                        n = 0;
                        float[] got = first.toFloatArray();
                        for (int r = 0; r < size; r++) {
                            for (int row = 0; row < in[r]; row++) {
                                for (int c = 0; c < 3; c++) {
                                    assertEquals(mark(r, me, row, c), got[n++]);
                                }
                            }
                        }
                        // Nothing behind the rows is touched.
                        assertTrue(Float.isNaN(got[n]) && Float.isNaN(got[n + 5]));
                        assertEquals(-1f, second.toFloatArray()[n]);
                        assertArrayEquals(
                                Arrays.copyOf(got, n), Arrays.copyOf(second.toFloatArray(), n));
                    }
                    return null;
                });
    }

    @Test
    void sendAndReceive_bothWaysInAnyOrder_inTheOrderSent() {
        InProcessGroup.run(
                2,
                group -> {
                    int other = 1 - group.rank();
                    try (NDManager manager = NDManager.newBaseManager()) {
                        NDArray[] in = {
                            manager.zeros(new Shape(2, 2)), manager.zeros(new Shape(3))
                        };
                        Transfer[] all = new Transfer[4];
                        // Rank 0 sends first, rank 1 receives first.
                        for (int step = 0; step < 2; step++) {
                            if (step == group.rank()) {
                                all[0] = group.startSend(manager.ones(new Shape(2, 2)), other);
                                all[1] =
                                        group.startSend(
                                                manager.full(new Shape(3), 2f + other), other);
                            } else {
                                all[2] = group.startReceive(in[0], other);
                                all[3] = group.startReceive(in[1], other);
                            }
                        }
                        for (Transfer transfer : all) {
                            transfer.await();
                        }
                        assertArrayEquals(new float[] {1, 1, 1, 1}, in[0].toFloatArray());
                        float sent = 2f + group.rank();
                        assertArrayEquals(new float[] {sent, sent, sent}, in[1].toFloatArray());
                    }
                    return null;
                });
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 2, 5})
    void sum_ofAllRanks_sameBitsEverywhere(int size) {
        List<float[]> sums =
                InProcessGroup.run(
                        size,
                        group -> {
                            try (NDManager manager = NDManager.newBaseManager()) {
                                NDArray a = manager.create(new float[] {0.1f, 1e8f});
                                a.muli(group.rank() + 1);
                                group.sum(a);
                                group.barrier();
                                return a.toFloatArray();
                            }
                        });
        float[] expected = {0.1f, 1e8f};
        for (int r = 1; r < size; r++) {
            expected[0] += 0.1f * (r + 1);
            expected[1] += 1e8f * (r + 1);
        }
        for (float[] sum : sums) {
            assertArrayEquals(expected, sum);
        }
    }

    @Test
    void barrier_oneRankLate_nobodyPassesBefore() {
        AtomicInteger arrived = new AtomicInteger();
        InProcessGroup.run(
                3,
                group -> {
                    for (int round = 1; round <= 20; round++) {
                        arrived.incrementAndGet();
                        group.barrier();
                        assertTrue(arrived.get() >= 3 * round);
                    }
                    return null;
                });
    }

    @Test
    void exchange_aRankThrows_allFailWithItsCause() {
        RuntimeException cause = new ArithmeticException("no more apples");
        AtomicInteger failed = new AtomicInteger();
        ProcessGroupException e =
                Ranks.failure(
                        4,
                        group -> {
                            if (group.rank() == 2) {
                                throw cause;
                            }
                            try {
                                group.barrier();
                            } catch (ProcessGroupException other) {
                                assertSame(cause, other.getCause());
                                failed.incrementAndGet();
                                // Once failed, always failed.
                                assertThrows(
                                        ProcessGroupException.class,
                                        () -> group.allGather(new long[1]));
                                throw other;
                            }
                            return null;
                        });
        assertSame(cause, e.getCause());
        assertTrue(e.getMessage().contains("Rank 2 failed: no more apples"), e.getMessage());
        assertEquals(3, failed.get());
    }

    @Test
    void receive_senderFails_released() {
        ProcessGroupException e =
                Ranks.failure(
                        2,
                        group -> {
                            if (group.rank() == 1) {
                                throw new IllegalStateException("gone");
                            }
                            try (NDManager manager = NDManager.newBaseManager()) {
                                group.startReceive(manager.zeros(new Shape(1)), 1).await();
                            }
                            return null;
                        });
        assertTrue(e.getMessage().contains("Rank 1 failed: gone"), e.getMessage());
    }

    @Test
    void exchange_aRankLeavesEarly_theOthersSaySo() {
        ProcessGroupException e =
                Ranks.failure(
                        3,
                        group -> {
                            if (group.rank() != 1) {
                                group.barrier();
                            }
                            return null;
                        });
        assertTrue(e.getMessage().contains("Rank 1 failed: it left the group"), e.getMessage());
    }

    @Test
    void exchange_ranksCallDifferentThings_named() {
        ProcessGroupException e =
                Ranks.failure(
                        2,
                        group -> {
                            if (group.rank() == 0) {
                                group.barrier();
                            } else {
                                group.allGather(new long[0]);
                            }
                            return null;
                        });
        assertTrue(
                e.getMessage().contains("barrier") && e.getMessage().contains("all-gather"),
                e.getMessage());
    }

    @Test
    void allToAll_countsThatDisagree_named() {
        ProcessGroupException e =
                Ranks.failure(
                        2,
                        group -> {
                            try (NDManager manager = NDManager.newBaseManager()) {
                                NDArray rows = manager.zeros(new Shape(9, 2));
                                NDArray in = manager.zeros(new Shape(9, 2));
                                long[] out = {2, 2};
                                out[group.rank()] = 0;
                                long[] expected = {3, 2};
                                expected[group.rank()] = 0;
                                group.startAllToAll(rows, out, in, expected).await();
                            }
                            return null;
                        });
        assertTrue(e.getMessage().contains("sends 2 rows"), e.getMessage());
    }

    @Test
    void allToAll_rowsForOneself_refused() {
        try (NDManager manager = NDManager.newBaseManager();
                SoloGroup solo = new SoloGroup()) {
            NDArray rows = manager.zeros(new Shape(2, 2));
            long[] one = {1};
            assertThrows(
                    IllegalArgumentException.class, () -> solo.startAllToAll(rows, one, rows, one));
            assertThrows(IllegalArgumentException.class, () -> solo.startSend(rows, 0));
            ProcessGroup inProcess = InProcessGroup.create(1, bytes -> 0).get(0);
            assertThrows(
                    IllegalArgumentException.class,
                    () -> inProcess.startAllToAll(rows, one, rows, one));
            assertThrows(IllegalArgumentException.class, () -> inProcess.startSend(rows, 0));
            inProcess.close();
        }
    }

    @Test
    void soloGroup_everything_isThisProcessAlone() {
        try (NDManager manager = NDManager.newBaseManager();
                SoloGroup solo = new SoloGroup()) {
            NDArray rows = manager.ones(new Shape(2, 2));
            long[] none = {0};
            solo.startAllToAll(rows, none, rows, none).await();
            solo.sum(rows);
            solo.barrier();
            assertArrayEquals(new float[] {1, 1, 1, 1}, rows.toFloatArray());
            assertArrayEquals(new long[] {4, 2}, solo.allGather(new long[] {4, 2})[0]);
            assertEquals(1, solo.size());
            assertEquals(0, solo.rank());
        }
    }

    @Test
    void run_interrupted_endsAllRanks() throws InterruptedException {
        CountDownLatch started = new CountDownLatch(1);
        AtomicInteger failures = new AtomicInteger();
        Thread caller =
                new Thread(
                        () -> {
                            try {
                                InProcessGroup.run(
                                        2,
                                        group -> {
                                            if (group.rank() == 0) {
                                                started.countDown();
                                                group.barrier();
                                                return null;
                                            }
                                            // Not in an exchange: finishes by itself.
                                            started.await();
                                            Thread.sleep(100);
                                            return null;
                                        });
                            } catch (ProcessGroupException e) {
                                failures.addAndGet(
                                        Thread.currentThread().isInterrupted() ? 1 : 100);
                            }
                        });
        caller.start();
        started.await();
        caller.interrupt();
        caller.join(TimeUnit.SECONDS.toMillis(30));
        assertEquals(1, failures.get());
    }
}
