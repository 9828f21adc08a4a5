package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.optimizer.StateTiersTest.Way;
import org.djlmoe.tier.HostTier;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Working weights of 16 bits with 32-bit masters in the tier. */
class HalfPrecisionTest {

    private static final int F16 = 5;
    private static final int BF16 = 15;

    private static final TorchKernels KERNELS =
            TorchKernels.compile(
                    "half",
                    "def half(self, x: Tensor, type: int) -> Tensor:\n"
                            + "    return x.to(dtype=type)\n"
                            + "def fill(self, x: Tensor, values: Tensor) -> int:\n"
                            + "    x.copy_(values)\n"
                            + "    return 0\n"
                            + "def wide(self, x: Tensor) -> Tensor:\n"
                            + "    return x.to(dtype=6)\n");

    private static NDArray half(NDManager manager, NDArray x, int type) {
        return KERNELS.call(manager, "half", x, type).head();
    }

    private static float[] wide(NDManager manager, NDArray x) {
        return KERNELS.call(manager, "wide", x).head().toFloatArray();
    }

    private static OffloadStreamAdamW.Builder builder() {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(Tracker.fixed(0.01f))
                .optWeightDecay(0.1);
    }

    private static float[] random(Random random, int n) {
        float[] x = new float[n];
        for (int i = 0; i < n; i++) {
            x[i] = (float) random.nextGaussian();
        }
        return x;
    }

