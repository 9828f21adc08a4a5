package org.djlmoe.dispatch;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import java.util.TreeMap;
import net.jqwik.api.Arbitraries;
import net.jqwik.api.Arbitrary;
import net.jqwik.api.Combinators;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.Provide;
import net.jqwik.api.constraints.IntRange;
import net.jqwik.api.constraints.LongRange;
import org.djlmoe.dispatch.DispatchPlan.Migration;
import org.djlmoe.dispatch.DispatchPlan.Piece;
import org.junit.jupiter.api.Test;

class LeastLoadedPlannerTest {

    /** Routing of a group: which expert each route of each rank goes to. */
    record Routing(int experts, int[][] routes) {

        int ranks() {
            return routes.length;
        }

        long[][] counts() {
            return Group.counts(experts, routes);
        }
    }

    /** Few or many experts, some without routes, ranks without tokens, skew of every degree. */
    @Provide
    Arbitrary<Routing> routings() {
        return Combinators.combine(
                        Arbitraries.integers().between(1, 9),
                        Arbitraries.integers().between(1, 24),
                        Arbitraries.integers().between(0, 200),
                        Arbitraries.integers().between(1, 4),
                        Arbitraries.randoms())
                .as(
                        (ranks, experts, most, skew, random) -> {
                            int[][] routes = new int[ranks][];
                            for (int r = 0; r < ranks; r++) {
                                routes[r] =
                                        random.doubles(random.nextInt(most + 1))
                                                .mapToInt(u -> (int) (Math.pow(u, skew) * experts))
                                                .toArray();
                            }
                            return new Routing(experts, routes);
                        });
    }

    @Property(tries = 500)
    void plan_anySettings_placesEachRouteOnceBelowCap(
            @ForAll("routings") Routing routing,
            @ForAll @IntRange(min = 10, max = 20) int alphaTenths,
            @ForAll @LongRange(min = 1, max = 300) long minPiece,
            @ForAll @IntRange(min = 1, max = 8) int maxForeign) {
        int ranks = routing.ranks();
        int experts = routing.experts();
        long[][] counts = routing.counts();
        LeastLoadedPlanner planner =
                always(ranks, experts)
                        .optAlpha(alphaTenths / 10.0)
                        .optMinPiece(minPiece)
                        .optMaxForeign(maxForeign)
                        .build();
        DispatchPlan plan = planner.plan(counts);

        long total = 0;
        long[] received = new long[ranks];
        for (int e = 0; e < experts; e++) {
            long end = 0;
            List<Integer> seen = new ArrayList<>();
            for (Piece piece : plan.pieces(e)) {
                assertEquals(end, piece.begin(), "intervals are adjacent");
                assertTrue(piece.end() > piece.begin());
                assertFalse(seen.contains(piece.rank()), "one interval a pair");
                seen.add(piece.rank());
                end = piece.end();
                received[piece.rank()] += piece.end() - piece.begin();
                assertEquals(piece.end() - piece.begin(), plan.amount(e, piece.rank()));
            }
            int expert = e;
            assertEquals(Arrays.stream(counts).mapToLong(c -> c[expert]).sum(), end);
            total += end;
        }
        assertEquals(total, plan.total());
        long cap = (total * alphaTenths + 10L * ranks - 1) / (10L * ranks);
        if (ranks > 1 && total > 0) {
            assertEquals(Math.min(cap, total), plan.cap());
        }
        for (int r = 0; r < ranks; r++) {
            assertEquals(received[r], plan.received(r));
            assertTrue(received[r] <= cap, received[r] + " above " + cap);
        }
        int perHome = (experts + ranks - 1) / ranks;
        assertTrue(plan.maxForeign() <= Math.max(maxForeign, perHome), plan::toString);
        assertEquals(plan, planner.plan(counts));
        assertEquals(plan.hashCode(), planner.plan(counts).hashCode());
    }

