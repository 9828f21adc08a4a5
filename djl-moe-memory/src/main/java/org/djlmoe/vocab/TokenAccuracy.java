package org.djlmoe.vocab;

/**
 * The share of tokens whose label is the likeliest id; among equally likely ids, the lowest.
 *
 * <p>Takes what {@link RingDtpLoss} takes: labels, and the predictions (hidden, weight) or (hidden,
 * weight, bias). The logits, with the loss's scale and cap, exist for one of its blocks at a time.
 * Tokens that the loss ignores do not count; all others count alike, whatever their weights.
 *
 * <p>When both are asked about the same batch under a {@code BoundedTrainer}, the loss counts while
 * it has the logits in hand, and nothing is multiplied twice.
 */
public final class TokenAccuracy extends TokenEvaluator {

    /**
     * Creates the evaluator with the name "TokenAccuracy".
     *
     * @param loss the loss of the training configuration
     */
    public TokenAccuracy(RingDtpLoss loss) {
        this("TokenAccuracy", loss);
    }

    /**
     * Creates the evaluator.
     *
     * @param name its name in metrics
     * @param loss the loss of the training configuration
     */
    public TokenAccuracy(String name, RingDtpLoss loss) {
        super(name, loss);
    }

    @Override
    double of(VocabSegment.Scores scores) {
        return (double) scores.correct() / scores.tokens();
    }
}
