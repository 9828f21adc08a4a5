package org.djlmoe.maskcoft;

import java.util.List;

/**
 * How the gradient of the mask logits theta is estimated from a model that ran under sampled masks.
 *
 * <p>A dropped expert adds nothing to the loss, so the mask has no gradient of its own there. Three
 * answers:
 *
 * <table>
 * <caption>Estimators</caption>
 * <tr><th></th><th>needs</th><th>credits</th><th>bias</th></tr>
 * <tr><td>{@link #plackettLuce()}</td><td>forward losses of M &gt;= 2 masks</td><td>every
 * expert</td><td>none</td></tr>
 * <tr><td>{@link #gumbel()}</td><td>backward under M masks</td><td>experts that a token chose;
 * exactly zero for all others</td><td>of the straight-through kind</td></tr>
 * <tr><td>{@link #dense(int)}</td><td>backward under M masks, and some dropped experts a
 * token</td><td>also the best dropped experts</td><td>of the straight-through kind</td></tr>
 * </table>
 *
 * <p>Straight through: the combine weight of a kept expert carries the factor m + s - stop(s), of
 * value 1, s = sigmoid((theta + tau u - b) / tau) with Gumbel noise u and the threshold b between
 * kept and dropped experts held fixed. With top-1 routing and weights divided by their sum, every
 * straight-through gradient is exactly zero.
 */
public interface MaskEstimator {

    /**
     * Draws a mask.
     *
     * @param scores what to draw from
     * @param step the step, at least 0
     * @param index which of the step's samples
     * @return the mask and what {@link #gradient} needs of it; the same for the same arguments
     */
    MaskSample draw(MaskScores scores, int step, int index);

    /**
     * Estimates d E[loss] / d theta.
     *
     * @param samples masks of one step, at least {@link #minSamples} of them
     * @param outcomes what the model told under each, all finite and on the same batch
     * @return [layers, experts]
     */
    double[][] gradient(List<MaskSample> samples, List<MaskOutcome> outcomes);

    /**
     * Returns whether outcomes need {@link MaskOutcome#factorGradients}.
     *
     * @return whether the model runs backward too
     */
    boolean needsBackward();

    /**
     * Returns how many dropped experts run along for their gradient.
     *
     * @return experts a token
     */
    int excludedExperts();

    /**
     * Returns the fewest masks that give an estimate.
     *
     * @return at least 1
     */
    int minSamples();

    /**
     * The score-function estimator over Plackett-Luce draws, from forward losses alone:
     *
     * <pre>g = 1 / (M - 1) * sum over i of (L_i - mean L) * d log P(m_i) / d theta</pre>
     *
     * unbiased for every M of at least 2, because the mean over <em>all</em> samples as a baseline
     * with 1 / (M - 1) is the leave-one-out baseline with 1 / M. Under a budget that layers share,
     * a layer's floor is drawn within the layer and the shared places from all that is left, each
     * by Plackett-Luce: log P is the sum.
     *
     * @return the estimator
     */
    static MaskEstimator plackettLuce() {
        return new ScoreFunction();
    }

    /**
     * Gumbel straight-through, averaged over the masks.
     *
     * @return the estimator
     */
    static MaskEstimator gumbel() {
        return new StraightThrough(true, 0);
    }

    /**
     * Gumbel straight-through that also runs the best dropped experts of every token.
     *
     * @param excluded how many, at least 1; where fewer are dropped, all of them run
     * @return the estimator
     */
    static MaskEstimator dense(int excluded) {
        if (excluded < 1) {
            throw new IllegalArgumentException(
                    "The dense estimator runs 1 dropped expert a token or more, not " + excluded);
        }
        return new StraightThrough(true, excluded);
    }
}
