package org.djlmoe.offload;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.autograd.Tape;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.tier.FileTier;
import org.djlmoe.tier.HostTier;
import org.djlmoe.tier.SlotTier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;

/** The session on a bare tape, with tiers that fail, wait and tell. */
@Timeout(120)
class OffloadSessionTest {

    private static final int SIZE = 100;
    private static final long BYTES = SIZE * Float.BYTES;

    @TempDir Path directory;
    private NDManager manager;
    private NDManager batch;
    private ScriptedTier tier;
    private SlotPool pool;
    private WorkerThread thread;
    private OffloadStatistics statistics;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        batch = manager.newSubManager();
        tier = new ScriptedTier(new FileTier(directory));
        pool = new SlotPool(tier, 1 << 20);
        thread = new WorkerThread("boundary-offload");
    }

    @AfterEach
    void close() {
        batch.close();
        assertEquals(0, pool.inUse(), "slots in use after everything was closed");
        thread.close();
        pool.close();
        manager.close();
    }

    private Tape tape() {
        return tape(1);
    }

    private Tape tape(long minBytes) {
        return new Tape(
                manager,
                1,
                () -> {},
                home -> new OffloadSession(home, pool, thread, minBytes, s -> statistics = s));
    }

    private NDArray leaf() {
        NDArray leaf = batch.arange(SIZE * 1f).add(1).div(SIZE);
        leaf.setRequiresGradient(true);
        return leaf;
    }

    private static NDArray apply(Segment segment, NDArray input) {
        return Tape.apply(segment, new NDList(input)).head();
    }

    /** A chain of segments: x to the power of 2^n. */
    private static NDArray squares(NDArray x, int segments) {
        NDArray y = x;
        for (int i = 0; i < segments; i++) {
            y = apply(new Square(), y);
        }
        return y;
    }

    private static boolean evicted(NDArray array) {
        return assertInstanceOf(BoundaryArray.class, array).isEvicted();
    }

    /** A square that calls back in forward and backward. */
    private static final class Square implements Segment {

        private final Runnable inForward;
        private final Runnable inBackward;

        Square() {
            this(() -> {}, () -> {});
        }

        Square(Runnable inForward, Runnable inBackward) {
            this.inForward = inForward;
            this.inBackward = inBackward;
        }

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            inForward.run();
            return plain(inputs);
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList gradients) {
            inBackward.run();
            return new NDList(inputs.head().mul(2).mul(gradients.head()));
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(inputs.head().square());
        }
    }

    /** Passes on to another tier what it does not refuse; tells what happened in which order. */
    private static final class ScriptedTier implements SlotTier {

        final SlotTier inner;
        final List<String> events = Collections.synchronizedList(new ArrayList<>());
        volatile Runnable beforeNew = () -> {};
        volatile Runnable beforeWrite = () -> {};
        volatile Runnable beforeRead = () -> {};

        ScriptedTier(SlotTier inner) {
            this.inner = inner;
        }

        @Override
        public long sizeOf(long bytes) {
            return bytes;
        }

        @Override
        public long available() {
            return inner.available();
        }

        @Override
        public Slot newSlot(long bytes) {
            beforeNew.run();
            Slot slot = inner.newSlot(bytes);
            return new Slot() {
                @Override
                public void write(NDArray source) {
                    assertFalse(GradMode.isOn(), "the thread of the tier records");
                    events.add("write");
                    beforeWrite.run();
                    slot.write(source);
                }

                @Override
                public void read(NDArray target) {
                    assertFalse(GradMode.isOn(), "the thread of the tier records");
                    events.add("read");
                    beforeRead.run();
                    slot.read(target);
                }

                @Override
                public void close() {
                    slot.close();
                }
            };
        }

        @Override
        public void close() {
            inner.close();
        }
    }

    private static void await(CountDownLatch latch, String what) {
        try {
            assertTrue(latch.await(60, TimeUnit.SECONDS), what);
        } catch (InterruptedException e) {
            throw new AssertionError(e);
        }
    }

    /** x to the power of 2^n, under plain autograd. */
    private float[] expectedGradient(int segments) {
        double[] gradient = new double[SIZE];
        float[] result = new float[SIZE];
        for (int i = 0; i < SIZE; i++) {
            double x = (i + 1.0) / SIZE;
            int power = 1 << segments;
            gradient[i] = power * Math.pow(x, power - 1);
            result[i] = (float) gradient[i];
        }
        return result;
    }

    private static void assertGradient(float[] expected, NDArray leaf) {
        assertArrayEquals(expected, leaf.getGradient().toFloatArray(), 1e-4f);
    }

    @Test
    void apply_chain_boundariesLeaveAndLateReadsBringThemBack() {
        NDArray x = leaf();
        float[] expected = x.square().toFloatArray();
        NDList callers = new NDList();
        try (Tape tape = tape()) {
            NDArray y = x;
            for (int i = 0; i < 4; i++) {
                y = apply(new Square(), y);
                callers.add(y);
            }
            assertTrue(evicted(callers.get(0)));
            assertTrue(evicted(callers.get(1)));
            assertFalse(evicted(callers.get(3)), "nobody has taken the last output as input");
            // what can be told without the values
            assertEquals(new Shape(SIZE), callers.get(0).getShape());
            assertTrue(evicted(callers.get(0)));

            assertArrayEquals(expected, callers.get(0).toFloatArray());
            assertFalse(evicted(callers.get(0)));
            apply(new Square(), y).close();
            assertTrue(evicted(callers.get(0)), "it leaves again with the next segment");

            tape.backward(y.sum());
        }
        assertGradient(expectedGradient(4), x);
        // after the tape, as an evaluator does
        assertTrue(evicted(callers.get(0)));
        assertArrayEquals(expected, callers.get(0).toFloatArray());
        assertArrayEquals(x.pow(8).toFloatArray(), callers.get(2).toFloatArray(), 1e-6f);
        NDArray first = callers.get(0);
        callers.close();
        assertEquals(0, pool.inUse());
        assertThrows(IllegalStateException.class, first::toFloatArray);
    }

    @Test
    void apply_evictedBoundaryUsedByAPlainOperation_itsGradientArrives() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x); // x^2
            NDArray z = squares(y, 2); // x^8
            assertTrue(evicted(y));
            try (GradMode off = GradMode.off()) {
                y.toFloatArray(); // a read that records nothing must not cost the history
            }
            assertTrue(ArrayKernels.requiresGradient(y));
            tape.backward(z.add(y.mul(3)).sum());
        }
        float[] expected = expectedGradient(3);
        for (int i = 0; i < SIZE; i++) {
            expected[i] += 6 * (i + 1f) / SIZE;
        }
        assertGradient(expected, x);
    }

    @Test
    void apply_boundaryUsedByThreeSegments_storedOnceAndGradientsAdd() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray a = apply(new Square(), y);
            NDArray b = apply(new Square(), y);
            NDArray far = squares(b, 2); // y^8
            NDArray c = apply(new Square(), y);
            tape.backward(a.add(far).add(c).sum());
        }
        // y, b and far's input
        assertEquals(3, Collections.frequency(tier.events, "write"));
        float[] expected = new float[SIZE];
        for (int i = 0; i < SIZE; i++) {
            double v = (i + 1.0) / SIZE;
            expected[i] = (float) (8 * Math.pow(v, 3) + 16 * Math.pow(v, 15));
        }
        assertGradient(expected, x);
    }

    @Test
    void apply_callerClosesWhatItGot_backwardHasTheValues() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = x;
            for (int i = 0; i < 4; i++) {
                NDArray next = apply(new Square(), y);
                if (y != x) {
                    y.close();
                }
                y = next;
            }
            tape.backward(y.sum());
            assertEquals(0, pool.inUse(), "slots are free after their backward");
        }
        assertGradient(expectedGradient(4), x);
    }

    @Test
    void apply_budgetForTwo_theFirstTwoLeaveAndTheRestStays() {
        pool = new SlotPool(tier, 2 * BYTES + BYTES / 2);
        NDArray x = leaf();
        List<NDArray> outputs = new ArrayList<>();
        try (Tape tape = tape()) {
            NDArray y = x;
            for (int i = 0; i < 6; i++) {
                y = apply(new Square(), y);
                outputs.add(y);
            }
            assertEquals(
                    List.of(true, true, false, false, false, false),
                    outputs.stream().map(OffloadSessionTest::evicted).toList());
            assertEquals(2 * BYTES, pool.allocated());
            tape.backward(y.sum());
        }
        assertGradient(expectedGradient(6), x);
        assertEquals(2 * BYTES, statistics.bytesOut());
        assertEquals(2 * BYTES, statistics.bytesBack());
    }

    @Test
    void statistics_longChain_bytesExactAndPeakIndependentOfDepth() {
        for (int depth : new int[] {6, 12}) {
            NDArray x = leaf();
            try (Tape tape = tape()) {
                NDArray y = squares(x, depth);
                tape.backward(y.sum());
            }
            // the last output is no boundary; the last boundary need not come back
            assertEquals((depth - 1) * BYTES, statistics.bytesOut());
            assertEquals((depth - 2) * BYTES, statistics.bytesBack());
            assertTrue(statistics.peakBytes() <= 3 * BYTES, "peak " + statistics.peakBytes());
            assertTrue(statistics.waitSeconds() >= 0);
        }
    }

    @Test
    void apply_arraysBelowTheMinimum_stay() {
        NDArray x = leaf();
        try (Tape tape = tape(BYTES + 1)) {
            NDArray y = squares(x, 3);
            tape.backward(y.sum());
        }
        assertGradient(expectedGradient(3), x);
        assertEquals(List.of(), tier.events);
    }

    @Test
    void write_nextSegmentRunsMeanwhile() {
        CountDownLatch nextRuns = new CountDownLatch(1);
        tier.beforeWrite = () -> await(nextRuns, "forward waited for a write");
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = squares(x, 2); // its write waits
            NDArray z = apply(new Square(nextRuns::countDown, () -> {}), y);
            tape.backward(z.sum());
        }
        assertGradient(expectedGradient(3), x);
    }

    @Test
    void backward_fetchOfTheBoundaryBeforeRunsMeanwhile() {
        NDArray x = leaf();
        CountDownLatch[] running = new CountDownLatch[5];
        CountDownLatch[] fetched = new CountDownLatch[5];
        for (int i = 0; i < 5; i++) {
            running[i] = new CountDownLatch(1);
            fetched[i] = new CountDownLatch(1);
        }
        // Reads come for segments 3, 2, 1: each begins only when the segment after it runs, and
        // that
        // segment ends only when the read has begun.
        int[] next = {3};
        tier.beforeRead =
                () -> {
                    int segment = next[0]--;
                    await(running[segment + 1], "fetched too early: " + segment);
                    fetched[segment].countDown();
                };
        try (Tape tape = tape()) {
            NDArray y = x;
            for (int i = 0; i < 5; i++) {
                int index = i;
                y =
                        apply(
                                new Square(
                                        () -> {},
                                        () -> {
                                            running[index].countDown();
                                            if (index >= 2) {
                                                await(
                                                        fetched[index - 1],
                                                        "not fetched ahead: " + (index - 1));
                                            }
                                        }),
                                y);
            }
            tape.backward(y.sum());
        }
        assertGradient(expectedGradient(5), x);
    }

    @Test
    void backward_severalTimesInOneCollector_eachBranchHasItsValues() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray a = squares(x, 3);
            NDArray b = squares(x, 3);
            NDArray c = squares(x, 3);
            tape.backward(b.sum());
            tape.backward(c.sum());
            tape.backward(a.sum());
        }
        float[] expected = expectedGradient(3);
        for (int i = 0; i < SIZE; i++) {
            expected[i] *= 3;
        }
        assertGradient(expected, x);
    }

    @Test
    void backward_someSegmentsNotReached_theirsIsReleasedWithTheTape() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray reached = squares(x, 2);
            squares(x, 3);
            tape.backward(reached.sum());
        }
        assertGradient(expectedGradient(2), x);
    }

    @Test
    void backward_secondTimeThroughAnEvictedBoundary_clearError() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            squares(y, 2);
            assertTrue(evicted(y));
            tape.backward(y.mul(2).sum());
            NDArray again = y.mul(3).sum();
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> tape.backward(again));
            assertTrue(e.getMessage().contains("has run already"), e.getMessage());
        }
    }

    @Test
    void backward_boundaryChangedInPlaceByTheCaller_clearErrorAndNextStepIsClean() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray z = apply(new Square(), y);
            try (GradMode off = GradMode.off()) {
                y.addi(1);
            }
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> tape.backward(z.sum()));
            assertTrue(e.getMessage().contains("in place"), e.getMessage());
        }
        cleanStep();
    }

    @Test
    void apply_tierIsFull_clearErrorAndNextStepIsClean() {
        tier.beforeWrite =
                () -> {
                    throw new UncheckedIOException(new IOException("No space left on device"));
                };
        NDArray x = leaf();
        UncheckedIOException e =
                assertThrows(
                        UncheckedIOException.class,
                        () -> {
                            try (Tape tape = tape()) {
                                squares(x, 4);
                            }
                        });
        assertTrue(e.getMessage().contains("No space left"), e.getMessage());
        assertEquals(0, pool.slots(), "slots that could not be written are not kept");
        tier.beforeWrite = () -> {};
        cleanStep();
    }

    @Test
    void backward_tierCannotBeRead_clearErrorAndNextStepIsClean() {
        tier.beforeRead =
                () -> {
                    throw new UncheckedIOException(new IOException("Input/output error"));
                };
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = squares(x, 4);
            NDArray sum = y.sum();
            UncheckedIOException e =
                    assertThrows(UncheckedIOException.class, () -> tape.backward(sum));
            assertTrue(e.getMessage().contains("Input/output error"), e.getMessage());
        }
        tier.beforeRead = () -> {};
        cleanStep();
    }

    @Test
    void apply_threadIsInterrupted_clearErrorAndNextStepIsClean() {
        Thread trainer = Thread.currentThread();
        CountDownLatch goOn = new CountDownLatch(1);
        tier.beforeWrite =
                () -> {
                    trainer.interrupt();
                    await(goOn, "the interrupt had no effect");
                };
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = squares(x, 2);
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> apply(new Square(), y));
            assertTrue(e.getMessage().contains("Interrupted"), e.getMessage());
            assertTrue(Thread.currentThread().isInterrupted());
            // The tape's close waits for the write, though interrupted.
            tier.beforeWrite = () -> {};
            goOn.countDown();
        }
        assertTrue(Thread.interrupted(), "the interrupt is passed on");
        cleanStep();
    }

    @Test
    void apply_segmentThrowsHalfway_everythingIsReleasedAndNextStepIsClean() {
        NDArray x = leaf();
        Segment broken =
                new Square(
                        () -> {
                            throw new UnsupportedOperationException("broken");
                        },
                        () -> {});
        try (Tape tape = tape()) {
            NDArray y = squares(x, 3);
            assertThrows(UnsupportedOperationException.class, () -> apply(broken, y));
        }
        Segment brokenBackward =
                new Square(
                        () -> {},
                        () -> {
                            throw new UnsupportedOperationException("broken");
                        });
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), apply(brokenBackward, apply(new Square(), x)));
            NDArray sum = apply(new Square(), y).sum();
            assertThrows(UnsupportedOperationException.class, () -> tape.backward(sum));
        }
        cleanStep();
    }

    private void cleanStep() {
        batch.close();
        assertEquals(0, pool.inUse());
        assertEquals(0, manager.getManagedArrays().size());
        batch = manager.newSubManager();
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = squares(x, 4);
            tape.backward(y.sum());
        }
        assertGradient(expectedGradient(4), x);
        assertEquals(3 * BYTES, statistics.bytesOut());
    }

    @Test
    void read_afterTheTierClosed_saysWhatToDo() {
        NDArray x = leaf();
        NDArray y;
        try (Tape tape = tape()) {
            y = apply(new Square(), x);
            tape.backward(squares(y, 2).sum());
        }
        pool.close();
        IllegalStateException e = assertThrows(IllegalStateException.class, y::toFloatArray);
        assertTrue(e.getMessage().contains("copy what is needed longer"), e.getMessage());
    }

    @Test
    void apply_hostTier_sameGradients() {
        pool = new SlotPool(new HostTier(), 1 << 20);
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = squares(x, 5);
            tape.backward(y.sum());
        }
        assertGradient(expectedGradient(5), x);
        assertEquals(4 * BYTES, statistics.bytesOut());
    }

    @Test
    void apply_outputChangedInPlaceBeforeTheNextSegment_gradientsOfTheChangedValues() {
        NDArray x = leaf();
        NDArray residual = leaf();
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            y.addi(residual); // x^2 + r
            NDArray z = squares(y, 2);
            tape.backward(z.sum());
        }
        float[] expected = new float[SIZE];
        float[] outer = new float[SIZE];
        for (int i = 0; i < SIZE; i++) {
            double v = (i + 1.0) / SIZE;
            outer[i] = (float) (4 * Math.pow(v * v + v, 3));
            expected[i] = (float) (outer[i] * 2 * v);
        }
        assertGradient(expected, x);
        assertGradient(outer, residual);
    }

    /** The sum of two squares. */
    private static final class SumOfSquares implements Segment {

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            return plain(inputs);
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList gradients) {
            return new NDList(
                    inputs.get(0).mul(2).mul(gradients.head()),
                    inputs.get(1).mul(2).mul(gradients.head()));
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(inputs.get(0).square().add(inputs.get(1).square()));
        }
    }

    @Test
    void apply_twoInputs_bothMoveAndTheSameArrayTwiceMovesOnce() {
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray a = apply(new Square(), x);
            NDArray b = apply(new Square(), x);
            NDArray c = Tape.apply(new SumOfSquares(), new NDList(a, b)).head(); // 2 x^4
            NDArray d = Tape.apply(new SumOfSquares(), new NDList(c, c)).head(); // 8 x^8
            tape.backward(apply(new Square(), d).sum()); // 64 x^16
        }
        float[] expected = expectedGradient(4);
        for (int i = 0; i < SIZE; i++) {
            expected[i] *= 64;
        }
        assertArrayEquals(expected, x.getGradient().toFloatArray(), 1e-2f);
        assertEquals(4 * BYTES, statistics.bytesOut());
    }

    @Test
    void apply_noFileForTheSecondInput_clearErrorAndNextStepIsClean() {
        int[] left = {1};
        tier.beforeNew =
                () -> {
                    if (left[0]-- == 0) {
                        throw new UncheckedIOException(new IOException("Too many open files"));
                    }
                };
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray a = apply(new Square(), x);
            NDArray b = apply(new Square(), x);
            assertThrows(
                    UncheckedIOException.class,
                    () -> Tape.apply(new SumOfSquares(), new NDList(a, b)));
            assertArrayEquals(x.square().toFloatArray(), a.toFloatArray());
            assertArrayEquals(x.square().toFloatArray(), b.toFloatArray());
        }
        tier.beforeNew = () -> {};
        cleanStep();
    }

    /** A copy under way and an early close gave NaN elsewhere. */
    @Test
    void write_callerClosesTheArrayMeanwhile_valuesAreWritten() {
        CountDownLatch closed = new CountDownLatch(1);
        tier.beforeWrite = () -> await(closed, "close waited for a write");
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray z = apply(new Square(), y);
            y.close();
            // takes the memory that was freed too early, if it was
            batch.full(new Shape(SIZE), Float.NaN);
            closed.countDown();
            NDArray end = squares(z, 2);
            tape.backward(end.sum());
        }
        assertGradient(expectedGradient(4), x);
    }

    @Test
    void apply_evaluationAndAccumulation_gradientsOfBothMicroBatches() {
        NDArray x = leaf();
        for (int micro = 0; micro < 2; micro++) {
            try (Tape tape = tape()) {
                NDArray y = squares(x, 3);
                try (GradMode off = GradMode.off()) {
                    NDArray plain = squares(x, 2);
                    assertArrayEquals(x.pow(4).toFloatArray(), plain.toFloatArray(), 1e-6f);
                    assertFalse(plain instanceof BoundaryArray);
                }
                tape.backward(y.sum());
            }
        }
        float[] expected = expectedGradient(3);
        for (int i = 0; i < SIZE; i++) {
            expected[i] *= 2;
        }
        assertGradient(expected, x);
    }

    @Test
    void backward_boundaryChangedInPlaceDuringItsWrite_clearErrorAndNextStepIsClean() {
        CountDownLatch changed = new CountDownLatch(1);
        tier.beforeWrite = () -> await(changed, "the change waited for a write");
        NDArray x = leaf();
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray z = apply(new Square(), y);
            try (GradMode off = GradMode.off()) {
                y.addi(1);
            }
            changed.countDown();
            NDArray sum = squares(z, 2).sum();
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> tape.backward(sum));
            assertTrue(e.getMessage().contains("in place"), e.getMessage());
        }
        tier.beforeWrite = () -> {};
        cleanStep();
    }
}
