package org.djlmoe.tier;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
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
}
