package org.djlmoe.serving;

import java.util.Arrays;

/** Which routes (token * k + choice) go to each expert. */
final class Routes {

    private final int[] experts;
    private final long[][] routes;

    /**
     * Groups the choices of some tokens.
     *
     * @param ids [N k]
     * @param numExperts E
     */
    Routes(long[] ids, int numExperts) {
        routes = new long[numExperts][];
        int[] counts = new int[numExperts];
        int[] seen = new int[Math.min(numExperts, ids.length)];
        int distinct = 0;
        for (long id : ids) {
            if (counts[(int) id]++ == 0) {
                seen[distinct++] = (int) id;
            }
        }
        experts = Arrays.copyOf(seen, distinct);
        for (int e : experts) {
            routes[e] = new long[counts[e]];
            counts[e] = 0;
        }
        for (int i = 0; i < ids.length; i++) {
            int e = (int) ids[i];
            routes[e][counts[e]++] = i;
        }
    }

    /** The experts in the order of their first route. */
    int[] experts() {
        return experts;
    }

    long[] of(int expert) {
        return routes[expert];
    }

    boolean has(int expert) {
        return routes[expert] != null;
    }
}
