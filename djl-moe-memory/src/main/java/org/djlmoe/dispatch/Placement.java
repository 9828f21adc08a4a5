package org.djlmoe.dispatch;

import java.util.Arrays;

/**
 * How many routes of each expert each rank computes, while a plan is made. Amounts of one pair add
 * up, so a pair has one interval in the end; the ranks of an expert keep the order in which they
 * came.
 */
final class Placement {

    private final long[][] amounts;
    private final int[][] order;

    /**
     * Starts with nothing.
     *
     * @param experts E
     * @param ranks P
     */
    Placement(int experts, int ranks) {
        amounts = new long[experts][ranks];
        order = new int[experts][0];
    }

    /** Adds to what a rank computes of an expert. Taking away (below 0) keeps its turn. */
    void add(int expert, int rank, long routes) {
        if (routes != 0 && !has(expert, rank)) {
            order[expert] = Arrays.copyOf(order[expert], order[expert].length + 1);
            order[expert][order[expert].length - 1] = rank;
        }
        amounts[expert][rank] += routes;
    }

    private boolean has(int expert, int rank) {
        for (int r : order[expert]) {
            if (r == rank) {
                return true;
            }
        }
        return false;
    }

    /** Returns what a rank computes of an expert. */
    long amount(int expert, int rank) {
        return amounts[expert][rank];
    }

    /** Returns the ranks that compute a part of an expert, in the order in which they came. */
    int[] ranks(int expert) {
        return Arrays.stream(order[expert]).filter(r -> amounts[expert][r] > 0).toArray();
    }

    /** Returns E. */
    int numExperts() {
        return amounts.length;
    }
}