    @Property(tries = 500)
    void plan_anySettings_followsTheRuleWordByWord(
            @ForAll("routings") Routing routing,
            @ForAll @IntRange(min = 10, max = 20) int alphaTenths,
            @ForAll @LongRange(min = 1, max = 300) long minPiece) {
        int ranks = routing.ranks();
        long[][] counts = routing.counts();
        DispatchPlan plan =
                always(ranks, routing.experts())
                        .optAlpha(alphaTenths / 10.0)
                        .optMinPiece(minPiece)
                        .optMaxForeign(1000)
                        .build()
                        .plan(counts);
        long[] load = new long[routing.experts()];
        for (int e = 0; e < load.length; e++) {
            int expert = e;
            load[e] = Arrays.stream(counts).mapToLong(c -> c[expert]).sum();
        }
        assertEquals(NaivePlanner.plan(ranks, load, alphaTenths, minPiece), amounts(plan));
    }

    @Property(tries = 300)
    void destinations_anyRouting_followTheGlobalList(
            @ForAll("routings") Routing routing,
            @ForAll @IntRange(min = 1, max = 4) int maxForeign) {
        int ranks = routing.ranks();
        DispatchPlan plan =
                always(ranks, routing.experts())
                        .optMaxForeign(maxForeign)
                        .build()
                        .plan(routing.counts());
        long[] next = new long[routing.experts()];
        long[] received = new long[ranks];
        long[][][] sent = new long[routing.experts()][ranks][ranks];
        for (int s = 0; s < ranks; s++) {
            int[] destinations = plan.destinations(s, routing.routes()[s]);
            for (int i = 0; i < destinations.length; i++) {
                int e = routing.routes()[s][i];
                long at = next[e]++;
                int d = destinations[i];
                assertTrue(
                        plan.pieces(e).stream()
                                .anyMatch(p -> p.rank() == d && p.begin() <= at && at < p.end()));
                received[d]++;
                sent[e][s][d]++;
            }
        }
        for (int s = 0; s < ranks; s++) {
            assertEquals(received[s], plan.received(s));
            for (int d = 0; d < ranks; d++) {
                long sum = 0;
                for (int e = 0; e < routing.experts(); e++) {
                    assertEquals(sent[e][s][d], plan.sent(e, s, d));
                    sum += sent[e][s][d];
                }
                assertEquals(sum, plan.sent(s, d));
            }
        }
    }

    @Property(tries = 200)
    void migrations_anyRouting_serveExactlyTheForeignPieces(@ForAll("routings") Routing routing) {
        DispatchPlan plan =
                always(routing.ranks(), routing.experts()).build().plan(routing.counts());
        List<Migration> expected = new ArrayList<>();
        for (int e = 0; e < routing.experts(); e++) {
            for (Piece piece : plan.pieces(e)) {
                if (piece.rank() != plan.home(e)) {
                    expected.add(new Migration(e, plan.home(e), piece.rank()));
                }
            }
        }
        assertEquals(expected, plan.migrations());
        for (int r = 0; r < routing.ranks(); r++) {
            int rank = r;
            assertArrayEquals(
                    expected.stream()
                            .filter(m -> m.helper() == rank)
                            .mapToInt(Migration::expert)
                            .toArray(),
                    plan.foreignExperts(r));
        }
    }

    /** Who holds the tokens does not matter, only whose experts they go to. */
    @Property(tries = 200)
    void plan_sendersShuffled_movesTheSameAmounts(
            @ForAll("routings") Routing routing, @ForAll Random random) {
        LeastLoadedPlanner planner = always(routing.ranks(), routing.experts()).build();
        List<long[]> rows = new ArrayList<>(List.of(routing.counts()));
        Collections.shuffle(rows, random);
        assertEquals(
                amounts(planner.plan(routing.counts())),
                amounts(planner.plan(rows.toArray(new long[0][]))));
    }

