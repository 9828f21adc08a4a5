package org.djlmoe.dispatch;

import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.Arrays;
import java.util.Locale;
import org.junit.jupiter.api.Test;

/** The skew of sends and receives over eight ranks, as published for this planner's algorithm. */
class PublishedProfilesTest {

    private static final int RANKS = 8;
    private static final int EXPERTS = 128;
    private static final int TOP_K = 8;
    private static final int TOKENS = 65_536;
    private static final int CHUNKS = 10;

    @Test
    void sevenProfiles_eightRanks_giveThePublishedFigures() {
        StringBuilder table = new StringBuilder();
        for (DispatchWorkload workload : DispatchWorkload.values()) {
            if (workload != DispatchWorkload.PERIODIC && workload != DispatchWorkload.ROTATING) {
                table.append(line(workload)).append('\n');
            }
        }
        assertEquals(
                """
                balanced  1.000 .1251  1.016 .1269
                30/16     1.411 .1251  4.000 .4219
                50/16     2.073 .1251  3.000 .2500
                80/16     2.400 .1251  4.000 .1563
                95/16     1.350 .1251  2.628 .1581
                30/4      2.285 .1251  5.998 .1975
                50/4      2.290 .1251  6.001 .1712
                """,
                table.toString());
    }

    private static String line(DispatchWorkload workload) {
        int[] experts = workload.experts(TOKENS, TOP_K, EXPERTS, RANKS, CHUNKS);
        int[][] all = new int[RANKS][];
        Arrays.fill(all, experts);
        LeastLoadedPlanner planner =
                LeastLoadedPlanner.builder().setRanks(RANKS).setExperts(EXPERTS).build();
        Group group = new Group(planner, EXPERTS, TOP_K, all);
        long[][][] strided = group.strided(CHUNKS);
        long[][][] contiguous = group.contiguous(CHUNKS);
        return String.format(
                        Locale.ROOT,
                        "%-9s %.3f %.4f  %.3f %.4f",
                        workload,
                        sendSkew(strided),
                        receiveShare(strided),
                        sendSkew(contiguous),
                        receiveShare(contiguous))
                .replace(" 0.", " .");
    }

    /** Over chunks and senders, the largest send to one rank against the mean send. */
    private static double sendSkew(long[][][] gathered) {
        double skew = 0;
        for (long[][] sender : gathered) {
            for (long[] sends : sender) {
                long max = Arrays.stream(sends).max().orElseThrow();
                skew = Math.max(skew, (double) max * RANKS / Arrays.stream(sends).sum());
            }
        }
        return skew;
    }

    /** The largest receive of a rank in a chunk as a part of the routes of a full chunk. */
    private static double receiveShare(long[][][] gathered) {
        long max =
                Arrays.stream(ChunkSchedule.received(gathered))
                        .flatMapToLong(Arrays::stream)
                        .max()
                        .orElseThrow();
        int chunkTokens = (TOKENS + CHUNKS - 1) / CHUNKS;
        return (double) max / ((long) RANKS * TOP_K * chunkTokens);
    }
}