    @Property(tries = 30)
    void step_halfWeights_masterFollowsTheRuleAndWeightIsItsRounding(
            @ForAll long seed,
            @ForAll Way way,
            @ForAll boolean brain,
            @ForAll boolean halfGradient,
            @ForAll boolean clip,
            @ForAll @IntRange(min = 1, max = 60) int bucket) {
        int type = brain ? BF16 : F16;
        Random random = new Random(seed);
        Shape shape = new Shape(1 + random.nextInt(6), 1 + random.nextInt(9));
        int n = (int) shape.size();
        OffloadStreamAdamW.Builder builder =
                way.apply(builder(), Path.of("target")).optBucketElements(bucket);
        if (clip) {
            builder.optClipNorm(0.5).optNonFinite(NonFinitePolicy.RAISE);
        }
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder.build()) {
            NDArray weight = half(manager, manager.create(random(random, n), shape), type);
            NDArray other = manager.ones(new Shape(7)); // 32 bits in the same optimizer
            PlainAdamW plain = new PlainAdamW(wide(manager, weight));
            for (int step = 0; step < 5; step++) {
                NDArray gradient = manager.create(random(random, n), shape);
                if (halfGradient) {
                    gradient = half(manager, gradient, type);
                }
                float[] g = wide(manager, gradient);
                NDArray otherGradient = manager.zeros(new Shape(7));
                double squares = 0;
                for (float x : g) {
                    squares += (double) x * x;
                }
                optimizer.step(
                        List.of(
                                new Slot("h", "h", weight, gradient),
                                new Slot("o", "o", other, otherGradient)));
                assertArrayEquals(new float[n], wide(manager, gradient), "gradient set to zero");
                plain.step(
                        g,
                        clip ? Math.min(1, 0.5 / (Math.sqrt(squares) + 1e-6)) : 1,
                        0.01f,
                        0.9,
                        0.999,
                        1e-8,
                        0.1);
            }
            NDArray master = manager.zeros(shape);
            optimizer.state().readMaster("h", 0, master);
            float[] actual = master.toFloatArray();
            for (int i = 0; i < n; i++) {
                assertEquals(plain.weight[i], actual[i], 5e-6 * (Math.abs(plain.weight[i]) + 0.1));
            }
            assertArrayEquals(
                    wide(manager, half(manager, master, type)), wide(manager, weight), 0f);
            assertTrue(optimizer.state().hasMaster("h"));
            assertFalse(optimizer.state().hasMaster("o"));
        }
    }

    /** 1 - 1e-4 is 1 in either type: without a master such a weight would never move. */
    @ParameterizedTest
    @CsvSource({"5", "15"})
    void step_updatesBelowTheWeightsPrecision_addUp(int type) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        OffloadStreamAdamW.builder()
                                .setLearningRateTracker(Tracker.fixed(1e-4f))
                                .optWeightDecay(0)
                                .build()) {
            NDArray weight = half(manager, manager.ones(new Shape(3)), type);
            for (int step = 0; step < 300; step++) {
                NDArray gradient = manager.ones(new Shape(3));
                optimizer.step(List.of(new Slot("h", "h", weight, gradient)));
            }
            assertEquals(300, optimizer.state().step("h"));
            assertEquals(0.97f, wide(manager, weight)[1], 0.004f);
        }
    }

    @Test
    void tier_halfAndWhole_twelveAndEightBytesAnElement() {
        HostTier tier = new HostTier();
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        builder().optTier(tier).optBucketElements(16).build()) {
            NDArray half = half(manager, manager.ones(new Shape(33)), BF16);
            NDArray whole = manager.ones(new Shape(20));
            List<Slot> slots =
                    List.of(
                            new Slot(
                                    "h",
                                    "h",
                                    half,
                                    half(manager, manager.ones(half.getShape()), BF16)),
                            new Slot("w", "w", whole, manager.ones(whole.getShape())));
            optimizer.step(slots);
            assertEquals(33 * 12 + 20 * 8, tier.bytes());
            // in place: only the gradient is widened, a bucket at a time
            assertEquals(16 * 4, optimizer.lastStep().stagingBytes());
        }
        tier.close();
    }

    @Test
    void step_stagedHalf_buffersStayWithinTheBound() {
        int beta = 16;
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        builder().optStaged(true).optBucketElements(beta).build()) {
            NDArray half = half(manager, manager.ones(new Shape(100)), BF16);
            for (int step = 0; step < 3; step++) {
                NDArray gradient = half(manager, manager.ones(half.getShape()), BF16);
                optimizer.step(List.of(new Slot("h", "h", half, gradient)));
                assertEquals((2 * 12 + 4) * beta, optimizer.lastStep().stagingBytes());
            }
            assertTrue(optimizer.lastStep().stagingBytes() <= 2 * 16 * beta);
        }
    }

    @ParameterizedTest
    @CsvSource({"5", "15"})
    void state_masterSavedAndRestored_nextStepIsTheSameToTheBit(int type) {
        Random random = new Random(3);
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW one = builder().optBucketElements(7).build();
                OffloadStreamAdamW two = builder().optStaged(true).build()) {
            Shape shape = new Shape(5, 4);
            NDArray weight = half(manager, manager.create(random(random, 20), shape), type);
            List<float[]> gradients = new ArrayList<>();
            for (int step = 0; step < 3; step++) {
                gradients.add(random(random, 20));
                NDArray gradient = manager.create(gradients.get(step).clone(), shape).duplicate();
                one.step(List.of(new Slot("h", "h", weight, gradient)));
            }
            NDArray copy = weight.duplicate();
            AdamWState from = one.state();
            AdamWState to = two.state();
            to.define("h", shape, from.steps("h"), from.hasMaster("h"));
            NDArray master = manager.zeros(shape);
            from.readMaster("h", 0, master);
            to.writeMaster("h", 0, master);
            to.write("h", 0, from.expAvg(manager, "h"), from.expAvgSq(manager, "h"));
            for (NDArray w : List.of(weight, copy)) {
                NDArray gradient = manager.create(random(new Random(9), 20), shape).duplicate();
                (w == weight ? one : two).step(List.of(new Slot("h", "h", w, gradient)));
            }
            assertArrayEquals(wide(manager, weight), wide(manager, copy));
            NDArray after = manager.zeros(shape);
            one.state().readMaster("h", 0, master);
            two.state().readMaster("h", 0, after);
            assertArrayEquals(master.toFloatArray(), after.toFloatArray());
            assertNotEquals(0f, after.toFloatArray()[3]);
        }
    }

    @Test
    void step_masterThatWasNeverWrittenWhole_isTakenFromTheWeight(@TempDir Path folder)
            throws IOException {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder().build()) {
            NDArray weight = manager.ones(new Shape(3)).toType(DataType.FLOAT16, false);
            NDArray gradient = manager.ones(new Shape(3));
            optimizer.state().define("h", weight.getShape(), new long[] {4}, true);
            optimizer.state().writeMaster("h", 0, manager.ones(new Shape(1)));
            Path file = folder.resolve("unwritten");
            optimizer.save(file);
            try (SafetensorsReader reader = SafetensorsReader.open(file)) {
                assertFalse(reader.names().contains("h.master"));
            }

            optimizer.step(List.of(new Slot("h", "h", weight, gradient)));

            assertEquals(1f, weight.toType(DataType.FLOAT32, false).toFloatArray()[2], 0.02f);
        }
    }

    @Test
    void step_stateWithoutMaster_isRefused() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder().build()) {
            optimizer.state().define("h", new Shape(3), 4);
            NDArray weight = half(manager, manager.ones(new Shape(3)), BF16);
            IllegalStateException e =
                    assertThrows(
                            IllegalStateException.class,
                            () ->
                                    optimizer.step(
                                            List.of(
                                                    new Slot(
                                                            "h",
                                                            "h",
                                                            weight,
                                                            manager.ones(new Shape(3))))));
            assertTrue(e.getMessage().contains("master"), e.getMessage());
            assertThrows(
                    IllegalArgumentException.class,
                    () -> optimizer.state().readMaster("h", 0, manager.zeros(new Shape(3))));
        }
    }

    /** The master would have overwritten the weight with what it was before. */
    @Test
    void step_weightNoLongerHalf_isRefused() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder().build()) {
            NDArray half = half(manager, manager.ones(new Shape(3)), BF16);
            optimizer.step(List.of(new Slot("h", "h", half, manager.ones(new Shape(3)))));
            NDArray weight = manager.full(new Shape(3), 5f, DataType.FLOAT32);
            IllegalStateException e =
                    assertThrows(
                            IllegalStateException.class,
                            () ->
                                    optimizer.step(
                                            List.of(
                                                    new Slot(
                                                            "h",
                                                            "h",
                                                            weight,
                                                            manager.ones(new Shape(3))))));
            assertTrue(e.getMessage().contains("master"), e.getMessage());
            assertEquals(5f, weight.toFloatArray()[0]);
        }
    }

    /** As DJL's trainer calls it; DJL itself must not look into such an array. */
    @ParameterizedTest
    @CsvSource({"5", "15"})
    void update_halfWeight_works(int type) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder().build()) {
            NDArray weight = half(manager, manager.ones(new Shape(2, 2)), type);
            for (int step = 0; step < 10; step++) {
                optimizer.update("7", weight, half(manager, manager.ones(weight.getShape()), type));
            }
            assertEquals(0.89f, wide(manager, weight)[0], 0.005f);
            assertEquals(type == BF16 ? DataType.UNKNOWN : DataType.FLOAT16, weight.getDataType());
        }
    }
}
