package org.djlmoe.cache;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.Random;
import java.util.stream.IntStream;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.routing.SelectionPrior;
import org.junit.jupiter.api.Test;

class CachePriorTest {

    private static final int EXPERTS = 6;

    private static ExpertCache lru(int topK, int capacity) {
        return new ExpertCache(
                EXPERTS,
                topK,
                capacity,
                EvictionPolicy.lru(EXPERTS),
                EvictionPolicy.Admission.ALWAYS);
    }

    private static double[] logits(Random random) {
        return random.doubles(EXPERTS).map(v -> Math.rint(40 * v) / 10).toArray();
    }

    /** Selection by full sorts, the cache as a list with the least recently used first. */
    @Property(tries = 60, seed = "3")
    void select_anyTokens_asSortingAndAnLruListWould(
            @ForAll int seed,
            @ForAll @IntRange(min = 1, max = 3) int k,
            @ForAll @IntRange(min = 3, max = 5) int capacity,
            @ForAll @IntRange(min = 0, max = 2) int protect) {
        Random random = new Random(seed);
        double lambda = random.nextInt(3) * 0.25;
        double[] added = random.doubles(EXPERTS).map(v -> v < 0.5 ? 0 : 1).toArray();
        CachePrior prior = new CachePrior(lru(k, capacity), lambda, 2.5, protect);
        List<Integer> residents = new ArrayList<>();
        long loads = 0;
        for (int t = 0; t < 40; t++) {
            double[] z = logits(random);
            List<Integer> chosen = new ArrayList<>(byScore(z).subList(0, Math.min(k, protect)));
            double[] rank = new double[EXPERTS];
            Arrays.setAll(rank, e -> z[e] + added[e] + (residents.contains(e) ? lambda * 2.5 : 0));
            for (int e : byScore(rank)) {
                if (chosen.size() < k && !chosen.contains(e)) {
                    chosen.add(e);
                }
            }
            int[] got = new int[k];
            prior.select(z, added, got);
            assertArrayEquals(chosen.stream().mapToInt(e -> e).toArray(), got);
            loads += chosen.stream().filter(e -> !residents.contains(e)).count();
            residents.removeAll(chosen);
            // One token's experts are equally recent; of those the lower id leaves first.
            residents.addAll(chosen.stream().sorted().toList());
            while (residents.size() > capacity) {
                residents.remove(0);
            }
            assertEquals(loads, prior.loads());
            assertEquals(t + 1, prior.tokens());
        }
    }

    private static List<Integer> byScore(double[] score) {
        return IntStream.range(0, score.length)
                .boxed()
                .sorted(Comparator.comparingDouble((Integer e) -> -score[e]).thenComparing(e -> e))
                .toList();
    }

    @Test
    void select_lambdaZero_theRoutersOwnChoiceWhateverIsResident() {
        Random random = new Random(1);
        CachePrior prior = new CachePrior(lru(2, 3), 0, 2, 1);
        int[] got = new int[2];
        for (int t = 0; t < 100; t++) {
            double[] z = logits(random);
            prior.select(z, new double[EXPERTS], got);
            boolean[] none = new boolean[EXPERTS];
            assertArrayEquals(SelectionPrior.additive(0).select(z, none, 2), got);
        }
    }

    @Test
    void select_hugeLambda_onlyTheProtectedChoiceIsEverLoaded() {
        Random random = new Random(2);
        CachePrior free = new CachePrior(lru(2, 3), 1e9, 1, 0);
        CachePrior first = new CachePrior(lru(2, 3), 1e9, 1, 1);
        int[] got = new int[2];
        for (int t = 0; t < 100; t++) {
            double[] z = logits(random);
            free.select(z, new double[EXPERTS], got);
            first.select(z, new double[EXPERTS], got);
            assertEquals(byScore(z).get(0), got[0]);
        }
        assertEquals(2, free.loads());
        assertTrue(first.loads() > 2 && first.loads() <= 101, "" + first.loads());
    }

    @Test
    void select_forbiddenExpert_neverChosenThoughItsLogitIsTheHighest() {
        double[] added = new double[EXPERTS];
        added[0] = Double.NEGATIVE_INFINITY;
        int[] got = new int[2];
        new CachePrior(lru(2, 3), 0.5, 1, 1).select(new double[] {9, 1, 2, 3, 0, 0}, added, got);
        assertArrayEquals(new int[] {3, 2}, got);
    }

    @Test
    void constructor_strengthsOutOfRange_refusedByName() {
        for (double bad : new double[] {-0.1, Double.NaN, Double.POSITIVE_INFINITY}) {
            assertMessage("lambda is", () -> new CachePrior(lru(2, 3), bad, 1, 1));
            assertMessage("logitRange is", () -> new CachePrior(lru(2, 3), 1, bad, 1));
        }
        assertMessage("logitRange is", () -> new CachePrior(lru(2, 3), 1, 0, 1));
        assertMessage("protectedTop is", () -> new CachePrior(lru(2, 3), 1, 1, -1));
    }

    private static void assertMessage(
            String start, org.junit.jupiter.api.function.Executable action) {
        String message = assertThrows(IllegalArgumentException.class, action).getMessage();
        assertTrue(message.startsWith(start), message);
    }
}
