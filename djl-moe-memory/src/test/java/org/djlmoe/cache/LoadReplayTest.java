package org.djlmoe.cache;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.SplittableRandom;
import java.util.stream.IntStream;
import net.jqwik.api.Arbitraries;
import net.jqwik.api.Arbitrary;
import net.jqwik.api.Combinators;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.Provide;
import org.djlmoe.cache.EvictionPolicy.Admission;
import org.djlmoe.cache.EvictionPolicy.Type;
import org.djlmoe.routing.ExpertMask;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class LoadReplayTest {

    /** A router without preference needs k (1 - C/E) loads, whatever the policy remembers. */
    @ParameterizedTest
    @CsvSource({"8,2,4", "64,6,12"})
    void run_uniformRouter_loadsAsExpected(int experts, int k, int capacity) {
        ExpertTrace trace = uniform(ExpertMask.all(1, experts), k, 21_000, 7);
        double expected = k * (1 - (double) capacity / experts);
        for (ReplayResult r : onlinePolicies(trace, capacity, 1_000)) {
            assertEquals(expected, r.loadsPerToken(), 0.01 * expected, r.toString());
            assertEquals(20_000, r.tokens());
            assertFalse(r.startedCold());
        }
    }

    /** A hard mask of three quarters is the same router over fewer experts: -33.3 %, -7.7 %. */
    @ParameterizedTest
    @CsvSource({"8,2,4,-0.333", "64,6,12,-0.077"})
    void run_hardMaskOf75Percent_loadsAsExpected(int experts, int k, int capacity, double cut) {
        int kept = experts * 3 / 4;
        ExpertTrace trace = uniform(ExpertMask.random(1, experts, kept, 5), k, 21_000, 8);
        double expected = k * (1 - (double) capacity / kept);
        double unmasked = k * (1 - (double) capacity / experts);
        assertEquals(cut, expected / unmasked - 1, 1e-3);
        for (ReplayResult r : onlinePolicies(trace, capacity, 1_000)) {
            assertEquals(expected, r.loadsPerToken(), 0.01 * expected, r.toString());
        }
    }

    /**
     * Asked for one by one, {0,1} after {1,2} would let 0 evict 1 under LRU before 1 is hit: 2
     * loads. A whole token finds 1 resident.
     */
    @Test
    void run_wholeToken_expertsOfOneTokenDoNotEvictOneAnother() {
        ExpertTrace trace = trace(3, 2, new int[][] {{1, 2}, {0, 1}, {1, 2}, {0, 1}});
        for (Type type : List.of(Type.LRU, Type.LFU, Type.FIFO, Type.RANDOM, Type.BELADY)) {
            ReplayResult r = LoadReplay.builder().setCapacity(2).build().run(trace, type);
            assertEquals(List.of(5L), r.misses(), r.toString());
        }
    }

    @Test
    void run_knownTrace_eachPolicyEvictsItsOwnVictim() {
        // After 0 0 0 1 1 2 with C = 3, expert 3 comes and somebody leaves.
        int[][] head = {{0}, {0}, {0}, {1}, {1}, {2}, {3}};
        assertEvicted(head, Type.LRU, 0);
        assertEvicted(head, Type.FIFO, 0);
        assertEvicted(head, Type.LFU, 2);
        assertEvicted(head, Type.LFU_LIFETIME, 2);
        // 0.5^6 + 0.5^5 + 0.5^4 < 0.5^3 + 0.5^2 and < 0.5: gamma = 0.5 forgets fast.
        assertEvicted(head, Type.DISCOUNTED, 0);
    }

    /** In-cache counts are forgotten on eviction, lifetime counts are not. */
    @Test
    void run_returningExpert_onlyLifetimeCountsRemember() {
        int[][] tokens = {{0}, {0}, {0}, {1}, {1}, {2}, {1}, {1}, {2}, {2}, {0}, {2}};
        // LFU: 2 evicts 1; 1 evicts 2; 1 hit (2); 2 evicts 1; hit 2; hit 0; hit 2. Loads 0 1 2 1 2.
        assertEquals(5, loads(tokens, 3, 2, Type.LFU));
        // Lifetime: 2 evicts 1 (2 < 3); 1 evicts 2; 1 has 4; 2 evicts 0 (3 < 4); hit 2 (3);
        // 0 (4) evicts 2 (3); 2 (4) against 0 (4) and 1 (4), lower id 0 leaves. Loads 0 1 2 1 2 0
        // 2.
        assertEquals(7, loads(tokens, 3, 2, Type.LFU_LIFETIME));
    }

    @Test
    void run_static_membersStayOthersPass() {
        int[][] tokens = {{0}, {1}, {2}, {0}, {1}, {3}, {0}, {1}};
        ExpertTrace trace = trace(4, 1, tokens);
        ExpertMask set = ExpertMask.of(new boolean[][] {{true, true, false, false}});
        LoadReplay.Builder b = LoadReplay.builder().setCapacity(2).optStaticSet(set);
        // With a staging buffer only 2 and 3 are ever loaded after 0 and 1.
        ReplayResult streamed = b.optAdmission(Admission.OPTIONAL).build().run(trace, Type.STATIC);
        assertEquals(List.of(4L), streamed.misses());
        // In two slots 2 takes a member's place: 0 (older), then 0 takes 2's; 3 does the same.
        ReplayResult inSlots = b.optAdmission(Admission.ALWAYS).build().run(trace, Type.STATIC);
        assertEquals(List.of(6L), inSlots.misses());
        ReplayResult warm =
                b.optAdmission(Admission.OPTIONAL)
                        .optInitialResidents(set)
                        .build()
                        .run(trace, Type.STATIC);
        assertEquals(List.of(2L), warm.misses());
        assertFalse(warm.startedCold());
    }

    @Test
    void run_resetPerRequest_eachRequestPaysForItsFirstUses() {
        ExpertTrace.Builder b = ExpertTrace.builder().setNumExperts(4).setTopK(2).setNumLayers(1);
        for (int i = 0; i < 3; i++) {
            b.beginRequest().append(0, 0, 1, 0, 1);
        }
        ExpertTrace trace = b.build();
        LoadReplay.Builder settings = LoadReplay.builder().setCapacity(3);
        for (Type type : List.of(Type.LRU, Type.BELADY, Type.RANDOM)) {
            ReplayResult kept = settings.optResetPerRequest(false).build().run(trace, type);
            assertEquals(List.of(2L), kept.misses());
            assertTrue(kept.startedCold());
            ReplayResult reset = settings.optResetPerRequest(true).build().run(trace, type);
            assertEquals(List.of(6L), reset.misses());
            assertEquals(1.0, reset.loadsPerToken());
            assertEquals(0.5, reset.hitRate());
        }
    }

    @Test
    void run_severalLayers_figuresPerLayerAddUp() {
        ExpertTrace trace =
                ExpertTrace.builder()
                        .setNumExperts(3)
                        .setTopK(1)
                        .setNumLayers(2)
                        .beginRequest()
                        .append(0, 0, 0, 0, 0)
                        .append(1, 0, 1, 2, 0)
                        .build();
        ReplayResult r = LoadReplay.builder().setCapacity(1).build().run(trace, Type.LRU);
        assertEquals(0.25, r.loadsPerToken(0));
        assertEquals(1.0, r.loadsPerToken(1));
        assertEquals(1.25, r.loadsPerToken());
        assertEquals(0.375, r.hitRate());
        assertEquals(0.75, r.hitRate(0));
        assertTrue(r.toString().contains("1.250 loads/token"), r.toString());
        assertTrue(r.toString().contains("cold start"), r.toString());
    }

    @Test
    void run_wholeLayerFits_onlyFirstUsesLoad() {
        ExpertTrace trace = uniform(ExpertMask.all(2, 8), 2, 500, 1);
        for (Type type : Type.values()) {
            LoadReplay replay =
                    LoadReplay.builder().setCapacity(99).optStaticSet(ExpertMask.all(2, 8)).build();
            assertEquals(List.of(8L, 8L), replay.run(trace, type).misses());
        }
    }

    @Test
    void run_randomPolicy_oneSeedOneResult() {
        ExpertTrace trace = uniform(ExpertMask.all(2, 8), 2, 2_000, 1);
        LoadReplay.Builder b = LoadReplay.builder().setCapacity(3);
        ReplayResult first = b.optSeed(1).build().run(trace, Type.RANDOM);
        assertEquals(first, b.optSeed(1).build().run(trace, Type.RANDOM));
        assertFalse(first.misses().equals(b.optSeed(2).build().run(trace, Type.RANDOM).misses()));
    }

    @Test
    void run_capacityBelowTopK_isRefused() {
        ExpertTrace trace = trace(4, 2, new int[][] {{0, 1}});
        LoadReplay replay = LoadReplay.builder().setCapacity(1).build();
        String message =
                assertThrows(IllegalArgumentException.class, () -> replay.run(trace, Type.LRU))
                        .getMessage();
        assertTrue(message.contains("capacity of at least 2"), message);
    }

    @Test
    void run_badSettings_areRefused() {
        ExpertTrace trace = trace(4, 2, new int[][] {{0, 1}});
        LoadReplay.Builder b = LoadReplay.builder().setCapacity(2);
        assertRefused(() -> b.build().run(trace, Type.STATIC), "optStaticSet");
        assertRefused(() -> b.optWarmUpTokens(1).build().run(trace, Type.LRU), "warm-up");
        b.optWarmUpTokens(0);
        assertRefused(
                () -> b.optStaticSet(ExpertMask.all(1, 4)).build().run(trace, Type.STATIC),
                "more than the capacity");
        assertRefused(
                () -> b.optStaticSet(ExpertMask.all(2, 4)).build().run(trace, Type.STATIC),
                "the trace has 1 of 4");
        assertRefused(() -> LoadReplay.builder().build(), "capacity");
        assertRefused(() -> LoadReplay.builder().setCapacity(2).optGamma(0).build(), "gamma");
        assertRefused(() -> Type.of("mru"), "lfu_lifetime");
        assertEquals(Type.LFU_LIFETIME, Type.of("lfu_lifetime"));
    }

    /**
     * When 2 comes, 0 has the nearer counted use, but comes back for nothing before it counts: the
     * one to keep is 1.
     */
    @Test
    void belady_warmUpTokens_minimisesWhatIsCounted() {
        ExpertTrace trace = trace(3, 1, new int[][] {{0}, {1}, {2}, {0}, {0}, {1}});
        LoadReplay replay = LoadReplay.builder().setCapacity(2).optWarmUpTokens(4).build();
        assertEquals(List.of(0L), replay.run(trace, Type.BELADY).misses());
    }

    /** No policy, and no sequence of evictions at all, loads less than Belady's. */
    @Property(tries = 3000)
    void belady_tinyTrace_equalsBruteForce(@ForAll("tiny") Case c) {
        assertEquals(c.bruteForce(), c.replay(Type.BELADY), c::toString);
    }

    @Property(tries = 500)
    void belady_anyTrace_loadsAtMostWhatAnyPolicyLoads(@ForAll("skewed") Case c) {
        long bound = c.replay(Type.BELADY);
        for (Type type : Type.values()) {
            assertTrue(bound <= c.replay(type), () -> type + " beats Belady: " + c);
        }
    }

    /** A staging buffer only adds choices. */
    @Property(tries = 100)
    void belady_optionalAdmission_isNoWorse(@ForAll("skewed") Case c) {
        assertTrue(
                c.with(Admission.OPTIONAL).replay(Type.BELADY)
                        <= c.with(Admission.ALWAYS).replay(Type.BELADY));
    }

    @Property(tries = 100)
    void cache_anyTrace_keepsItsInvariants(@ForAll("skewed") Case c) {
        ExpertTrace t = c.trace;
        for (Type type : List.of(Type.LRU, Type.LFU_LIFETIME, Type.FIFO, Type.RANDOM)) {
            EvictionPolicy policy =
                    switch (type) {
                        case LRU -> EvictionPolicy.lru(t.numExperts());
                        case LFU_LIFETIME -> EvictionPolicy.lfuLifetime(t.numExperts());
                        case FIFO -> EvictionPolicy.fifo(t.numExperts());
                        default -> EvictionPolicy.random(3);
                    };
            ExpertCache cache =
                    new ExpertCache(t.numExperts(), t.topK(), c.capacity, policy, c.admission);
            int[] ids = new int[t.topK()];
            for (int token = 0; token < t.tokens(); token++) {
                List<Integer> before = boxed(cache.residents());
                t.experts(0, token, ids);
                int misses = cache.request(ids, 0, ids.length);
                List<Integer> after = boxed(cache.residents());
                List<Integer> expected = new ArrayList<>(before);
                expected.addAll(boxed(cache.loads()));
                expected.removeAll(boxed(cache.evictions()));
                expected.sort(null);
                assertEquals(expected, after);
                assertEquals(Arrays.stream(ids).filter(e -> !before.contains(e)).count(), misses);
                assertTrue(after.size() <= c.capacity);
                if (c.admission == Admission.ALWAYS) {
                    assertTrue(after.containsAll(boxed(ids)));
                }
            }
        }
    }

    /** gamma = 1 forgets nothing; the scaling of small gammas changes no choice. */
    @Property(tries = 50)
    void discounted_gammaOne_isLifetimeFrequency(@ForAll("skewed") Case c) {
        LoadReplay replay =
                LoadReplay.builder()
                        .setCapacity(c.capacity)
                        .optAdmission(c.admission)
                        .optGamma(1)
                        .build();
        assertEquals(
                replay.run(c.trace, Type.LFU_LIFETIME).misses(),
                replay.run(c.trace, Type.DISCOUNTED).misses());
    }

    /**
     * Below 1/2 a single newer use outweighs all older ones: least recently used, long after 2^500.
     */
    @Test
    void discounted_gammaBelowHalf_isLru() {
        ExpertTrace trace = uniform(ExpertMask.all(1, 16), 1, 5_000, 3);
        LoadReplay replay = LoadReplay.builder().setCapacity(5).optGamma(0.4).build();
        assertEquals(
                replay.run(trace, Type.LRU).misses(), replay.run(trace, Type.DISCOUNTED).misses());
    }

    @Test
    void cache_preload_isNoLoadButOccupies() {
        ExpertCache cache = new ExpertCache(4, 2, 2, EvictionPolicy.lru(4), Admission.ALWAYS);
        cache.preload(1, 3);
        assertEquals(1, cache.request(new int[] {0, 3}, 0, 2));
        assertArrayEquals(new int[] {0}, cache.loads());
        assertArrayEquals(new int[] {1}, cache.evictions());
        assertTrue(cache.isResident(3));
        assertRefused(() -> cache.preload(2), "free slots");
        assertRefused(() -> cache.request(new int[] {3, 3}, 0, 2), "twice");
        assertRefused(() -> cache.request(new int[] {1, 2, 3}, 0, 3), "top-2");
    }

    @Provide
    Arbitrary<Case> tiny() {
        return cases(5, 8, 3);
    }

    @Provide
    Arbitrary<Case> skewed() {
        return cases(12, 120, 6);
    }

    private static Arbitrary<Case> cases(int maxExperts, int maxTokens, int maxCapacity) {
        return Combinators.combine(
                        Arbitraries.integers().between(2, maxExperts),
                        Arbitraries.integers().between(1, maxTokens),
                        Arbitraries.integers().between(1, maxCapacity),
                        Arbitraries.of(Admission.class),
                        Arbitraries.of(0.0, 1.0, 2.5),
                        Arbitraries.integers().between(0, 3),
                        Arbitraries.of(true, false),
                        Arbitraries.longs())
                .as(LoadReplayTest::newCase);
    }

    private static Case newCase(
            int experts,
            int tokens,
            int capacity,
            Admission admission,
            double skew,
            int warmUp,
            boolean reset,
            long seed) {
        SplittableRandom random = new SplittableRandom(seed);
        int k = random.nextInt(1, Math.min(experts, capacity) + 1);
        ExpertTrace.Builder b =
                ExpertTrace.builder().setNumExperts(experts).setTopK(k).setNumLayers(1);
        int requests = random.nextInt(1, 3);
        for (int r = 0; r < requests; r++) {
            b.beginRequest();
            int n = Math.max(1, tokens / requests);
            for (int t = 0; t < n; t++) {
                b.append(0, draw(random, experts, k, skew));
            }
        }
        ExpertTrace trace = b.build();
        // At least one token is counted, in the reset case as well.
        int free = Math.min(warmUp, trace.requests().get(0).tokens() - 1);
        ExpertMask set = ExpertMask.random(1, experts, Math.min(experts, capacity), seed);
        return new Case(trace, capacity, admission, free, reset, set, random.nextBoolean());
    }

    private record Case(
            ExpertTrace trace,
            int capacity,
            Admission admission,
            int warmUp,
            boolean reset,
            ExpertMask set,
            boolean preloaded) {

        Case with(Admission other) {
            return new Case(trace, capacity, other, warmUp, reset, set, preloaded);
        }

        long replay(Type type) {
            return LoadReplay.builder()
                    .setCapacity(capacity)
                    .optAdmission(admission)
                    .optWarmUpTokens(warmUp)
                    .optResetPerRequest(reset)
                    .optStaticSet(set)
                    .optInitialResidents(preloaded ? set : null)
                    .build()
                    .run(trace, type)
                    .misses()
                    .get(0);
        }

        /** The least loads over every sequence of resident sets. */
        long bruteForce() {
            long sum = 0;
            int start = 0;
            for (int e : preloaded ? set.experts(0) : new int[0]) {
                start |= 1 << e;
            }
            List<ExpertTrace.Request> spans =
                    reset ? trace.requests() : List.of(new ExpertTrace.Request(0, trace.tokens()));
            for (ExpertTrace.Request span : spans) {
                int states = 1 << trace.numExperts();
                int[] cost = new int[states];
                Arrays.fill(cost, Integer.MAX_VALUE);
                cost[start] = 0;
                for (int i = 0; i < span.tokens(); i++) {
                    int asked = 0;
                    for (int j = 0; j < trace.topK(); j++) {
                        asked |= 1 << trace.expert(0, span.firstToken() + i, j);
                    }
                    int[] after = new int[states];
                    Arrays.fill(after, Integer.MAX_VALUE);
                    for (int s = 0; s < states; s++) {
                        if (cost[s] == Integer.MAX_VALUE) {
                            continue;
                        }
                        int paid = cost[s] + (i < warmUp ? 0 : Integer.bitCount(asked & ~s));
                        for (int t = 0; t < states; t++) {
                            boolean reachable =
                                    (t & ~(s | asked)) == 0
                                            && Integer.bitCount(t) <= capacity
                                            && (admission == Admission.OPTIONAL
                                                    || (asked & ~t) == 0);
                            if (reachable) {
                                after[t] = Math.min(after[t], paid);
                            }
                        }
                    }
                    cost = after;
                }
                sum += Arrays.stream(cost).min().orElseThrow();
            }
            return sum;
        }
    }

    /** Every policy but Belady, with a static set that knows nothing of the trace. */
    private static List<ReplayResult> onlinePolicies(ExpertTrace trace, int capacity, int warmUp) {
        int[] used =
                IntStream.range(0, trace.numExperts())
                        .filter(e -> trace.usage()[0][e] > 0)
                        .toArray();
        boolean[][] set = new boolean[1][trace.numExperts()];
        Arrays.stream(used).limit(capacity).forEach(e -> set[0][e] = true);
        return LoadReplay.builder()
                .setCapacity(capacity)
                .optWarmUpTokens(warmUp)
                .optStaticSet(ExpertMask.of(set))
                .build()
                .run(trace, Arrays.stream(Type.values()).filter(t -> t != Type.BELADY).toList());
    }

    private static ExpertTrace uniform(ExpertMask mask, int k, int tokens, long seed) {
        SplittableRandom random = new SplittableRandom(seed);
        ExpertTrace.Builder b =
                ExpertTrace.builder()
                        .setNumExperts(mask.numExperts())
                        .setTopK(k)
                        .setNumLayers(mask.numLayers())
                        .beginRequest();
        for (int l = 0; l < mask.numLayers(); l++) {
            int[] kept = mask.experts(l);
            for (int t = 0; t < tokens; t++) {
                int[] ids = draw(random, kept.length, k, 0);
                b.append(l, Arrays.stream(ids).map(i -> kept[i]).toArray());
            }
        }
        return b.build();
    }

    /** Draws k distinct ids with weights (id + 1)^-skew. */
    private static int[] draw(SplittableRandom random, int experts, int k, double skew) {
        double[] weight = new double[experts];
        Arrays.setAll(weight, e -> Math.pow(e + 1, -skew));
        int[] ids = new int[k];
        for (int i = 0; i < k; i++) {
            double u = random.nextDouble() * Arrays.stream(weight).sum();
            int e = 0;
            while (weight[e] == 0 || (u -= weight[e]) >= 0) {
                e = (e + 1) % experts;
            }
            ids[i] = e;
            weight[e] = 0;
        }
        return ids;
    }

    private static ExpertTrace trace(int experts, int k, int[][] tokens) {
        ExpertTrace.Builder b =
                ExpertTrace.builder()
                        .setNumExperts(experts)
                        .setTopK(k)
                        .setNumLayers(1)
                        .beginRequest();
        for (int[] ids : tokens) {
            b.append(0, ids);
        }
        return b.build();
    }

    private static long loads(int[][] tokens, int experts, int capacity, Type type) {
        return LoadReplay.builder()
                .setCapacity(capacity)
                .build()
                .run(trace(experts, tokens[0].length, tokens), type)
                .misses()
                .get(0);
    }

    /** The last token evicts exactly this expert: asking for it once more is one more load. */
    private static void assertEvicted(int[][] head, Type type, int expected) {
        for (int e = 0; e < 3; e++) {
            int[][] tokens = Arrays.copyOf(head, head.length + 1);
            tokens[head.length] = new int[] {e};
            long loads =
                    LoadReplay.builder()
                            .setCapacity(3)
                            .optGamma(0.5)
                            .build()
                            .run(trace(4, 1, tokens), type)
                            .misses()
                            .get(0);
            assertEquals(e == expected ? 5 : 4, loads, type + ", expert " + e);
        }
    }

    private static List<Integer> boxed(int[] ids) {
        return Arrays.stream(ids).boxed().toList();
    }

    private static void assertRefused(Runnable call, String word) {
        String message = assertThrows(IllegalArgumentException.class, call::run).getMessage();
        assertTrue(message.contains(word), message);
    }
}
