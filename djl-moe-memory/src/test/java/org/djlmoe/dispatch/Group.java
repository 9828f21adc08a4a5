package org.djlmoe.dispatch;

import java.util.function.IntFunction;

/** All ranks of a group in one place: what they would gather and decide. */
final class Group {

    final DispatchPlan plan;
    final int[][] experts;
    final int[][] destinations;
    private final int topK;

    /**
     * Plans a layer.
     *
     * @param experts [rank][tokens * k]
     */
    Group(LeastLoadedPlanner planner, int numExperts, int topK, int[][] experts) {
        this.experts = experts;
        this.topK = topK;
        plan = planner.plan(counts(numExperts, experts));
        destinations = new int[experts.length][];
        for (int r = 0; r < experts.length; r++) {
            destinations[r] = plan.destinations(r, experts[r]);
        }
    }

    static long[][] counts(int numExperts, int[][] experts) {
        long[][] counts = new long[experts.length][numExperts];
        for (int r = 0; r < experts.length; r++) {
            for (int e : experts[r]) {
                counts[r][e]++;
            }
        }
        return counts;
    }

    int ranks() {
        return experts.length;
    }

    int tokens(int rank) {
        return experts[rank].length / topK;
    }

    /** [P][K][P] routes that each rank sends in each chunk to each rank. */
    long[][][] routes(IntFunction<ChunkSchedule> scheduleOfRank) {
        long[][][] gathered = new long[ranks()][][];
        for (int r = 0; r < ranks(); r++) {
            gathered[r] = scheduleOfRank.apply(r).routes(ranks(), destinations[r]);
        }
        return gathered;
    }

    long[][][] strided(int chunks) {
        return routes(r -> ChunkSchedule.strided(tokens(r), chunks));
    }

    long[][][] contiguous(int chunks) {
        return routes(r -> ChunkSchedule.contiguous(tokens(r), chunks));
    }

    long[][][] dealt(int chunks) {
        return routes(r -> ChunkSchedule.dealt(r, ranks(), tokens(r), chunks, destinations[r]));
    }

    long[][][] automatic(int chunks) {
        long[][][] strided = strided(chunks);
        return ChunkSchedule.choose(strided) == ChunkSchedule.Membership.STRIDED
                ? strided
                : dealt(chunks);
    }
}
