package org.djlmoe.vocab;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.training.evaluator.Evaluator;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;

/** Something that follows from how well each token was predicted. */
abstract class TokenEvaluator extends Evaluator {

    private static final VocabSegment.Scores NOTHING = new VocabSegment.Scores(0, 0, 0);

    private final RingDtpLoss loss;
    private final Map<String, VocabSegment.Scores> accumulators = new ConcurrentHashMap<>();

    TokenEvaluator(String name, RingDtpLoss loss) {
        super(name);
        this.loss = loss;
        loss.keepScores();
    }

    /** Computes the figure; there is at least one token. */
    abstract double of(VocabSegment.Scores scores);

    private float orNan(VocabSegment.Scores scores) {
        return scores.tokens() == 0 ? Float.NaN : (float) of(scores);
    }

    @Override
    public NDArray evaluate(NDList labels, NDList predictions) {
        return predictions.head().getManager().create(orNan(loss.scores(labels, predictions)));
    }

    @Override
    public void addAccumulator(String key) {
        accumulators.put(key, NOTHING);
    }

    @Override
    public void updateAccumulator(String key, NDList labels, NDList predictions) {
        updateAccumulators(new String[] {key}, labels, predictions);
    }

    @Override
    public void updateAccumulators(String[] keys, NDList labels, NDList predictions) {
        VocabSegment.Scores batch = loss.scores(labels, predictions);
        for (String key : keys) {
            accumulators.computeIfPresent(
                    key,
                    (k, sum) ->
                            new VocabSegment.Scores(
                                    sum.tokens() + batch.tokens(),
                                    sum.nll() + batch.nll(),
                                    sum.correct() + batch.correct()));
        }
    }

    @Override
    public void resetAccumulator(String key) {
        accumulators.computeIfPresent(key, (k, sum) -> NOTHING);
    }

    /**
     * Returns the figure over all tokens since the accumulator was reset.
     *
     * @param key the accumulator
     * @return the figure, NaN if no token counted
     */
    @Override
    public float getAccumulator(String key) {
        VocabSegment.Scores sum = accumulators.get(key);
        if (sum == null) {
            throw new IllegalArgumentException("There is no accumulator " + key);
        }
        return orNan(sum);
    }
}
