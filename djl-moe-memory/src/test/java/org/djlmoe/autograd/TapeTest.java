package org.djlmoe.autograd;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import org.djlmoe.kernel.ArrayKernels;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

class TapeTest {

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(ai.djl.Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private Tape tape() {
        return new Tape(manager, 1, () -> {});
    }

    private NDArray leaf(float... values) {
        NDArray leaf = manager.create(values);
        leaf.setRequiresGradient(true);
        return leaf;
    }

    /** y = factor x squared, and counts its backward passes. */
    private static class Square implements Segment {
        int backwards;

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            return new NDList(inputs.head().square());
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList gradients) {
            backwards++;
            return new NDList(inputs.head().mul(2).mul(gradients.head()));
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(inputs.head().square());
        }
    }

    /** Two inputs, two outputs: (a b, a + b). */
    private static final class Pairing implements Segment {
        @Override
        public NDList forward(SegmentContext context, NDList in) {
            return plain(in);
        }

        @Override
        public NDList backward(SegmentContext context, NDList in, NDList g) {
            NDArray a = in.get(0).zerosLike();
            NDArray b = in.get(1).zerosLike();
            if (g.get(0) != null) {
                a.addi(in.get(1).mul(g.get(0)));
                b.addi(in.get(0).mul(g.get(0)));
            }
            if (g.get(1) != null) {
                a.addi(g.get(1));
                b.addi(g.get(1));
            }
            return new NDList(a, b);
        }

        @Override
        public NDList plain(NDList in) {
            return new NDList(in.get(0).mul(in.get(1)), in.get(0).add(in.get(1)));
        }
    }

    private static NDArray apply(Segment segment, NDArray input) {
        return Tape.apply(segment, new NDList(input)).head();
    }