    /** Ranks are alike: relabelled with their experts they get the same, where nothing ties. */
    @Property(tries = 200, seed = "7")
    void plan_ranksRelabelledWithTheirExperts_isRelabelled(
            @ForAll @IntRange(min = 2, max = 8) int ranks,
            @ForAll @IntRange(min = 1, max = 5) int perRank,
            @ForAll @IntRange(min = 1, max = 4) int skew,
            @ForAll Random random) {
        int experts = ranks * perRank;
        long[] load =
                random.doubles(experts).mapToLong(u -> (long) (1e12 * Math.pow(u, skew))).toArray();
        List<Integer> label = new ArrayList<>();
        for (int r = 0; r < ranks; r++) {
            label.add(r);
        }
        Collections.shuffle(label, random);
        long[] relabelled = new long[experts];
        for (int e = 0; e < experts; e++) {
            relabelled[label.get(e / perRank) * perRank + e % perRank] = load[e];
        }
        LeastLoadedPlanner planner = always(ranks, experts).optAlpha(1.25).build();
        DispatchPlan plan = planner.plan(oneSender(ranks, load));
        DispatchPlan other = planner.plan(oneSender(ranks, relabelled));
        for (int e = 0; e < experts; e++) {
            int e2 = label.get(e / perRank) * perRank + e % perRank;
            for (int r = 0; r < ranks; r++) {
                assertEquals(plan.amount(e, r), other.amount(e2, label.get(r)));
            }
        }
    }

    @Test
    void plan_tiedLoads_takesLowerExpertAndLowerRankFirst() {
        // Experts 0 and 1 of rank 0 tie: expert 0 leaves. Ranks 1 and 2 tie: rank 1 takes it.
        DispatchPlan plan = always(3, 6).build().plan(oneSender(3, 6, 6, 0, 0, 0, 0));
        assertEquals(4, plan.cap());
        assertEquals(List.of(new Piece(1, 0, 4), new Piece(2, 4, 6)), plan.pieces(0));
        assertEquals(List.of(new Piece(0, 0, 4), new Piece(2, 4, 6)), plan.pieces(1));
    }

    @Test
    void plan_everythingToOneExpert_isSharedEvenly() {
        for (long minPiece : new long[] {1, 64, 1024}) {
            DispatchPlan plan =
                    always(4, 8)
                            .optMinPiece(minPiece)
                            .build()
                            .plan(oneSender(4, 0, 0, 0, 10, 0, 0, 0, 0));
            assertEquals(3, plan.cap());
            // Home first, then in the order in which the parts were given.
            assertEquals(
                    List.of(
                            new Piece(1, 0, 3),
                            new Piece(0, 3, 6),
                            new Piece(2, 6, 9),
                            new Piece(3, 9, 10)),
                    plan.pieces(3));
        }
    }

    @Test
    void plan_largePieceLimitOnSmallRooms_staysBelowCap() {
        // With the published fallback the rest would go to one rank, far above the mean.
        DispatchPlan plan =
                always(8, 8)
                        .optMinPiece(1_000_000)
                        .build()
                        .plan(oneSender(8, 800, 0, 0, 0, 0, 0, 0, 0));
        for (int r = 0; r < 8; r++) {
            assertEquals(100, plan.received(r));
        }
    }

    /** Two homes are over, one is under: it would have to take from both. */
    @Test
    void plan_foreignLimitAgainstCap_pairsRanksAndKeepsBoth() {
        long[][] counts = oneSender(3, 11, 11, 2);
        DispatchPlan wide = always(3, 3).optMaxForeign(2).build().plan(counts);
        assertArrayEquals(new int[] {0, 1}, wide.foreignExperts(2));
        DispatchPlan narrow = always(3, 3).build().plan(counts);
        assertEquals(1, narrow.maxForeign());
        assertEquals(List.of(new Piece(0, 0, 5), new Piece(2, 5, 11)), narrow.pieces(0));
        assertEquals(List.of(new Piece(1, 0, 8), new Piece(0, 8, 11)), narrow.pieces(1));
        assertEquals(List.of(new Piece(2, 0, 2)), narrow.pieces(2));
    }

