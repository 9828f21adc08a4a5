package org.djlmoe.dispatch;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.TreeMap;

/** The planning rule word by word, with lists and exact fractions; no limit on foreign experts. */
final class NaivePlanner {

    private NaivePlanner() {}

    /**
     * Plans.
     *
     * @param alphaTenths alpha * 10
     * @return for each expert, amounts by rank
     */
    static List<TreeMap<Integer, Long>> plan(
            int ranks, long[] load, int alphaTenths, long minPiece) {
        int experts = load.length;
        long total = 0;
        long[] pending = new long[ranks];
        long[] assigned = new long[ranks];
        List<TreeMap<Integer, Long>> amounts = new ArrayList<>();
        List<Integer> order = new ArrayList<>();
        for (int e = 0; e < experts; e++) {
            total += load[e];
            pending[e * ranks / experts] += load[e];
            amounts.add(new TreeMap<>());
            order.add(e);
        }
        long cap = (total * alphaTenths + 10L * ranks - 1) / (10L * ranks);
        order.sort(Comparator.comparing((Integer e) -> -load[e]).thenComparing(e -> e));
        for (int e : order) {
            int home = e * ranks / experts;
            pending[home] -= load[e];
            long room = cap - assigned[home] - pending[home];
            long taken = Math.max(0, Math.min(load[e], room));
            amounts.get(e).merge(home, taken, Long::sum);
            assigned[home] += taken;
            long rest = load[e] - taken;
            while (rest > 0) {
                List<Integer> others = new ArrayList<>();
                for (int g = 0; g < ranks; g++) {
                    if (g != home) {
                        others.add(g);
                    }
                }
                others.sort(
                        Comparator.comparing((Integer g) -> assigned[g] + pending[g])
                                .thenComparing(g -> g));
                Integer chosen = null;
                for (int g : others) {
                    long r = cap - assigned[g] - pending[g];
                    if (chosen == null && (r >= rest || r >= minPiece)) {
                        chosen = g;
                    }
                }
                if (chosen == null) {
                    for (int g : others) {
                        long r = cap - assigned[g] - pending[g];
                        if (chosen == null || r > cap - assigned[chosen] - pending[chosen]) {
                            chosen = g;
                        }
                    }
                }
                long piece = Math.min(rest, cap - assigned[chosen] - pending[chosen]);
                amounts.get(e).merge(chosen, piece, Long::sum);
                assigned[chosen] += piece;
                rest -= piece;
            }
        }
        amounts.forEach(a -> a.values().removeIf(n -> n == 0));
        return amounts;
    }
}
