package org.djlmoe.kernel;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.Random;
import org.djlmoe.io.HalfFloats;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;

class HalfArraysTest {

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private static float[] values() {
        float[] values = new float[60];
        Random random = new Random(4);
        for (int i = 0; i < values.length; i++) {
            values[i] = (float) random.nextGaussian();
        }
        // A tie below and above an even neighbour, the largest F32, and what has no finite BF16.
        System.arraycopy(
                new float[] {1.00390625f, 1.01171875f, Float.MAX_VALUE, 1e-40f, -0f},
                0,
                values,
                0,
                5);
        return values;
    }

    @Test
    void narrowAndWiden_anyNumbers_areThoseOfTheFileFormat() {
        float[] values = values();
        NDArray half = HalfArrays.narrow(manager, manager.create(values, new Shape(3, 4, 5)));
        assertTrue(HalfArrays.isHalf(half));
        assertEquals(new Shape(3, 4, 5), half.getShape());
        NDArray wide = HalfArrays.widen(manager, half);
        assertFalse(HalfArrays.isHalf(wide));
        float[] expected = new float[values.length];
        for (int i = 0; i < values.length; i++) {
            expected[i] = HalfFloats.bf16ToFloat(HalfFloats.floatToBf16(values[i]));
        }
        assertArrayEquals(expected, wide.toFloatArray());
        assertFalse(HalfArrays.isExact(manager.create(values)));
        assertTrue(HalfArrays.isExact(wide));
    }

    @Test
    void narrow_weightThatRequiresAGradient_leafWithout() {
        NDArray weight = manager.create(values());
        weight.setRequiresGradient(true);
        NDArray half = HalfArrays.narrow(manager, weight);
        assertFalse(ArrayKernels.requiresGradient(half));
    }

    @Test
    void put_someElements_theOthersStay() {
        NDArray half = HalfArrays.zeros(manager, new Shape(6));
        assertTrue(HalfArrays.isHalf(half));
        HalfArrays.put(half, 2, manager.create(new float[] {1, -2.5f}));
        assertArrayEquals(
                new float[] {0, 0, 1, -2.5f, 0, 0}, HalfArrays.widen(manager, half).toFloatArray());
    }
}
