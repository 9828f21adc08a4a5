package org.djlmoe.plan;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class MemoryBudgetTest {

    @ParameterizedTest
    @CsvSource({
        "900m, 943718400",
        "2g, 2147483648",
        "1500MB, 1572864000",
        "1.5 GiB, 1610612736",
        "' 64 k ', 65536",
        "1T, 1099511627776",
        "4096, 4096",
        "4096B, 4096"
    })
    void parse_amount_isInPowersOf1024(String text, long bytes) {
        assertEquals(bytes, MemoryBudget.parse(text).bytes());
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "",
                "m",
                "-5m",
                "2x",
                "1e9",
                "2 g b",
                "half",
                "1,5g",
                "0",
                "0.1",
                "9999999t"
            })
    void parse_noAmount_saysWhatItGot(String text) {
        String message =
                assertThrows(IllegalArgumentException.class, () -> MemoryBudget.parse(text))
                        .getMessage();
        assertTrue(message.contains('"' + text + '"'), message);
    }

    @Test
    void parse_null_isAnError() {
        assertThrows(IllegalArgumentException.class, () -> MemoryBudget.parse(null));
    }
}
