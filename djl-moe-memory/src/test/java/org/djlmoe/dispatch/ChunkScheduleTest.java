package org.djlmoe.dispatch;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.dispatch.ChunkSchedule.Membership;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

class ChunkScheduleTest {

    @Test
    void numChunks_anyTokens_oneABudgetUpToTheLimit() {
        assertEquals(1, ChunkSchedule.numChunks(0, 4096, 10));
        assertEquals(1, ChunkSchedule.numChunks(4096, 4096, 10));
        assertEquals(2, ChunkSchedule.numChunks(4097, 4096, 10));
        assertEquals(10, ChunkSchedule.numChunks(65_536, 4096, 10));
        assertEquals(1, ChunkSchedule.numChunks(65_536, 4096, 1));
        assertEquals(10, ChunkSchedule.numChunks(Long.MAX_VALUE, 1, 10));
    }

    @Test
    void schedules_fiveTokensInTwoChunks_takeTheirTokens() {
        ChunkSchedule strided = ChunkSchedule.strided(5, 2);
        assertArrayEquals(new int[] {0, 2, 4}, strided.positions(0));
        assertArrayEquals(new int[] {1, 3}, strided.positions(1));
        ChunkSchedule contiguous = ChunkSchedule.contiguous(5, 2);
        assertArrayEquals(new int[] {0, 1, 2}, contiguous.positions(0));
        assertArrayEquals(new int[] {3, 4}, contiguous.positions(1));
        // Tokens 0, 2 go to rank 0 and 1, 3, 4 to rank 1, two slots each.
        int[] destinations = {0, 0, 1, 1, 0, 0, 1, 1, 1, 1};
        ChunkSchedule dealt = ChunkSchedule.dealt(0, 2, 5, 2, destinations);
        assertArrayEquals(new int[] {0, 1, 4}, dealt.positions(0));
        assertArrayEquals(new int[] {2, 3}, dealt.positions(1));
        assertEquals(Membership.DEALT, dealt.membership());
    }

    @Property(tries = 200)
    void schedules_anyRouting_takeEveryTokenOnceAndFillNoChunkBeyondItsShare(
            @ForAll @IntRange(min = 0, max = 70) int tokens,
            @ForAll @IntRange(min = 1, max = 12) int chunks,
            @ForAll @IntRange(min = 1, max = 9) int ranks,
            @ForAll @IntRange(min = 1, max = 8) int topK,
            @ForAll Random random) {
        int[] destinations = random.ints((long) tokens * topK, 0, ranks).toArray();
        for (ChunkSchedule schedule :
                new ChunkSchedule[] {
                    ChunkSchedule.strided(tokens, chunks),
                    ChunkSchedule.contiguous(tokens, chunks),
                    ChunkSchedule.dealt(ranks - 1, ranks, tokens, chunks, destinations)
                }) {
            assertEquals(chunks, schedule.numChunks());
            assertEquals(tokens, schedule.numTokens());
            boolean[] seen = new boolean[tokens];
            long routes = 0;
            for (int c = 0; c < chunks; c++) {
                int[] positions = schedule.positions(c);
                assertTrue(positions.length <= (tokens + chunks - 1) / chunks);
                int last = -1;
                for (int t : positions) {
                    assertTrue(t > last, "ascending and distinct");
                    assertFalse(seen[t], "token " + t + " twice");
                    seen[t] = true;
                    last = t;
                }
                routes += Arrays.stream(schedule.routes(ranks, destinations)[c]).sum();
            }
            for (boolean s : seen) {
                assertTrue(s);
            }
            assertEquals((long) tokens * topK, routes);
        }
    }

    /** The order of tokens and of slots must not matter: no periodic routing can alias. */
    @Property(tries = 200)
    void dealt_anyRouting_spreadsEachPatternEvenly(
            @ForAll @IntRange(min = 0, max = 300) int tokens,
            @ForAll @IntRange(min = 1, max = 12) int chunks,
            @ForAll @IntRange(min = 1, max = 4) int ranks,
            @ForAll @IntRange(min = 1, max = 3) int topK,
            @ForAll Random random) {
        int[] destinations = random.ints((long) tokens * topK, 0, ranks).toArray();
        ChunkSchedule dealt = ChunkSchedule.dealt(0, ranks, tokens, chunks, destinations);
        Map<String, int[]> perChunk = new HashMap<>();
        for (int c = 0; c < chunks; c++) {
            for (int t : dealt.positions(c)) {
                int[] pattern = Arrays.copyOfRange(destinations, t * topK, (t + 1) * topK);
                Arrays.sort(pattern);
                perChunk.computeIfAbsent(Arrays.toString(pattern), p -> new int[chunks])[c]++;
            }
        }
        for (int[] counts : perChunk.values()) {
            int n = Arrays.stream(counts).sum();
            for (int count : counts) {
                assertTrue(count * chunks <= n + 2 * chunks, n + " tokens: " + count);
            }
        }
    }

