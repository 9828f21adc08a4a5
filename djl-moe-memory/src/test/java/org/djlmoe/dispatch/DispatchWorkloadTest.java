package org.djlmoe.dispatch;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

class DispatchWorkloadTest {

    @ParameterizedTest
    @EnumSource(DispatchWorkload.class)
    void of_itsName_findsIt(DispatchWorkload workload) {
        assertEquals(workload, DispatchWorkload.of(workload.toString()));
    }

    @Test
    void of_unknownName_listsTheKnown() {
        String message =
                assertThrows(IllegalArgumentException.class, () -> DispatchWorkload.of("70/3"))
                        .getMessage();
        assertTrue(message.contains("'70/3'"), message);
        assertTrue(message.contains("balanced, 30/16, 50/16, 80/16, 95/16, 30/4, 50/4, periodic"));
    }

    @Test
    void experts_smallLayer_followTheFormulas() {
        assertArrayEquals(
                new int[] {0, 1, 1, 2, 2, 3, 3, 0},
                DispatchWorkload.of("balanced").experts(4, 2, 4, 2, 2));
        // Two of four tokens are hot, on experts 0 to 3; token 2 goes to 4 + (2, 3), token 3 on.
        assertArrayEquals(
                new int[] {0, 1, 0, 1, 6, 7, 7, 8},
                DispatchWorkload.of("50/4").experts(4, 2, 16, 2, 2));
        // Ranks own experts 0 to 2 and 3 to 4; the third chunk returns to rank 0.
        assertArrayEquals(
                new int[] {0, 1, 3, 4, 0, 1, 0, 1},
                DispatchWorkload.of("periodic").experts(4, 2, 5, 2, 3));
        // 32 tokens in phases of 2, the first of each hot; experts 0, 2, 4, ... begin a phase.
        int[] rotating = DispatchWorkload.of("rotating").experts(32, 2, 32, 2, 2);
        assertArrayEquals(new int[] {0, 1, 17, 18, 2, 3, 19, 20}, Arrays.copyOf(rotating, 8));
    }

    @Property(tries = 300)
    void experts_anySizes_areInRange(
            @ForAll DispatchWorkload workload,
            @ForAll @IntRange(min = 0, max = 50) int tokens,
            @ForAll @IntRange(min = 1, max = 8) int topK,
            @ForAll @IntRange(min = 1, max = 40) int experts,
            @ForAll @IntRange(min = 1, max = 8) int ranks,
            @ForAll @IntRange(min = 1, max = 12) int chunks) {
        int[] ids = workload.experts(tokens, topK, experts, ranks, chunks);
        assertEquals(tokens * topK, ids.length);
        assertTrue(Arrays.stream(ids).allMatch(e -> 0 <= e && e < experts));
    }
}
