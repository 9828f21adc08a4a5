package org.djlmoe.offload;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.file.Path;
import java.util.Map;
import org.djlmoe.offload.TrainedNetwork.Kind;
import org.djlmoe.offload.TrainedNetwork.Run;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** Ordinary DJL programs under {@code EasyTrain.fit}: offload changes no bit of them. */
class SelectiveCheckpointOffloadTest {

    @TempDir Path directory;

    private static void assertSame(Map<String, float[]> a, Map<String, float[]> b) {
        assertEquals(a.keySet(), b.keySet());
        a.forEach((name, x) -> assertArrayEquals(x, b.get(name), name));
    }

    @ParameterizedTest
    @EnumSource(Kind.class)
    void fit_offloadedToFiles_everyBitEqual(Kind kind) {
        Run plain = TrainedNetwork.train(kind, null);
        SelectiveCheckpointOffload offload =
                SelectiveCheckpointOffload.builder()
                        .setBudget(1 << 20)
                        .optFileTier(directory)
                        .optMinBytes(1)
                        .build();
        Run ours = TrainedNetwork.train(kind, offload);

        assertEquals(TrainedNetwork.STEPS, plain.losses().size());
        assertEquals(plain.losses(), ours.losses());
        assertSame(plain.first(), ours.first());
        assertSame(plain.last(), ours.last());
        assertTrue(offload.lastSession().bytesOut() > 0, "nothing was moved");
        assertTrue(offload.lastSession().bytesBack() > 0, "nothing came back");
    }

    @ParameterizedTest
    @EnumSource(Kind.class)
    void fit_offloadedToHostWithABudgetOfOneBoundary_everyBitEqual(Kind kind) {
        Run plain = TrainedNetwork.train(kind, null);
        SelectiveCheckpointOffload offload =
                SelectiveCheckpointOffload.builder()
                        .setBudget(TrainedNetwork.BOUNDARY)
                        .optHostTier()
                        .optMinBytes(1)
                        .build();
        Run ours = TrainedNetwork.train(kind, offload);

        assertEquals(plain.losses(), ours.losses());
        assertSame(plain.first(), ours.first());
        assertSame(plain.last(), ours.last());
        assertEquals(TrainedNetwork.BOUNDARY, offload.lastSession().bytesOut());
    }
}
