package org.djlmoe.cache;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

class EvictionPolicyTest {

    @ParameterizedTest
    @EnumSource(EvictionPolicy.Type.class)
    void mayDecline_everyType_isWhatItsPoliciesSay(EvictionPolicy.Type type) {
        if (type == EvictionPolicy.Type.BELADY) {
            assertThrows(
                    IllegalArgumentException.class,
                    () -> EvictionPolicy.of(type, 4, 0.9, new boolean[4], 1));
            return;
        }
        EvictionPolicy policy = EvictionPolicy.of(type, 4, 0.9, new boolean[4], 1);
        assertEquals(policy.mayDecline(), type.mayDecline());
    }
}
