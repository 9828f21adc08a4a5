package org.djlmoe.cache;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.List;
import org.junit.jupiter.api.Test;

class ExpertTraceTest {

    private static ExpertTrace.Builder builder() {
        return ExpertTrace.builder().setNumExperts(300).setTopK(2).setNumLayers(2);
    }

    @Test
    void build_requestsAppendedInPieces_keepsIdsAndBounds() {
        ExpertTrace trace =
                builder()
                        .beginRequest()
                        .append(0, 0, 299)
                        .append(1, new long[] {1, 2, 3, 4})
                        .append(0, 5, 6)
                        .beginRequest()
                        .append(0, 7, 8)
                        .append(1, 9, 10)
                        .build();
        assertEquals(3, trace.tokens());
        assertEquals(
                List.of(new ExpertTrace.Request(0, 2), new ExpertTrace.Request(2, 1)),
                trace.requests());
        assertEquals(299, trace.expert(0, 0, 1));
        int[] ids = new int[2];
        trace.experts(1, 1, ids);
        assertArrayEquals(new int[] {3, 4}, ids);
        trace.experts(0, 2, ids);
        assertArrayEquals(new int[] {7, 8}, ids);
        assertEquals(
                "ExpertTrace 2 requests, 3 tokens, 2 layers, top-2 of 300 experts",
                trace.toString());
    }

    /** Two bytes hold 65536 ids only when read unsigned. */
    @Test
    void append_idAbove32767_staysPositive() {
        ExpertTrace trace =
                ExpertTrace.builder()
                        .setNumExperts(65536)
                        .setTopK(1)
                        .setNumLayers(1)
                        .beginRequest()
                        .append(0, 65535)
                        .build();
        assertEquals(65535, trace.expert(0, 0, 0));
        assertEquals(1, trace.usage()[0][65535]);
    }

    @Test
    void usage_countsPerLayer() {
        long[][] usage =
                builder()
                        .beginRequest()
                        .append(0, 0, 1, 1, 0, 1, 2)
                        .append(1, 3, 4, 3, 4, 3, 4)
                        .build()
                        .usage();
        assertEquals(2, usage[0][0]);
        assertEquals(3, usage[0][1]);
        assertEquals(1, usage[0][2]);
        assertEquals(3, usage[1][3]);
        assertEquals(0, usage[1][0]);
    }

    @Test
    void build_layersOfUnequalLength_isRefused() {
        ExpertTrace.Builder b = builder().beginRequest().append(0, 0, 1);
        assertTrue(
                assertThrows(IllegalStateException.class, b::build)
                        .getMessage()
                        .contains("Layer 1 has 0 tokens where layer 0 has 1"));
        assertThrows(IllegalStateException.class, b::beginRequest);
    }

    @Test
    void append_badIds_areRefused() {
        ExpertTrace.Builder b = builder();
        assertThrows(IllegalStateException.class, () -> b.append(0, 0, 1));
        b.beginRequest();
        assertThrows(IllegalArgumentException.class, () -> b.append(0, 0, 1, 2));
        assertThrows(IllegalArgumentException.class, () -> b.append(0, 0, 300));
        assertThrows(IllegalArgumentException.class, () -> b.append(0, -1, 0));
        assertThrows(IllegalArgumentException.class, () -> b.append(0, new long[] {1L << 32, 1}));
        assertThrows(IllegalArgumentException.class, () -> b.append(0, 4, 4));
        assertThrows(IllegalArgumentException.class, () -> b.append(2, 0, 1));
        assertThrows(IllegalStateException.class, () -> b.setTopK(3));
        assertThrows(IllegalStateException.class, b::build);
        // A refused append leaves nothing behind.
        assertEquals(1, b.append(0, 0, 1).append(1, 0, 1).build().tokens());
    }
}