    @Property(tries = 200)
    void rows_anyRouting_countDistinctRanksOfEachToken(
            @ForAll @IntRange(min = 0, max = 40) int tokens,
            @ForAll @IntRange(min = 1, max = 5) int chunks,
            @ForAll @IntRange(min = 1, max = 9) int ranks,
            @ForAll @IntRange(min = 1, max = 8) int topK,
            @ForAll Random random) {
        int[] destinations = random.ints((long) tokens * topK, 0, ranks).toArray();
        ChunkSchedule schedule = ChunkSchedule.strided(tokens, chunks);
        long[][] expected = new long[chunks][ranks];
        for (int t = 0; t < tokens; t++) {
            Set<Integer> distinct = new HashSet<>();
            for (int j = 0; j < topK; j++) {
                distinct.add(destinations[t * topK + j]);
            }
            for (int d : distinct) {
                expected[t % chunks][d]++;
            }
        }
        assertArrayEquals(expected, schedule.rows(ranks, destinations));
    }

    @ParameterizedTest
    @EnumSource(DispatchWorkload.class)
    void automatic_allWorkloadsAtFullSize_withinTheBound(DispatchWorkload workload) {
        Group group = group(workload, 8, 128, 8, 10, 65_536);
        assertTrue(ChunkSchedule.withinBound(ChunkSchedule.received(group.automatic(10))));
        assertTrue(ChunkSchedule.withinBound(ChunkSchedule.received(group.dealt(10))));
    }

    @Property(tries = 400)
    void automatic_allWorkloadsAtAnySize_withinTheBound(
            @ForAll DispatchWorkload workload,
            @ForAll @IntRange(min = 0, max = 3) int logRanks,
            @ForAll @IntRange(min = 0, max = 3) int logTopK,
            @ForAll @IntRange(min = 0, max = 4) int logExpertsPerRank,
            @ForAll @IntRange(min = 1, max = 20) int chunks,
            @ForAll @IntRange(min = 0, max = 2000) int tokens,
            @ForAll @IntRange(min = 0, max = 2000) int lastTokens) {
        int ranks = 1 << logRanks;
        int[] all = new int[ranks];
        Arrays.fill(all, tokens);
        all[ranks - 1] = lastTokens;
        Group group = group(workload, ranks, ranks << logExpertsPerRank, 1 << logTopK, chunks, all);
        assertTrue(ChunkSchedule.withinBound(ChunkSchedule.received(group.automatic(chunks))));
        assertTrue(ChunkSchedule.withinBound(ChunkSchedule.received(group.dealt(chunks))));
    }

    /** Destinations that no planner has touched, with every period and mixture. */
    @Property(tries = 300)
    void dealt_periodicMixtures_withinTheBound(
            @ForAll @IntRange(min = 1, max = 64) int ranks,
            @ForAll @IntRange(min = 1, max = 8) int topK,
            @ForAll @IntRange(min = 1, max = 20) int chunks,
            @ForAll @IntRange(min = 0, max = 600) int tokens,
            @ForAll @IntRange(min = 1, max = 40) int period,
            @ForAll Random random) {
        int[] cycle = random.ints((long) period * topK, 0, ranks).toArray();
        long[][][] gathered = new long[ranks][][];
        for (int r = 0; r < ranks; r++) {
            int[] destinations = new int[tokens * topK];
            Arrays.setAll(destinations, i -> cycle[i % cycle.length]);
            gathered[r] =
                    ChunkSchedule.dealt(r, ranks, tokens, chunks, destinations)
                            .routes(ranks, destinations);
        }
        assertTrue(ChunkSchedule.withinBound(ChunkSchedule.received(gathered)));
    }

