package org.djlmoe.routing;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class ExpertMaskTest {

    @Test
    void topN_equalScores_keepsLowerId() {
        ExpertMask mask =
                ExpertMask.topN(new double[][] {{1, 1, 1, 1}, {0, 2, 1, 2}, {-0.0, 0.0, -1, 5}}, 2);
        assertArrayEquals(new int[] {0, 1}, mask.experts(0));
        assertArrayEquals(new int[] {1, 3}, mask.experts(1));
        assertArrayEquals(new int[] {0, 3}, mask.experts(2));
    }

    @Test
    void topN_nan_isRefused() {
        assertThrows(
                IllegalArgumentException.class,
                () -> ExpertMask.topN(new double[][] {{1, Double.NaN}}, 1));
    }

    @Test
    void mostFrequent_keepsTheMostUsed() {
        ExpertMask mask = ExpertMask.mostFrequent(new long[][] {{3, 9, 0, 9}}, 3);
        assertArrayEquals(new int[] {0, 1, 3}, mask.experts(0));
    }

    @Test
    void kept_returnedArray_isACopy() {
        ExpertMask mask = ExpertMask.all(1, 3);
        mask.kept(0)[1] = false;
        assertTrue(mask.isKept(0, 1));
        assertEquals(3, mask.count(0));
    }

    @Test
    void toString_drawsEachLayer() {
        ExpertMask mask =
                ExpertMask.of(new boolean[][] {{true, false, true}, {false, true, false}});
        assertEquals(
                "ExpertMask 2 x 3%n  layer 0   #.#  2 kept%n  layer 1   .#.  1 kept".formatted(),
                mask.toString());
    }

    @Property(tries = 100)
    void fromJson_ofToJson_isEqual(
            @ForAll @IntRange(min = 1, max = 5) int layers,
            @ForAll @IntRange(min = 1, max = 70) int experts,
            @ForAll long seed) {
        int n = 1 + (int) Math.floorMod(seed, (long) experts);
        ExpertMask mask = ExpertMask.random(layers, experts, n, seed);
        for (int l = 0; l < layers; l++) {
            assertEquals(n, mask.count(l));
        }
        ExpertMask read = ExpertMask.fromJson(mask.toJson());
        assertEquals(mask, read);
        assertEquals(mask.hashCode(), read.hashCode());
        assertEquals(mask, ExpertMask.random(layers, experts, n, seed));
    }

    @Test
    void random_otherSeed_otherMask() {
        assertNotEquals(ExpertMask.random(4, 64, 32, 1), ExpertMask.random(4, 64, 32, 2));
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "",
                "null",
                "[]",
                "{",
                "{\"experts\":4}",
                "{\"mask\":[[0]]}",
                "{\"experts\":4,\"mask\":[]}",
                "{\"experts\":4,\"mask\":[null]}",
                "{\"experts\":4,\"mask\":[[4]]}",
                "{\"experts\":4,\"mask\":[[-1]]}",
                "{\"experts\":4,\"mask\":[[1,1]]}",
                "{\"experts\":4,\"mask\":[[1.5]]}"
            })
    void fromJson_badText_isRefused(String json) {
        assertThrows(IllegalArgumentException.class, () -> ExpertMask.fromJson(json));
    }

    @Test
    void factories_badShapes_areRefused() {
        assertThrows(IllegalArgumentException.class, () -> ExpertMask.all(0, 3));
        assertThrows(IllegalArgumentException.class, () -> ExpertMask.random(1, 3, 0, 0));
        assertThrows(IllegalArgumentException.class, () -> ExpertMask.random(1, 3, 4, 0));
        assertThrows(
                IllegalArgumentException.class,
                () -> ExpertMask.topN(new double[][] {{1, 2}, {1}}, 1));
        assertThrows(
                IllegalArgumentException.class,
                () -> ExpertMask.of(new boolean[][] {{true, true}, {true}}));
        assertThrows(IllegalArgumentException.class, () -> ExpertMask.of(new boolean[0][]));
    }
}
