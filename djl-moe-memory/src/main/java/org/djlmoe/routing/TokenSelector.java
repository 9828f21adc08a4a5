package org.djlmoe.routing;

/**
 * Chooses the experts of one layer token by token, in order, so that a choice may depend on the
 * tokens before: on what a cache holds, for instance.
 *
 * <p>It takes the place of the router's top-k alone. Combine weights still come from the unbiased
 * softmax. It has state, so it is for evaluation and generation, not for training, and it serves
 * one layer of one model.
 */
@FunctionalInterface
public interface TokenSelector {

    /**
     * Chooses for the next token.
     *
     * @param logits z, [E], as the router computed them; not to be changed or kept
     * @param added what a static prior adds to each logit in the ranking, [E], negative infinity
     *     for a forbidden expert; all 0 without one. Not to be changed or kept
     * @param chosen takes k distinct ids, allowed ones, in the order of choice
     */
    void select(double[] logits, double[] added, int[] chosen);

    /**
     * The selection without state: the router's own first J allowed experts, then the best by rank.
     * Ties go to the lower index.
     *
     * @param logits z, [E]
     * @param rank what the others are ranked by, [E]; negative infinity forbids
     * @param protectedTop J
     * @param chosen takes the ids
     */
    static void top(double[] logits, double[] rank, int protectedTop, int[] chosen) {
        double[] own = logits.clone();
        for (int e = 0; e < own.length; e++) {
            if (rank[e] == Double.NEGATIVE_INFINITY) {
                own[e] = Double.NEGATIVE_INFINITY;
            }
        }
        int k = chosen.length;
        int n = Math.min(protectedTop, k);
        System.arraycopy(Ranking.top(own, n), 0, chosen, 0, n);
        int first = n;
        for (int e : Ranking.top(rank, k)) {
            boolean taken = false;
            for (int i = 0; i < first; i++) {
                taken |= chosen[i] == e;
            }
            if (!taken && n < k) {
                chosen[n++] = e;
            }
        }
    }
}
