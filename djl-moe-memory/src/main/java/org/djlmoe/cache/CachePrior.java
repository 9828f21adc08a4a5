package org.djlmoe.cache;

import org.djlmoe.routing.TokenSelector;

/**
 * The cache prior: a router that leans towards the experts that are in the cache anyway. It takes
 * no training.
 *
 * <p>A token's experts are the top k of z + a + lambda D m, with z the router's logits, a what a
 * static prior adds, D the layer's mean logit range, so that one lambda means the same in layers of
 * different scale, and m = 1 for the residents after the previous token. The router's own first J
 * are never displaced. Then the token's experts are asked of the cache, whose policy decides who
 * leaves. lambda = 0 is the router itself, whatever is resident.
 *
 * <p>The state is that of one layer: one instance a layer, tokens in order. Which expert a token
 * gets depends on the tokens before it, those of other requests included; where results must not
 * depend on what was served before, use a static prior.
 *
 * <p>Source: the cache prior of "Mixture of Cache-Conditional Experts", arXiv 2412.00099. There D
 * is a running average; here it is measured beforehand. Not thread safe.
 */
public final class CachePrior implements TokenSelector {

    private final ExpertCache cache;
    private final double boost;
    private final int protectedTop;
    private double[] rank = new double[0];
    private long loads;
    private long tokens;

    /**
     * Makes the prior of a layer.
     *
     * @param cache the layer's cache, which nothing else asks meanwhile
     * @param lambda the strength in mean logit ranges, finite, 0 or above
     * @param logitRange D, finite, above 0
     * @param protectedTop J, how many of the router's own first choices are never displaced, 0 or
     *     above
     */
    public CachePrior(ExpertCache cache, double lambda, double logitRange, int protectedTop) {
        if (!(lambda >= 0) || Double.isInfinite(lambda)) {
            throw new IllegalArgumentException(
                    "lambda is " + lambda + ": it must be finite and 0 or above");
        }
        if (!(logitRange > 0) || Double.isInfinite(logitRange)) {
            throw new IllegalArgumentException(
                    "logitRange is " + logitRange + ": it must be finite and above 0");
        }
        if (protectedTop < 0) {
            throw new IllegalArgumentException(
                    "protectedTop is " + protectedTop + ": it must be 0 or above");
        }
        this.cache = cache;
        this.boost = lambda * logitRange;
        this.protectedTop = protectedTop;
    }

    @Override
    public void select(double[] logits, double[] added, int[] chosen) {
        if (rank.length != logits.length) {
            rank = new double[logits.length];
        }
        for (int e = 0; e < rank.length; e++) {
            rank[e] = logits[e] + added[e] + (cache.isResident(e) ? boost : 0);
        }
        TokenSelector.top(logits, rank, protectedTop, chosen);
        loads += cache.request(chosen, 0, chosen.length);
        tokens++;
    }

    /**
     * Returns how many experts had to be loaded so far.
     *
     * @return misses over all tokens
     */
    public long loads() {
        return loads;
    }

    /**
     * Returns how many tokens were served so far.
     *
     * @return the number of tokens
     */
    public long tokens() {
        return tokens;
    }
}
