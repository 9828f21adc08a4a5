package org.djlmoe.cache;

import java.util.Arrays;

/**
 * Policies that keep a number per expert and evict the smallest, of equals the lower id.
 *
 * <p>A scan over the candidates, not a heap: a cache has tens of slots.
 */
final class ScoredPolicies {

    private ScoredPolicies() {}

    /** The scan. */
    abstract static class Scored implements EvictionPolicy {

        /** What an expert is worth, [experts]. Ticks stay exact: they are below 2^53. */
        final double[] score;

        /** How many tokens were heard. */
        long tick;

        Scored(int experts) {
            score = new double[experts];
        }

        @Override
        public void requested(int[] ids, int from, int k) {
            tick++;
            for (int i = from; i < from + k; i++) {
                used(ids[i]);
            }
        }

        void used(int expert) {}

        @Override
        public void inserted(int expert) {}

        @Override
        public void evicted(int expert) {}

        @Override
        public final int victim(int[] candidates, int n) {
            int worst = candidates[0];
            for (int i = 1; i < n; i++) {
                int e = candidates[i];
                if (score[e] < score[worst] || (score[e] == score[worst] && e < worst)) {
                    worst = e;
                }
            }
            return worst;
        }

        @Override
        public boolean mayDecline() {
            return false;
        }
    }

    /** Score: the tick of the last use. */
    static final class Lru extends Scored {

        Lru(int experts) {
            super(experts);
        }

        @Override
        void used(int expert) {
            score[expert] = tick;
        }
    }

    /** Score: the tick of the insertion. */
    static final class Fifo extends Scored {

        Fifo(int experts) {
            super(experts);
        }

        @Override
        public void inserted(int expert) {
            score[expert] = tick;
        }
    }

    /** Score: uses since the insertion, which is the first; 0 when not resident. */
    static final class Lfu extends Scored {

        Lfu(int experts) {
            super(experts);
        }

        @Override
        void used(int expert) {
            if (score[expert] > 0) {
                score[expert]++;
            }
        }

        @Override
        public void inserted(int expert) {
            score[expert] = 1;
        }

        @Override
        public void evicted(int expert) {
            score[expert] = 0;
        }
    }

    /**
     * Score: the discounted frequency times gamma^-tick, a factor that is the same for all.
     *
     * <p>So a token touches its k scores alone: the weight of a new use grows instead of the old
     * ones shrinking. Before the weight overflows, all scores are scaled back by it.
     */
    static final class Discounted extends Scored {

        private static final double LARGE = 0x1p500;

        private final double gamma;
        private double weight = 1;

        Discounted(int experts, double gamma) {
            super(experts);
            if (!(gamma > 0 && gamma <= 1)) {
                throw new IllegalArgumentException(
                        "gamma is " + gamma + ": it must be above 0 and at most 1");
            }
            this.gamma = gamma;
        }

        @Override
        public void requested(int[] ids, int from, int k) {
            weight /= gamma;
            if (weight > LARGE) {
                for (int e = 0; e < score.length; e++) {
                    score[e] /= weight;
                }
                weight = 1;
            }
            super.requested(ids, from, k);
        }

        @Override
        void used(int expert) {
            score[expert] += weight;
        }

        @Override
        public boolean mayDecline() {
            return true;
        }
    }

    /** Score: the tick of the last use, members above all others. */
    static final class Fixed extends Scored {

        private static final double MEMBER = 0x1p50;

        private final boolean[] members;

        Fixed(boolean[] members) {
            super(members.length);
            this.members = members.clone();
            for (int e = 0; e < members.length; e++) {
                score[e] = members[e] ? MEMBER : 0;
            }
        }

        @Override
        void used(int expert) {
            score[expert] = members[expert] ? MEMBER + tick : tick;
        }

        @Override
        public boolean mayDecline() {
            return true;
        }
    }

    /** Score: minus the token of the next use that counts. */
    static final class Belady extends Scored {

        private static final int NEVER = Integer.MAX_VALUE;

        /** When each selected expert is used again, [tokens * topK]. */
        private final int[] next;

        /**
         * Knows a future.
         *
         * @param trace the routing
         * @param layer the MoE layer
         * @param from the first token that this policy will hear
         * @param counted the first token whose loads count. An expert that is used again before
         *     comes back for nothing then, so until then there is no reason to keep it
         * @param to the end of the future
         */
        Belady(ExpertTrace trace, int layer, int from, int counted, int to) {
            super(trace.numExperts());
            int k = trace.topK();
            next = new int[(to - from) * k];
            int[] ids = new int[k];
            int[] soonest = new int[score.length];
            Arrays.fill(soonest, NEVER);
            for (int t = to - 1; t >= from; t--) {
                trace.experts(layer, t, ids);
                for (int i = 0; i < k; i++) {
                    next[(t - from) * k + i] = soonest[ids[i]];
                    soonest[ids[i]] = t >= counted ? t : NEVER;
                }
            }
            for (int e = 0; e < score.length; e++) {
                score[e] = -soonest[e];
            }
        }

        @Override
        public void requested(int[] ids, int from, int k) {
            for (int i = 0; i < k; i++) {
                score[ids[from + i]] = -next[(int) tick * k + i];
            }
            tick++;
        }

        @Override
        public boolean mayDecline() {
            return true;
        }
    }
}
