package org.djlmoe.routing;

import com.google.gson.annotations.SerializedName;
import java.util.Arrays;

/**
 * Ranks kept experts higher at serving time without forbidding the others.
 *
 * <p>With z the router's logits of a token, m its kept set (1 or 0) and p = softmax(z), the ranking
 * is
 *
 * <ul>
 *   <li>{@link Form#ADDITIVE}: r = z + beta m,
 *   <li>{@link Form#SCALED}: r = z + beta D m, D the layer's mean logit range, so that one beta
 *       means the same in layers of different scale,
 *   <li>{@link Form#PROBABILITY}: r = p + beta m, the selection bias that some loaders read.
 * </ul>
 *
 * <p>The router's own first J experts (by z) are never displaced; they come first in the result, in
 * the router's order, and the rest are the best of the others by r. Ties go to the lower index.
 * Only the <em>selection</em> changes: combine weights are gathered from the unbiased softmax.
 *
 * <p>beta = 0 is the router itself, in every form. beta = infinity is a case of its own, the hard
 * mask: dropped experts rank at minus infinity and J = 0. A large finite beta is not the hard mask:
 * in F32, z + 1e6 m rounds z away and ranks kept experts by index. A finite beta is therefore
 * ranked in double precision, as {@link #select} does.
 *
 * @param form what the prior is added to
 * @param beta the strength, finite and &gt;= 0 in the unit of the form, or infinity
 * @param protectedTop J, how many of the router's own first choices are never displaced; 0 with an
 *     infinite beta. A J above k protects all k
 * @param logitRange D, the layer's mean logit range; used by {@link Form#SCALED} alone
 */
public record SelectionPrior(Form form, double beta, int protectedTop, double logitRange) {

    /** What the prior is added to. */
    public enum Form {
        /** z + beta m. */
        @SerializedName("additive")
        ADDITIVE,
        /** z + beta D m. */
        @SerializedName("scaled")
        SCALED,
        /** p + beta m. */
        @SerializedName("probability")
        PROBABILITY
    }

    /** Checks the ranges. */
    public SelectionPrior {
        if (form == null) {
            throw new IllegalArgumentException("A selection prior needs a form");
        }
        if (!(beta >= 0)) {
            throw new IllegalArgumentException(
                    "beta is " + beta + ": it must be finite and >= 0, or infinity (a hard mask)");
        }
        if (protectedTop < 0) {
            throw new IllegalArgumentException(
                    "protectedTop is " + protectedTop + ": it must be >= 0");
        }
        if (Double.isInfinite(beta) && protectedTop != 0) {
            throw new IllegalArgumentException(
                    "An infinite beta is the hard mask and protects nothing: set protectedTop to 0, not "
                            + protectedTop);
        }
        if (!(logitRange > 0) || Double.isInfinite(logitRange)) {
            throw new IllegalArgumentException(
                    "logitRange is " + logitRange + ": it must be finite and > 0");
        }
    }

    /**
     * The default: z + beta m, the router's first choice protected (none when beta is infinite).
     *
     * @param beta the strength, in logits
     * @return the prior
     */
    public static SelectionPrior additive(double beta) {
        return new SelectionPrior(Form.ADDITIVE, beta, Double.isInfinite(beta) ? 0 : 1, 1);
    }

    /**
     * z + beta D m, the router's first choice protected (none when beta is infinite).
     *
     * @param beta the strength, in mean logit ranges
     * @param logitRange D of this layer, see {@link #meanLogitRange}
     * @return the prior
     */
    public static SelectionPrior scaled(double beta, double logitRange) {
        return new SelectionPrior(Form.SCALED, beta, Double.isInfinite(beta) ? 0 : 1, logitRange);
    }

    /**
     * p + beta m, the router's first choice protected (none when beta is infinite).
     *
     * @param beta the strength, in probability
     * @return the prior
     */
    public static SelectionPrior probability(double beta) {
        return new SelectionPrior(Form.PROBABILITY, beta, Double.isInfinite(beta) ? 0 : 1, 1);
    }

