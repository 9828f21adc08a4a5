package org.djlmoe.tier;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import org.junit.jupiter.api.Test;

class HostTierTest {

    @Test
    void allocate_twoNames_givesZerosAndCountsBytes() {
        try (HostTier tier = new HostTier()) {
            NDArray a = tier.allocate("a", 3);
            NDArray b = tier.allocate("b", 5);
            assertArrayEquals(new float[3], a.toFloatArray());
            assertArrayEquals(new float[5], b.toFloatArray());
            assertEquals(32, tier.bytes());
        }
    }

    @Test
    void allocate_nameInUse_isRefused() {
        try (HostTier tier = new HostTier()) {
            tier.allocate("a", 3);
            IllegalArgumentException e =
                    assertThrows(IllegalArgumentException.class, () -> tier.allocate("a", 3));
            assertTrue(e.getMessage().contains("a"));
        }
    }

    @Test
    void close_anyNumberOfTimes_freesTheArrays() {
        HostTier tier = new HostTier();
        NDArray a = tier.allocate("a", 3);
        tier.close();
        tier.close();
        assertEquals(0, tier.bytes());
        assertThrows(IllegalStateException.class, a::toFloatArray);
    }

    @Test
    void slot_writtenWithSeveralTypesAndStrides_sameValuesBack() {
        try (HostTier tier = new HostTier();
                NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            SlotTier.Slot slot = tier.newSlot(96);
            assertEquals(96, tier.bytes());
            NDArray strided = manager.arange(12f).reshape(3, 4).transpose();
            NDArray back = manager.create(new Shape(4, 3));
            slot.write(strided);
            slot.read(back);
            assertArrayEquals(strided.toFloatArray(), back.toFloatArray());

            NDArray longs = manager.create(new long[] {1L << 40, -3, 5});
            NDArray longsBack = manager.zeros(new Shape(3), DataType.INT64);
            slot.write(longs);
            slot.read(longsBack);
            assertArrayEquals(longs.toLongArray(), longsBack.toLongArray());

            NDArray large = manager.zeros(new Shape(25));
            assertThrows(IllegalArgumentException.class, () -> slot.write(large));
            slot.close();
            slot.close();
            assertEquals(0, tier.bytes());
        }
    }
}