    /** Half of eight equal experts must leave rank 0, and there is only rank 1. */
    @Test
    void plan_foreignLimitThatCapForbids_isExceeded() {
        long[] load = new long[16];
        Arrays.fill(load, 0, 8, 2);
        DispatchPlan plan = always(2, 16).optMaxForeign(1).build().plan(oneSender(2, load));
        assertEquals(8, plan.received(0));
        assertEquals(8, plan.received(1));
        assertEquals(4, plan.maxForeign());
    }

    @Test
    void plan_loadsBelowLambda_movesNothing() {
        LeastLoadedPlanner planner =
                LeastLoadedPlanner.builder().setRanks(2).setExperts(2).optLambda(1.1).build();
        long[][] below = {{1099, 0}, {0, 901}};
        assertTrue(planner.plan(below).isIdentity());
        assertEquals(DispatchPlan.identity(below), planner.plan(below));
        assertEquals(1099, planner.plan(below).cap());
        assertEquals(List.of(), planner.plan(below).migrations());
        // At lambda times the mean exactly, which 1.1 in binary just misses.
        DispatchPlan at = planner.plan(new long[][] {{11, 0}, {0, 9}});
        assertFalse(at.isIdentity());
        assertEquals(10, at.received(0));
    }

    @Test
    void plan_infiniteLambda_movesNothing() {
        LeastLoadedPlanner planner =
                LeastLoadedPlanner.builder()
                        .setRanks(2)
                        .setExperts(2)
                        .optLambda(Double.POSITIVE_INFINITY)
                        .build();
        assertTrue(planner.plan(oneSender(2, 9, 0)).isIdentity());
    }

    @Test
    void plan_alphaInDecimals_givesTheExactCap() {
        // 1.1 * 100 / 10 is 11, not 11.000000000000002 rounded up.
        long[] load = new long[10];
        load[0] = 100;
        assertEquals(11, always(10, 10).optAlpha(1.1).build().plan(oneSender(10, load)).cap());
    }

    @Test
    void plan_noRoutes_isEmpty() {
        DispatchPlan plan = always(3, 5).build().plan(new long[3][5]);
        assertTrue(plan.isIdentity());
        assertEquals(0, plan.total());
        assertEquals(0, plan.cap());
        assertArrayEquals(new int[0], plan.destinations(1, new int[0]));
        for (int e = 0; e < 5; e++) {
            assertEquals(List.of(), plan.pieces(e));
        }
    }

    @Test
    void plan_oneRank_keepsEverything() {
        DispatchPlan plan = always(1, 4).build().plan(oneSender(1, 7, 0, 0, 1));
        assertTrue(plan.isIdentity());
        assertEquals(8, plan.received(0));
        assertArrayEquals(
                new int[] {0, 0}, alwaysPlan(1, 2, 1, 1).destinations(0, new int[] {1, 0}));
    }

    @Test
    void plan_moreRanksThanExperts_usesAllRanks() {
        DispatchPlan plan = always(8, 2).build().plan(oneSender(8, 40, 40));
        assertEquals(0, plan.home(0));
        assertEquals(4, plan.home(1));
        for (int r = 0; r < 8; r++) {
            assertEquals(10, plan.received(r));
        }
        assertEquals(1, plan.maxForeign());
    }

    @Test
    void home_ranksThatDoNotDivideExperts_spreadsThem() {
        int[] homes = new int[8];
        for (int e = 0; e < 8; e++) {
            homes[e] = DispatchPlan.home(e, 3, 8);
        }
        assertArrayEquals(new int[] {0, 0, 0, 1, 1, 1, 2, 2}, homes);
    }

    @Test
    void plan_countsChangedLater_isUnchanged() {
        long[][] counts = oneSender(2, 6, 0);
        DispatchPlan plan = always(2, 2).build().plan(counts);
        counts[0][0] = 99;
        plan.foreignExperts(1)[0] = 99;
        assertArrayEquals(new int[] {0}, plan.foreignExperts(1));
        assertArrayEquals(
                new int[] {0, 0, 0, 1, 1, 1}, plan.destinations(0, new int[] {0, 0, 0, 0, 0, 0}));
    }