    /**
     * Dropped experts are never selected.
     *
     * @return the hard mask
     */
    public static SelectionPrior hardMask() {
        return additive(Double.POSITIVE_INFINITY);
    }

    /**
     * Returns this prior with another number of protected experts.
     *
     * @param top J
     * @return the prior
     */
    public SelectionPrior withProtectedTop(int top) {
        return new SelectionPrior(form, beta, top, logitRange);
    }

    /**
     * Returns this prior for a layer of another scale.
     *
     * @param range D of that layer
     * @return the prior
     */
    public SelectionPrior withLogitRange(double range) {
        return new SelectionPrior(form, beta, protectedTop, range);
    }

    /**
     * Returns whether dropped experts are never selected.
     *
     * @return whether beta is infinite
     */
    public boolean isHardMask() {
        return Double.isInfinite(beta);
    }

    /**
     * Selects k experts for one token. The reference for the tensor version.
     *
     * @param logits z, [experts], finite
     * @param kept m, [experts]
     * @param k how many to select, 1 to the number of experts; under a hard mask at most the number
     *     of kept ones
     * @return the k ids: protected ones first in the router's order, then by descending rank
     */
    public int[] select(double[] logits, boolean[] kept, int k) {
        int experts = logits.length;
        if (kept.length != experts) {
            throw new IllegalArgumentException(
                    experts + " logits but a kept set of " + kept.length + " experts");
        }
        if (k < 1 || k > experts) {
            throw new IllegalArgumentException("Cannot select " + k + " of " + experts);
        }
        for (int e = 0; e < experts; e++) {
            if (!Double.isFinite(logits[e])) {
                throw new IllegalArgumentException("The logit of expert " + e + " is " + logits[e]);
            }
        }
        // Also for the probability form, where softmax may underflow and tie what z tells apart.
        if (beta == 0) {
            return Ranking.top(logits, k);
        }
        if (isHardMask()) {
            return selectKept(logits, kept, k);
        }
        double[] rank = form == Form.PROBABILITY ? softmax(logits) : logits.clone();
        double boost = form == Form.SCALED ? beta * logitRange : beta;
        for (int e = 0; e < experts; e++) {
            rank[e] += kept[e] ? boost : 0;
        }
        int[] own = Ranking.top(logits, Math.min(protectedTop, k));
        int[] selected = Arrays.copyOf(own, k);
        boolean[] taken = new boolean[experts];
        for (int e : own) {
            taken[e] = true;
        }
        int n = own.length;
        // Of the first k by rank at most own.length are taken already, so they suffice.
        for (int e : Ranking.top(rank, k)) {
            if (n < k && !taken[e]) {
                selected[n++] = e;
            }
        }
        return selected;
    }

    /**
     * Measures D: the mean over tokens of the largest minus the smallest logit.
     *
     * @param logits [tokens, experts], at least one token
     * @return the mean range, in logits
     */
    public static double meanLogitRange(double[][] logits) {
        return Arrays.stream(logits)
                .mapToDouble(
                        z ->
                                Arrays.stream(z).max().orElseThrow()
                                        - Arrays.stream(z).min().orElseThrow())
                .average()
                .orElseThrow(
                        () -> new IllegalArgumentException("No token to measure a range from"));
    }

    private static int[] selectKept(double[] logits, boolean[] kept, int k) {
        double[] rank = logits.clone();
        int count = 0;
        for (int e = 0; e < rank.length; e++) {
            count += kept[e] ? 1 : 0;
            rank[e] = kept[e] ? rank[e] : Double.NEGATIVE_INFINITY;
        }
        if (count < k) {
            throw new IllegalArgumentException(
                    "A hard mask that keeps %d experts cannot serve top-%d".formatted(count, k));
        }
        return Ranking.top(rank, k);
    }

    private static double[] softmax(double[] logits) {
        double max = Arrays.stream(logits).max().orElseThrow();
        double[] p = Arrays.stream(logits).map(z -> Math.exp(z - max)).toArray();
        double sum = Arrays.stream(p).sum();
        return Arrays.stream(p).map(v -> v / sum).toArray();
    }
}
