package org.djlmoe.expert;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

class LoraExpertsTest {

    private static final int EXPERTS = 5;
    private static final int HIDDEN = 4;
    private static final int INNER = 3;
    private static final int RANK = 2;

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private NDList deltas(LoraExperts adapters) {
        return adapters.forward(
                new ParameterStore(manager, false), new NDList(manager.ones(new Shape(1))), false);
    }

    @Test
    void forward_freshAdapters_deltasAreZeroAndAIsNot() {
        LoraExperts adapters = new LoraExperts(EXPERTS, HIDDEN, INNER, RANK, 4);
        adapters.initialize(manager, DataType.FLOAT32, new Shape(1, HIDDEN));
        NDList deltas = deltas(adapters);
        assertEquals(new Shape(EXPERTS, 2 * INNER, HIDDEN), deltas.get(0).getShape());
        assertEquals(new Shape(EXPERTS, HIDDEN, INNER), deltas.get(1).getShape());
        assertArrayEquals(
                adapters.getOutputShapes(new Shape[] {new Shape(1, HIDDEN)}), deltas.getShapes());
        assertEquals(0, deltas.get(0).abs().max().getFloat());
        assertEquals(0, deltas.get(1).abs().max().getFloat());
        assertTrue(adapters.weights().get(0).getArray().abs().max().getFloat() > 0);
        assertTrue(adapters.weights().get(2).getArray().abs().max().getFloat() > 0);
    }

    @Test
    void forward_deltaOfOneExpert_isScaledProductOfItsOwnMatrices() {
        LoraExperts adapters = new LoraExperts(EXPERTS, HIDDEN, INNER, RANK, 5);
        adapters.initialize(manager, DataType.FLOAT32, new Shape(1, HIDDEN));
        double[] a = random(new Random(1), EXPERTS * RANK * HIDDEN, 1);
        double[] b = random(new Random(2), EXPERTS * 2 * INNER * RANK, 1);
        array(manager, a, EXPERTS, RANK, HIDDEN).copyTo(adapters.weights().get(0).getArray());
        array(manager, b, EXPERTS, 2 * INNER, RANK).copyTo(adapters.weights().get(1).getArray());
        double[] expected = new double[EXPERTS * 2 * INNER * HIDDEN];
        for (int e = 0; e < EXPERTS; e++) {
            for (int i = 0; i < 2 * INNER; i++) {
                for (int j = 0; j < HIDDEN; j++) {
                    for (int r = 0; r < RANK; r++) {
                        expected[(e * 2 * INNER + i) * HIDDEN + j] +=
                                2.5
                                        * b[(e * 2 * INNER + i) * RANK + r]
                                        * a[(e * RANK + r) * HIDDEN + j];
                    }
                }
            }
        }
        assertClose(expected, deltas(adapters).get(0), 1e-6, "delta");
    }

    @Test
    void newAdapters_senselessRankOrAlpha_clearError() {
        IllegalArgumentException e =
                assertThrows(
                        IllegalArgumentException.class,
                        () -> new LoraExperts(EXPERTS, HIDDEN, INNER, 0, 4));
        assertTrue(e.getMessage().contains("rank 0"), e.getMessage());
        assertThrows(
                IllegalArgumentException.class,
                () -> new LoraExperts(EXPERTS, HIDDEN, INNER, 2, Double.NaN));
    }

    @Test
    void experts_withoutAdapters_noScaleAndAbsentWeights() {
        Experts experts = new Experts(EXPERTS, HIDDEN, INNER, 0.02);
        assertEquals(0, experts.adapterScale());
        assertNull(experts.adapters());
        List<Parameter> weights = experts.weights();
        assertEquals(6, weights.size());
        assertTrue(weights.subList(2, 6).stream().allMatch(w -> w == null));
        experts.detachAdapters();
        LoraExperts adapters = experts.attachAdapters(RANK, 4);
        assertEquals(2, experts.adapterScale());
        assertEquals(adapters.weights(), experts.weights().subList(2, 6));
        assertEquals(INNER, experts.inner());
    }

    @Test
    void forward_expertsAlone_weightedSumOfTheChosen() {
        Experts experts = new Experts(2, 1, 1, 0.02);
        experts.initialize(manager, DataType.FLOAT32, new Shape(-1, 1));
        // expert e computes silu(x) * x * (e + 1)
        manager.ones(new Shape(2, 2, 1)).copyTo(experts.gateUp().getArray());
        manager.create(new float[] {1, 2}, new Shape(2, 1, 1)).copyTo(experts.down().getArray());
        NDArray x = manager.create(new float[] {1, 2, 3}, new Shape(3, 1));
        NDArray ids = manager.create(new long[] {0, 1, 1}, new Shape(3, 1));
        NDArray combine = manager.create(new float[] {1, 1, 0.5f}, new Shape(3, 1));
        NDArray y =
                experts.forward(
                                new ParameterStore(manager, false),
                                new NDList(x, ids, combine),
                                false)
                        .singletonOrThrow();
        double[] expected = {square(1), 2 * square(2), square(3)};
        assertClose(expected, y, 1e-6, Arrays.toString(expected));
    }

    private static double square(double x) {
        return x * x / (1 + Math.exp(-x));
    }
}
