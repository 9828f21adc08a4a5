package org.djlmoe.dispatch;

import java.util.Arrays;

/**
 * How many routes of each expert each rank computes, while a plan is made. Amounts of one pair add
 * up, so a pair has one interval in the end; the ranks of an expert keep the order in which they
 * came.
 */
final class Placement {

    // Most experts stay whole, so a list for each is far smaller than an [E, P] table.
    private final int[][] ranks;
    private final long[][] amounts;

    /**
     * Starts with nothing.
     *
     * @param experts E
     */
    Placement(int experts) {
        ranks = new int[experts][0];
        amounts = new long[experts][0];
    }

    /** Adds to what a rank computes of an expert; a negative number takes away. */
    void add(int expert, int rank, long routes) {
        int i = find(expert, rank);
        if (i < 0) {
            i = ranks[expert].length;
            ranks[expert] = Arrays.copyOf(ranks[expert], i + 1);
            amounts[expert] = Arrays.copyOf(amounts[expert], i + 1);
            ranks[expert][i] = rank;
        }
        amounts[expert][i] += routes;
    }

    private int find(int expert, int rank) {
        int i = ranks[expert].length - 1;
        while (i >= 0 && ranks[expert][i] != rank) {
            i--;
        }
        return i;
    }

    /** Returns what a rank computes of an expert. */
    long amount(int expert, int rank) {
        int i = find(expert, rank);
        return i < 0 ? 0 : amounts[expert][i];
    }

    /** Returns the ranks that compute a part of an expert, in the order in which they came. */
    int[] ranks(int expert) {
        int[] parts = new int[ranks[expert].length];
        int size = 0;
        for (int i = 0; i < parts.length; i++) {
            if (amounts[expert][i] > 0) {
                parts[size++] = ranks[expert][i];
            }
        }
        return Arrays.copyOf(parts, size);
    }

    /** Returns E. */
    int numExperts() {
        return ranks.length;
    }
}
