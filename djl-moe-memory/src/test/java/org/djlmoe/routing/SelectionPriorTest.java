package org.djlmoe.routing;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import java.util.SplittableRandom;
import java.util.stream.IntStream;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.junit.jupiter.api.Test;

class SelectionPriorTest {

    private static final boolean[] KEPT = {false, true, false, true};

    @Test
    void select_additive_displacesAllButTheRoutersFirst() {
        double[] z = {3, 1, 2, 0};
        assertArrayEquals(new int[] {0, 2}, SelectionPrior.additive(0.5).select(z, KEPT, 2));
        assertArrayEquals(new int[] {0, 1}, SelectionPrior.additive(1.5).select(z, KEPT, 2));
        assertArrayEquals(new int[] {0, 1}, SelectionPrior.additive(1e9).select(z, KEPT, 2));
        SelectionPrior unprotected = SelectionPrior.additive(1e9).withProtectedTop(0);
        assertArrayEquals(new int[] {1, 3}, unprotected.select(z, KEPT, 2));
    }

    @Test
    void select_equalRanks_lowerIndexFirst() {
        double[] z = {1, 1, 1, 1};
        assertArrayEquals(new int[] {0, 1}, SelectionPrior.additive(0).select(z, KEPT, 2));
        assertArrayEquals(new int[] {0, 1, 3}, SelectionPrior.additive(1).select(z, KEPT, 3));
        // 1 + 1 ties 2 + 0: the lower index wins whether it is kept or not.
        double[] tied = {5, 1, 2, 0};
        assertArrayEquals(new int[] {0, 1}, SelectionPrior.additive(1).select(tied, KEPT, 2));
        assertArrayEquals(new int[] {1, 3}, SelectionPrior.hardMask().select(z, KEPT, 2));
    }

    @Test
    void select_scaled_usesTheLogitRange() {
        double[] z = {30, 10, 20, 0};
        assertArrayEquals(new int[] {0, 2}, SelectionPrior.scaled(0.3, 30).select(z, KEPT, 2));
        assertArrayEquals(new int[] {0, 1}, SelectionPrior.scaled(0.4, 30).select(z, KEPT, 2));
        assertEquals(30, SelectionPrior.meanLogitRange(new double[][] {z, z}));
    }

    @Test
    void select_probability_addsToTheSoftmax() {
        // p = 0.7, 0.1, 0.15, 0.05
        double[] z = {Math.log(7), Math.log(1), Math.log(1.5), Math.log(0.5)};
        assertArrayEquals(new int[] {0, 2}, SelectionPrior.probability(0.04).select(z, KEPT, 2));
        assertArrayEquals(new int[] {0, 1}, SelectionPrior.probability(0.06).select(z, KEPT, 2));
    }

    /** Softmax in any precision ties -2000 and -1000 behind 0; beta = 0 must not. */
    @Test
    void select_probabilityBetaZero_isTheRouterItself() {
        double[] z = {-2000, 0, -1000};
        boolean[] kept = {true, true, true};
        assertArrayEquals(new int[] {1, 2}, SelectionPrior.probability(0).select(z, kept, 2));
    }

    /** In F32 z + 1e6 has lost z's order; in double precision it has not. */
    @Test
    void select_largeFiniteBeta_ranksKeptByTheirLogits() {
        double[] z = {0, 0.001, 0.002, 0.003};
        boolean[] kept = {true, true, true, false};
        int[] soft = SelectionPrior.additive(1e6).withProtectedTop(0).select(z, kept, 2);
        assertArrayEquals(new int[] {2, 1}, soft);
        assertEquals(1e6f + 0.001f, 1e6f + 0.002f);
    }

    @Property(tries = 300)
    void select_anyInput_holdsItsPromises(
            @ForAll long seed,
            @ForAll @IntRange(min = 1, max = 9) int experts,
            @ForAll SelectionPrior.Form form,
            @ForAll @IntRange(max = 3) int protect) {
        SplittableRandom random = new SplittableRandom(seed);
        double[] z = new double[experts];
        Arrays.setAll(z, e -> random.nextInt(5));
        boolean[] kept = new boolean[experts];
        for (int e = 0; e < experts; e++) {
            kept[e] = random.nextBoolean();
        }
        int k = random.nextInt(1, experts + 1);
        int[] router = new SelectionPrior(form, 0, protect, 2).select(z, kept, k);
        int[] byLogit =
                IntStream.range(0, experts)
                        .boxed()
                        .sorted((a, b) -> Double.compare(z[b], z[a]))
                        .limit(k)
                        .mapToInt(Integer::intValue)
                        .toArray();
        assertArrayEquals(byLogit, router);

        double beta = random.nextDouble() * 4;
        int[] soft = new SelectionPrior(form, beta, protect, 2).select(z, kept, k);
        assertEquals(k, Arrays.stream(soft).distinct().count());
        int own = Math.min(protect, k);
        assertArrayEquals(Arrays.copyOf(router, own), Arrays.copyOf(soft, own));
        // The prior never costs a kept expert its place.
        for (int e : router) {
            assertTrue(!kept[e] || Arrays.stream(soft).anyMatch(s -> s == e));
        }

        int count = (int) IntStream.range(0, experts).filter(e -> kept[e]).count();
        SelectionPrior hard = new SelectionPrior(form, Double.POSITIVE_INFINITY, 0, 2);
        if (count < k) {
            assertThrows(IllegalArgumentException.class, () -> hard.select(z, kept, k));
        } else {
            assertArrayEquals(
                    new SelectionPrior(SelectionPrior.Form.ADDITIVE, 100, 0, 1).select(z, kept, k),
                    hard.select(z, kept, k));
        }
    }

    @Test
    void constructor_badValues_areRefused() {
        assertThrows(IllegalArgumentException.class, () -> SelectionPrior.additive(-1));
        assertThrows(IllegalArgumentException.class, () -> SelectionPrior.additive(Double.NaN));
        assertThrows(IllegalArgumentException.class, () -> SelectionPrior.scaled(1, 0));
        assertThrows(
                IllegalArgumentException.class,
                () -> SelectionPrior.additive(1).withProtectedTop(-1));
        assertThrows(
                IllegalArgumentException.class,
                () -> SelectionPrior.hardMask().withProtectedTop(1));
        assertTrue(SelectionPrior.hardMask().isHardMask());
        assertFalse(SelectionPrior.additive(1e300).isHardMask());
    }

    @Test
    void select_badInput_isRefused() {
        SelectionPrior prior = SelectionPrior.additive(1);
        double[] z = {1, 2, 3, 4};
        assertThrows(IllegalArgumentException.class, () -> prior.select(new double[3], KEPT, 1));
        assertThrows(IllegalArgumentException.class, () -> prior.select(z, KEPT, 0));
        assertThrows(IllegalArgumentException.class, () -> prior.select(z, KEPT, 5));
        z[2] = Double.NaN;
        assertThrows(IllegalArgumentException.class, () -> prior.select(z, KEPT, 1));
    }
}