    @Test
    void toString_movedLoad_drawsBothSides() {
        String expected =
                """
                8 routes to 4 experts on 2 ranks; cap 4, migrations: 1, at most 1 to a rank
                rank  at home                             planned
                   0  ################################ 8  ################                 4
                   1                                   0  ################                 4
                """;
        DispatchPlan plan = always(2, 4).build().plan(oneSender(2, 3, 5, 0, 0));
        assertEquals(expected, plan.toString().replace(System.lineSeparator(), "\n"));
        assertTrue(
                DispatchPlan.identity(oneSender(2, 3, 5, 0, 0))
                        .toString()
                        .contains("every expert stays at home"));
    }

    @Test
    void builder_badSettings_areRefused() {
        assertMessage("ranks is 0", () -> LeastLoadedPlanner.builder().setExperts(1).build());
        assertMessage("experts is 0", () -> LeastLoadedPlanner.builder().setRanks(1).build());
        assertMessage("alpha is 0.99", () -> always(1, 1).optAlpha(0.99).build());
        assertMessage("alpha is NaN", () -> always(1, 1).optAlpha(Double.NaN).build());
        assertMessage("lambda is NaN", () -> always(1, 1).optLambda(Double.NaN).build());
        assertMessage("lambda is -1", () -> always(1, 1).optLambda(-1).build());
        assertMessage("minPiece is 0", () -> always(1, 1).optMinPiece(0).build());
        // Zero is not "not given".
        assertMessage("maxForeign is 0", () -> always(1, 1).optMaxForeign(0));
    }

    @Test
    void plan_badCounts_areRefused() {
        LeastLoadedPlanner planner = always(2, 2).build();
        assertMessage("[1][2]", () -> planner.plan(new long[1][2]));
        assertMessage("[2][3]", () -> planner.plan(new long[2][3]));
        assertMessage("empty", () -> planner.plan(new long[0][]));
        assertMessage("rank 1 name 1", () -> planner.plan(new long[][] {{0, 0}, {0}}));
        assertMessage("-1 routes for expert 1", () -> planner.plan(new long[][] {{0, -1}, {0, 0}}));
        assertMessage("add up", () -> planner.plan(new long[][] {{Long.MAX_VALUE, 0}, {1, 0}}));
    }

    @Test
    void destinations_routesThatWereNotCounted_areRefused() {
        DispatchPlan plan = alwaysPlan(2, 2, 2, 1);
        assertMessage("expert 2: there are 2", () -> plan.destinations(0, new int[] {2}));
        assertMessage("expert -1", () -> plan.destinations(0, new int[] {-1}));
        assertMessage(
                "rank 0 has 1 routes for expert 0, the plan was made for 2",
                () -> plan.destinations(0, new int[] {0, 1}));
    }

    private static void assertMessage(String part, Runnable action) {
        String message = assertThrows(IllegalArgumentException.class, action::run).getMessage();
        assertTrue(message.contains(part), message);
    }

    private static LeastLoadedPlanner.Builder always(int ranks, int experts) {
        return LeastLoadedPlanner.builder().setRanks(ranks).setExperts(experts).optLambda(0);
    }

    private static DispatchPlan alwaysPlan(int ranks, int experts, long... load) {
        return always(ranks, experts).build().plan(oneSender(ranks, load));
    }

    private static long[][] oneSender(int ranks, long... load) {
        long[][] counts = new long[ranks][load.length];
        counts[0] = load.clone();
        return counts;
    }

    private static List<TreeMap<Integer, Long>> amounts(DispatchPlan plan) {
        List<TreeMap<Integer, Long>> amounts = new ArrayList<>();
        for (int e = 0; e < plan.numExperts(); e++) {
            TreeMap<Integer, Long> parts = new TreeMap<>();
            plan.pieces(e).forEach(p -> parts.put(p.rank(), p.end() - p.begin()));
            amounts.add(parts);
        }
        return amounts;
    }
}