    @Test
    void strided_routingWithItsPeriod_isReplacedByDealing() {
        Group group = group(DispatchWorkload.PERIODIC, 8, 128, 8, 10, 65_536);
        long[][] strided = ChunkSchedule.received(group.strided(10));
        assertFalse(ChunkSchedule.withinBound(strided));
        assertEquals(Membership.DEALT, ChunkSchedule.choose(group.strided(10)));
        // Ten times the even share becomes the even share.
        long[][] dealt = ChunkSchedule.received(group.dealt(10));
        for (int d = 0; d < 8; d++) {
            for (int c = 0; c < 10; c++) {
                assertTrue(dealt[c][d] * 10 <= group.plan.received(d) * 1.01);
            }
        }
    }

    /**
     * So many patterns that hardly two tokens share one, and every K-th of the sorted tokens goes
     * to rank 19: dealt round without levelling, all of those meet in one chunk.
     */
    @Test
    void dealt_sortedTokensWithThePeriod_areLevelled() {
        int ranks = 20;
        int chunks = 8;
        int tokens = 4000;
        int[] destinations = new int[tokens * 6];
        for (int t = 0; t < tokens; t++) {
            int round = t / chunks;
            int last = t % chunks == 0 ? 19 : 10 + t % chunks;
            int[] pattern = {round / 64, round / 8 % 8, round % 8, last, last, last};
            System.arraycopy(pattern, 0, destinations, t * 6, 6);
        }
        long[][][] gathered = new long[ranks][][];
        for (int r = 0; r < ranks; r++) {
            gathered[r] =
                    ChunkSchedule.dealt(r, ranks, tokens, chunks, destinations)
                            .routes(ranks, destinations);
        }
        long[][] received = ChunkSchedule.received(gathered);
        for (long[] chunk : received) {
            assertTrue(chunk[19] * chunks <= ranks * 1500 * 1.1, Arrays.toString(chunk));
        }
    }

    @Test
    void contiguous_movingHotSet_pilesUpWhereStridedDoesNot() {
        Group group = group(DispatchWorkload.ROTATING, 8, 128, 8, 10, 65_536);
        assertFalse(ChunkSchedule.withinBound(ChunkSchedule.received(group.contiguous(10))));
        assertEquals(Membership.STRIDED, ChunkSchedule.choose(group.strided(10)));
    }

    @Test
    void choose_evenShareOfFewRoutes_ignoresUnevenness() {
        // Everything in one chunk, but no more than 1.5 * 256 routes.
        assertEquals(Membership.STRIDED, ChunkSchedule.choose(new long[][][] {{{384}, {0}}}));
        assertEquals(Membership.DEALT, ChunkSchedule.choose(new long[][][] {{{385}, {0}}}));
        // Above that the limit is 1.5 times the even share of 1000 routes, 750.
        assertEquals(Membership.STRIDED, ChunkSchedule.choose(new long[][][] {{{750}, {250}}}));
        assertEquals(Membership.DEALT, ChunkSchedule.choose(new long[][][] {{{751}, {249}}}));
    }

    @Test
    void schedules_badInput_nameTheFault() {
        assertMessage("in 0 chunks", () -> ChunkSchedule.strided(1, 0));
        assertMessage("-1 tokens", () -> ChunkSchedule.contiguous(-1, 1));
        assertMessage("in 0 chunks", () -> ChunkSchedule.dealt(0, 1, 0, 0, new int[0]));
        assertMessage("3 destinations", () -> ChunkSchedule.dealt(0, 1, 2, 1, new int[3]));
        assertMessage("rank 2: there are 2", () -> ChunkSchedule.dealt(0, 2, 1, 1, new int[] {2}));
        assertMessage("1 destinations", () -> ChunkSchedule.strided(0, 1).routes(1, new int[1]));
        assertMessage("at most 0", () -> ChunkSchedule.numChunks(1, 1, 0));
    }

    private static void assertMessage(String part, Runnable action) {
        String message = assertThrows(IllegalArgumentException.class, action::run).getMessage();
        assertTrue(message.contains(part), message);
    }

    private static Group group(
            DispatchWorkload workload, int ranks, int experts, int topK, int chunks, int tokens) {
        int[] all = new int[ranks];
        Arrays.fill(all, tokens);
        return group(workload, ranks, experts, topK, chunks, all);
    }

    private static Group group(
            DispatchWorkload workload, int ranks, int experts, int topK, int chunks, int[] all) {
        int[][] routing = new int[ranks][];
        for (int r = 0; r < ranks; r++) {
            routing[r] = workload.experts(all[r], topK, experts, ranks, chunks);
        }
        LeastLoadedPlanner planner =
                LeastLoadedPlanner.builder().setRanks(ranks).setExperts(experts).build();
        return new Group(planner, experts, topK, routing);
    }
}
