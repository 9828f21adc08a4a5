package org.djlmoe.offload;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.GradientCollector;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.autograd.BoundaryPolicy;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.autograd.Tape;
import org.djlmoe.autograd.WorkerThread;
import org.djlmoe.tier.HostTier;

/** Any graph, any budget: the gradients of plain autograd, the budget kept, everything released. */
class RandomGraphTest {

    private static final int SIZE = 7;

    /** tanh(a + b), recomputed in backward, through a segment inside half of the time. */
    private record TanhOfSum(boolean nested) implements Segment {

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            return plain(inputs);
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList gradients) {
            return Tape.differentiate(
                    leaves ->
                            nested
                                    ? Tape.apply(
                                            new TanhOfSum(false),
                                            new NDList(
                                                    Tape.apply(
                                                                    new Halves(),
                                                                    new NDList(leaves.get(0)))
                                                            .head()
                                                            .mul(2),
                                                    leaves.get(1)))
                                    : plain(leaves),
                    inputs,
                    gradients);
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(inputs.get(0).add(inputs.get(1)).tanh());
        }
    }

    private static final class Halves implements Segment {

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            return plain(inputs);
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList gradients) {
            return new NDList(gradients.head().mul(0.5f));
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(inputs.head().mul(0.5f));
        }
    }

    @Property(tries = 60)
    void backward_randomGraph_gradientOfPlainAutograd(
            @ForAll long seed,
            @ForAll @IntRange(min = 1, max = 14) int steps,
            @ForAll @IntRange(max = 8) int slots) {
        float[] expected = gradient(seed, steps, null, false);
        float[] onDevice = gradient(seed, steps, BoundaryPolicy.ON_DEVICE, false);
        try (WorkerThread thread = new WorkerThread("boundary-offload");
                SlotPool pool = new SlotPool(new HostTier(), 4L * SIZE * slots)) {
            BoundaryPolicy offload =
                    home -> new OffloadSession(home, pool, thread, 1, statistics -> {});
            float[] offloaded = gradient(seed, steps, offload, true);
            assertArrayEquals(onDevice, offloaded);
            assertEquals(0, pool.inUse());
            assertTrue(pool.slots() <= slots);
        }
        assertArrayEquals(expected, onDevice, 1e-4f);
    }

    private static float[] gradient(long seed, int steps, BoundaryPolicy policy, boolean reads) {
        Random random = new Random(seed);
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            NDArray x = manager.arange(SIZE * 1f).sub(3).div(5);
            x.setRequiresGradient(true);
            try (GradientCollector collector =
                    policy == null
                            ? manager.getEngine().newGradientCollector()
                            : new Tape(manager, 1, () -> {}, policy)) {
                List<NDArray> arrays = new ArrayList<>(List.of(x));
                for (int i = 0; i < steps; i++) {
                    NDArray a = arrays.get(random.nextInt(arrays.size()));
                    NDArray b = arrays.get(random.nextInt(arrays.size()));
                    int kind = random.nextInt(6);
                    NDList pair = new NDList(a, b);
                    NDArray made;
                    if (kind == 0) {
                        made = a.add(b).mul(0.5f);
                    } else if (kind == 1) {
                        made = a.mul(b);
                    } else {
                        made = run(policy, new TanhOfSum(kind == 2), pair);
                    }
                    arrays.add(made);
                    boolean detached = random.nextInt(3) == 0;
                    NDArray read = arrays.get(random.nextInt(arrays.size()));
                    if (reads) {
                        // a late read, recorded or not, changes nothing
                        try (GradMode mode = detached ? GradMode.off() : GradMode.on()) {
                            assertEquals(new Shape(SIZE), read.getShape());
                            read.toFloatArray();
                        }
                    }
                }
                NDArray last = arrays.get(arrays.size() - 1);
                collector.backward(last.add(arrays.get(arrays.size() / 2)).sum());
            }
            return x.getGradient().toFloatArray();
        }
    }

    private static NDArray run(BoundaryPolicy policy, Segment segment, NDList inputs) {
        return (policy == null ? segment.plain(inputs) : Tape.apply(segment, inputs)).head();
    }
}