    @Test
    void backward_chainOfSegments_chainRule() {
        NDArray x = leaf(1, 2, 3);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), apply(new Square(), x));
            tape.backward(y.sum());
        }
        assertArrayEquals(new float[] {4, 32, 108}, x.getGradient().toFloatArray());
    }

    @Test
    void backward_boundaryUsedBySegmentAndByPlainOperation_gradientsAdd() {
        NDArray x = leaf(1, 2);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x); // x^2
            NDArray z = apply(new Square(), y); // x^4
            tape.backward(z.add(y.mul(3)).sum()); // x^4 + 3 x^2
        }
        assertArrayEquals(new float[] {4 + 6, 32 + 12}, x.getGradient().toFloatArray());
    }

    @Test
    void backward_boundaryUsedByTwoSegments_gradientsAdd() {
        NDArray x = leaf(1, 2);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray a = apply(new Square(), y);
            NDArray b = apply(new Square(), y);
            tape.backward(a.add(b).sum()); // 2 x^4
        }
        assertArrayEquals(new float[] {8, 64}, x.getGradient().toFloatArray());
    }

    @Test
    void backward_twoOutputsOfWhichOneIsUsed_otherGradientIsNull() {
        NDArray a = leaf(2, 3);
        NDArray b = leaf(5, 7);
        try (Tape tape = tape()) {
            NDList out = Tape.apply(new Pairing(), new NDList(a, b));
            tape.backward(out.get(0).sum());
        }
        assertArrayEquals(new float[] {5, 7}, a.getGradient().toFloatArray());
        assertArrayEquals(new float[] {2, 3}, b.getGradient().toFloatArray());
    }

    @Test
    void backward_plainOperationsBeforeAndBetween_gradientReachesTheLeaf() {
        NDArray w = leaf(1, 2);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), w.mul(3)); // 9 w^2
            tape.backward(apply(new Square(), y.add(1)).sum()); // (9 w^2 + 1)^2
        }
        assertArrayEquals(new float[] {2 * 10 * 18, 2 * 37 * 36}, w.getGradient().toFloatArray());
    }

    @Test
    void backward_targetIsASegmentsOutput_noPlainOperationNeeded() {
        NDArray x = leaf(3);
        try (Tape tape = tape()) {
            tape.backward(apply(new Square(), x));
        }
        assertArrayEquals(new float[] {6}, x.getGradient().toFloatArray());
    }

    @Test
    void backward_twoLossesForwardedFirst_eachRunsItsOwnSegmentsOnce() {
        NDArray x = leaf(1, 2);
        Square first = new Square();
        Square second = new Square();
        try (Tape tape = tape()) {
            NDArray a = apply(first, x).sum();
            NDArray b = apply(second, x).sum();
            tape.backward(a);
            assertEquals(0, second.backwards);
            tape.backward(b);
        }
        assertEquals(1, first.backwards);
        assertEquals(1, second.backwards);
        assertArrayEquals(new float[] {4, 8}, x.getGradient().toFloatArray());
    }

    @Test
    void backward_secondTimeThroughASegment_clearErrorAndNextTapeIsClean() {
        NDArray x = leaf(1, 2);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray plain = y.mul(2).sum();
            tape.backward(plain);
            IllegalStateException direct =
                    assertThrows(IllegalStateException.class, () -> tape.backward(y));
            assertTrue(direct.getMessage().contains("has run already"), direct.getMessage());
            IllegalStateException around =
                    assertThrows(IllegalStateException.class, () -> tape.backward(plain));
            assertTrue(around.getMessage().contains("has run already"), around.getMessage());
        }
        try (Tape tape = tape()) {
            tape.backward(apply(new Square(), x).sum());
        }
    }

    @Test
    void backward_lateGradientAfterOneThatWentStraight_clearError() {
        NDArray x = leaf(1, 2);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray late = y.mul(2).sum();
            tape.backward(apply(new Square(), y).sum());
            assertThrows(IllegalStateException.class, () -> tape.backward(late));
        }
    }

    @Test
    void backward_lateGradientOfASingleNumber_clearError() {
        NDArray x = leaf(3);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray late = y.mul(2);
            tape.backward(y.mul(5));
            assertThrows(IllegalStateException.class, () -> tape.backward(late));
        }
    }

    @Test
    void backward_targetWithoutHistory_clearError() {
        try (Tape tape = tape()) {
            NDArray frozen = manager.create(new float[] {1, 2});
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> tape.backward(frozen.sum()));
            assertTrue(e.getMessage().contains("nowhere to go"), e.getMessage());
        }
    }

    @Test
    void backward_inputClosedByTheCaller_gradientArrivesStill() {
        NDArray w = leaf(1, 2);
        try (Tape tape = tape()) {
            NDArray input = w.mul(3);
            NDArray y = apply(new Square(), input);
            input.close();
            tape.backward(y.sum());
        }
        assertArrayEquals(new float[] {18, 36}, w.getGradient().toFloatArray());
    }

    @Test
    void apply_integerOutput_passesThroughWithoutGradient() {
        Segment ranking =
                new Segment() {
                    @Override
                    public NDList forward(SegmentContext context, NDList in) {
                        return plain(in);
                    }

                    @Override
                    public NDList backward(SegmentContext context, NDList in, NDList g) {
                        return new NDList(in.head().mul(2).mul(g.get(1)));
                    }

                    @Override
                    public NDList plain(NDList in) {
                        return new NDList(in.head().argSort(), in.head().square());
                    }
                };
        NDArray x = leaf(3, 1, 2);
        try (Tape tape = tape()) {
            NDList out = Tape.apply(ranking, new NDList(x));
            assertArrayEquals(new long[] {1, 2, 0}, out.get(0).toLongArray());
            tape.backward(out.get(1).sum());
        }
        assertArrayEquals(new float[] {6, 2, 4}, x.getGradient().toFloatArray());
    }

    @Test
    void apply_inputThatNeedsNoGradient_backwardRunsStillForTheParameters() {
        NDArray frozen = manager.create(new float[] {1, 2});
        Square segment = new Square();
        try (Tape tape = tape()) {
            tape.backward(apply(segment, frozen).sum());
        }
        assertEquals(1, segment.backwards);
        assertFalse(ArrayKernels.requiresGradient(frozen));
    }

    @Test
    void apply_nothingBelowTrains_recordsNothing() {
        NDArray frozen = manager.create(new float[] {1, 2});
        Square below =
                new Square() {
                    @Override
                    public boolean hasTrainableParameters() {
                        return false;
                    }
                };
        Square above = new Square();
        try (Tape tape = tape()) {
            NDArray y = apply(below, frozen);
            assertFalse(ArrayKernels.requiresGradient(y));
            tape.backward(apply(above, y).sum());
        }
        assertEquals(0, below.backwards);
        assertEquals(1, above.backwards);
    }

    @Test
    void apply_gradientModeOff_recordsNothing() {
        NDArray x = leaf(1, 2);
        Square segment = new Square();
        try (Tape tape = tape()) {
            NDArray y;
            try (GradMode off = GradMode.off()) {
                y = apply(segment, x);
            }
            assertArrayEquals(new float[] {1, 4}, y.toFloatArray());
            tape.backward(x.mul(2).sum());
        }
        assertEquals(0, segment.backwards);
    }

    @Test
    void apply_withoutTape_plainAutograd() {
        NDArray x = leaf(1, 2);
        Square segment = new Square();
        try (var collector = ai.djl.engine.Engine.getEngine("PyTorch").newGradientCollector()) {
            collector.backward(apply(segment, x).sum());
        }
        assertEquals(0, segment.backwards);
        assertArrayEquals(new float[] {2, 4}, x.getGradient().toFloatArray());
    }

    @Test
    void backward_segmentThrows_everythingReleasedAndGradientsZeroed() {
        NDArray x = leaf(1, 2);
        boolean[] zeroed = {false};
        int before = manager.getManagedArrays().size();
        Segment broken =
                new Segment() {
                    @Override
                    public NDList forward(SegmentContext context, NDList in) {
                        return new NDList(in.head().duplicate());
                    }

                    @Override
                    public NDList backward(SegmentContext context, NDList in, NDList g) {
                        throw new UnsupportedOperationException("broken");
                    }

                    @Override
                    public NDList plain(NDList in) {
                        return forward(null, in);
                    }
                };
        try (Tape tape = new Tape(manager, 1, () -> zeroed[0] = true);
                NDManager batch = manager.newSubManager()) {
            NDArray input = x.mul(1);
            input.attach(batch);
            NDArray y = apply(new Square(), apply(broken, input));
            NDArray loss = y.sum();
            loss.attach(batch);
            assertThrows(UnsupportedOperationException.class, () -> tape.backward(loss));
        }
        assertTrue(zeroed[0]);
        assertFalse(GradMode.isOn() && Thread.currentThread().getName().isEmpty());
        assertEquals(before, manager.getManagedArrays().size());
        try (Tape next = tape()) {
            next.backward(apply(new Square(), x).sum());
        }
    }

    @Test
    void newTape_oneIsOpen_refused() {
        try (Tape tape = tape()) {
            assertThrows(IllegalStateException.class, this::tape);
        }
        tape().close();
    }

    @Test
    void backward_longChain_holdsNoGradientOfConsumedSegments() {
        // The caller's list keeps every output alive until its manager closes; gradients must not
        // stay with them.
        NDArray x = leaf(1, 2);
        try (NDManager batch = manager.newSubManager();
                Tape tape = tape()) {
            NDArray y = x.mul(1);
            y.attach(batch);
            for (int i = 0; i < 5; i++) {
                y = apply(new Square(), y).mul(0.5f);
                assertEquals(new Shape(2), y.getShape());
            }
            tape.backward(y.sum());
        }
        // x_{n+1} = x_n^2 / 2: dx_5/dx_0 = product of x_n
        assertEquals(
                1 * .5f * .125f * .0078125f * 3.0517578e-5f, x.getGradient().toFloatArray()[0]);
    }

    /** A residual added in place, and a product: both lost where a tape looks at identity alone. */
    @Test
    void backward_outputChangedInPlaceBeforeTheNextSegment_chainRuleOfTheChange() {
        NDArray x = leaf(1, 2);
        NDArray residual = leaf(3, 5);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            y.muli(2).addi(residual);
            tape.backward(apply(new Square(), y).sum()); // (2 x^2 + r)^2
        }
        assertArrayEquals(new float[] {5 * 2 * 4, 13 * 2 * 8}, x.getGradient().toFloatArray());
        assertArrayEquals(new float[] {10, 26}, residual.getGradient().toFloatArray());
    }

    /** Such an array uses memory of Java, which goes with the array object that made it. */
    @Test
    void apply_outputMadeOfJavaValues_keepsItsValues() {
        Segment constant =
                new Square() {
                    @Override
                    public NDList forward(SegmentContext context, NDList inputs) {
                        return new NDList(context.manager().create(5f));
                    }
                };
        try (Tape tape = tape()) {
            NDList outputs = new NDList();
            for (int i = 0; i < 50; i++) {
                outputs.add(apply(constant, leaf(1)));
            }
            for (int i = 0; i < 50; i++) {
                System.gc();
                for (int k = 0; k < 20; k++) {
                    manager.create(Float.NaN);
                }
            }
            for (NDArray output : outputs) {
                assertEquals(5, output.getFloat());
            }
        }
    }

    /** Returns an array as the gradient of every input, handed over or not. */
    private static final class Giving implements Segment {
        private final boolean handsOver;
        private final NDArray own;

        Giving(boolean handsOver, NDArray own) {
            this.handsOver = handsOver;
            this.own = own;
        }

        @Override
        public NDList forward(SegmentContext context, NDList in) {
            return plain(in);
        }

        @Override
        public NDList backward(SegmentContext context, NDList in, NDList g) {
            if (handsOver) {
                context.handOver(own);
            }
            NDList gradients = new NDList();
            in.forEach(input -> gradients.add(own));
            return gradients;
        }

        @Override
        public NDList plain(NDList in) {
            return new NDList(in.head().mul(1));
        }
    }

    @Test
    void handOver_leafWithoutGradient_keepsTheMemory() {
        NDArray x = leaf(1, 2);
        NDArray given = manager.ones(new Shape(2)).mul(3);
        try (NDArray other = ArrayKernels.alias(manager, given)) {
            try (Tape tape = tape()) {
                tape.backward(apply(new Giving(true, given), x).sum());
            }
            assertTrue(AutogradKernels.shareMemory(other, Gradients.of(x)));
            assertArrayEquals(new float[] {3, 3}, x.getGradient().toFloatArray());
        }
    }

    @Test
    void handOver_leafThatHasAGradient_isAddedTo() {
        NDArray x = leaf(1, 2);
        for (int step = 1; step <= 3; step++) {
            try (Tape tape = tape()) {
                NDArray given = manager.ones(new Shape(2)).mul(3);
                tape.backward(apply(new Giving(true, given), x).sum());
            }
            assertArrayEquals(new float[] {3 * step, 3 * step}, x.getGradient().toFloatArray());
        }
    }

    @Test
    void handOver_outputOfASegmentWithTwoConsumers_gradientsAdd() {
        NDArray x = leaf(1, 2);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray a = apply(new Giving(true, manager.ones(new Shape(2)).mul(3)), y);
            NDArray b = apply(new Giving(true, manager.ones(new Shape(2)).mul(5)), y);
            tape.backward(a.add(b).sum());
        }
        assertArrayEquals(new float[] {16, 32}, x.getGradient().toFloatArray());
    }

    @Test
    void backward_gradientNotHandedOver_isCopied() {
        NDArray x = leaf(1, 2);
        NDArray kept = manager.ones(new Shape(2)).mul(3);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray a = apply(new Giving(false, kept), y);
            NDArray b = apply(new Giving(false, kept), y);
            tape.backward(a.add(b).sum());
        }
        assertArrayEquals(new float[] {12, 24}, x.getGradient().toFloatArray());
        assertArrayEquals(new float[] {3, 3}, kept.toFloatArray());
    }

    /** Autograd lets leaves behind views keep what arrives: the same memory for both, once. */
    @Test
    void backward_sameGradientForTwoInputsBehindViews_leavesStayIndependent() {
        NDArray a = leaf(1, 2);
        NDArray b = leaf(3, 4);
        try (Tape tape = tape()) {
            NDArray given = manager.ones(new Shape(1, 2)).mul(3);
            NDList in = new NDList(a.reshape(1, 2), b.reshape(1, 2));
            tape.backward(Tape.apply(new Giving(false, given), in).head().sum());
        }
        Gradients.of(a).addi(1);
        assertArrayEquals(new float[] {4, 4}, a.getGradient().toFloatArray());
        assertArrayEquals(new float[] {3, 3}, b.getGradient().toFloatArray());
    }

    @Test
    void backward_gradientIsAnInputItself_inputStaysAsItIs() {
        NDArray a = leaf(1, 2);
        NDArray b = manager.ones(new Shape(1, 2)).mul(3);
        Segment product =
                new Segment() {
                    @Override
                    public NDList forward(SegmentContext context, NDList in) {
                        return plain(in);
                    }

                    @Override
                    public NDList backward(SegmentContext context, NDList in, NDList g) {
                        return new NDList(in.get(1), null);
                    }

                    @Override
                    public NDList plain(NDList in) {
                        return new NDList(in.get(0).mul(in.get(1)).sum());
                    }
                };
        try (Tape tape = tape()) {
            tape.backward(Tape.apply(product, new NDList(a.reshape(1, 2), b)).head());
        }
        Gradients.zero(a);
        assertArrayEquals(new float[] {3, 3}, b.toFloatArray());
    }

    /** Both gradients arrive in one array, which autograd gives to the leaf and to the segment. */
    @Test
    void backward_directGradientBesideOneSharedWithALeaf_leafKeepsItsOwn() {
        NDArray x = leaf(1, 2);
        NDArray w = leaf(3, 4);
        try (Tape tape = tape()) {
            NDArray y = apply(new Square(), x);
            NDArray plain = y.reshape(1, 2).add(w.reshape(1, 2)).mul(2).sum();
            NDArray direct = apply(new Square(), y).sum();
            tape.backward(plain.add(direct));
        }
        assertArrayEquals(new float[] {2, 2}, w.getGradient().toFloatArray());
        assertArrayEquals(new float[] {2 * 4, 4 * 10}, x.getGradient().toFloatArray());
    }
}
