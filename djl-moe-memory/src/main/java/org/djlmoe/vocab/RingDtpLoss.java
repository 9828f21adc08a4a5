package org.djlmoe.vocab;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.evaluator.Accuracy;
import ai.djl.training.evaluator.BinaryAccuracy;
import ai.djl.training.evaluator.Evaluator;
import ai.djl.training.evaluator.TopKAccuracy;
import ai.djl.training.loss.Loss;
import java.lang.ref.WeakReference;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.DoubleSupplier;
import org.djlmoe.autograd.EvaluatorCheck;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Tape;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.VocabKernels;

/**
 * Cross-entropy of a vocabulary projection, without the logits of all tokens ever existing.
 *
 * <p>The idea: a token's loss and gradients need the logits of that token only. So the product with
 * the vocabulary runs block by block of tokens, and with a scalar reduction the gradients of the
 * hidden states and the weight are formed while a block's logits are in hand; backward merely
 * scales them. Nothing is computed twice: three matrix products, as many as without blocks. With
 * {@link Reduction#NONE} the upstream gradients are known in backward only, which then computes the
 * logits of each block once more.
 *
 * <p>Inputs, with H the hidden size and V the vocabulary:
 *
 * <ul>
 *   <li>predictions: what {@link VocabProjection} gives, (hidden, weight) or (hidden, weight,
 *       bias), of shapes (B, S, H) or (N, H), (V, H) and (V)
 *   <li>labels: (labels) or (labels, weights), of shape (B, S) or (N), or with a last axis of 1, as
 *       DJL's softmax cross-entropy needs it. Labels are whole numbers of any type. Weights
 *       multiply the losses of their tokens; no gradient is taken of them
 * </ul>
 *
 * <p>With logit = cap tanh(scale (x w + bias) / cap), lse their log-sum-exp, s their sum, eps the
 * smoothing and zeta the z-loss, a token's loss is
 *
 * <pre>weight [(1 - eps) (lse - logit[label]) + eps (lse - s / V) + zeta lse^2]</pre>
 *
 * <p>Tokens whose label is the ignored one cost nothing: they are left out of the products. A batch
 * in which all are ignored has the loss 0 and gradients of zero.
 *
 * <p>Bound, beside the inputs and the gradients of hidden states and weight, which are in F32 until
 * handed on: {@code blockTokens * V * 4} bytes, twice that with a softcap. It holds under a {@code
 * BoundedTrainer} and wherever gradient mode is off. Under DJL's own trainer losses and gradients
 * are the same, but autograd keeps all logits.
 *
 * <p>DJL's evaluator listener asks for the loss of each batch a second time; as long as labels and
 * predictions are the same unchanged arrays, the normalizer has not changed and gradient mode is
 * off, the answer is remembered.
 *
 * <p>Accuracy and perplexity come from {@link TokenAccuracy} and {@link Perplexity}; DJL's own
 * evaluators expect logits, and {@code BoundedTrainer} refuses them.
 *
 * <p>A loss is used by one thread at a time.
 *
 * <p>Do not use it for a small vocabulary, where DJL's softmax cross-entropy does as well.
 *
 * <p>Source: "Flattening Every Memory Peak in Long-Context Mixture-of-Experts Training", arXiv
 * 2609.14306.
 */
public final class RingDtpLoss extends Loss implements EvaluatorCheck {

    /** How the losses of tokens become the loss of a batch. */
    public enum Reduction {
        /**
         * Their sum divided by the number of tokens that are not ignored, whatever their weights;
         * or divided by the normalizer, if there is one.
         */
        MEAN,
        /** Their sum. */
        SUM,
        /** Each by itself, in the shape of the labels, 0 where the label is ignored. */
        NONE
    }

    private final LossSettings settings;
    private final DoubleSupplier normalizer;
    private final Map<String, Average> accumulators = new ConcurrentHashMap<>();
    private volatile Evaluation last;
    private volatile boolean scored;

    private RingDtpLoss(Builder builder) {
        super(builder.name);
        settings =
                new LossSettings(
                        builder.ignoreIndex,
                        builder.reduction,
                        new VocabKernels.Terms(
                                builder.logitScale,
                                builder.softcap,
                                builder.labelSmoothing,
                                builder.zLoss),
                        builder.blockTokens);
        normalizer = builder.normalizer;
    }

    /**
     * Computes the loss of a batch.
     *
     * @param labels (labels) or (labels, weights)
     * @param predictions (hidden, weight) or (hidden, weight, bias)
     * @return the loss: a number, or with {@link Reduction#NONE} one a token
     * @throws IllegalArgumentException if shapes do not fit, if a label is neither a number of the
     *     vocabulary nor the ignored one, or if the normalizer is not positive
     */
    @Override
    public NDArray evaluate(NDList labels, NDList predictions) {
        NDList arrays = new NDList(labels).addAll(predictions);
        double divisor = normalizer == null ? Double.NaN : normalizer.getAsDouble();
        Evaluation before = last;
        if (before != null && !GradMode.isOn() && before.isOf(arrays, divisor)) {
            return before.toArray(predictions.head().getManager());
        }
        last = null;
        check(labels, predictions);
        VocabSegment segment =
                new VocabSegment(
                        settings,
                        divisor,
                        labels.get(0),
                        labels.size() > 1 ? labels.get(1) : null,
                        wanted(predictions),
                        scored);
        NDArray loss = Tape.apply(segment, predictions).head();
        last = new Evaluation(arrays, divisor, segment.outcome());
        return loss;
    }

    /** Has every evaluation count how well tokens are predicted, so that evaluators need none. */
    void keepScores() {
        scored = true;
    }

    /**
     * Returns how well the tokens of a batch are predicted: what the loss counted, if it was the
     * last that this loss was asked for, under a tape or without gradients.
     */
    VocabSegment.Scores scores(NDList labels, NDList predictions) {
        try (GradMode off = GradMode.off()) {
            evaluate(labels, predictions).close();
            if (last.outcome().scores() == null) {
                last = null;
                evaluate(labels, predictions).close();
            }
        }
        return last.outcome().scores();
    }

    /**
     * Refuses DJL's own evaluators: they take the predictions for logits, and would compare labels
     * with places in the hidden states.
     *
     * @param evaluators the configuration's evaluators
     * @throws IllegalArgumentException naming the evaluator and what to use in its place
     */
    @Override
    public void checkEvaluators(List<Evaluator> evaluators) {
        for (Evaluator evaluator : evaluators) {
            if (evaluator instanceof Accuracy
                    || evaluator instanceof BinaryAccuracy
                    || evaluator instanceof TopKAccuracy
                    || evaluator.getClass().getName().startsWith("ai.djl.")) {
                throw new IllegalArgumentException(
                        "The evaluator "
                                + evaluator.getName()
                                + " ("
                                + evaluator.getClass().getSimpleName()
                                + ") takes predictions for logits, but with RingDtpLoss they are"
                                + " (hidden, weight). Use new TokenAccuracy(loss) or new"
                                + " Perplexity(loss) of org.djlmoe.vocab");
            }
        }
    }

    private static boolean[] wanted(NDList predictions) {
        boolean[] wanted = new boolean[predictions.size()];
        for (int i = 0; i < wanted.length; i++) {
            wanted[i] = GradMode.isOn() && ArrayKernels.requiresGradient(predictions.get(i));
        }
        return wanted;
    }

    private static void check(NDList labels, NDList predictions) {
        if (predictions.size() != 2 && predictions.size() != 3) {
            throw new IllegalArgumentException(
                    "RingDtpLoss takes the predictions (hidden, weight) or (hidden, weight, bias) that"
                            + " VocabProjection gives, not "
                            + predictions.size()
                            + " array(s)");
        }
        if (labels.size() != 1 && labels.size() != 2) {
            throw new IllegalArgumentException(
                    "RingDtpLoss takes (labels) or (labels, weights), not "
                            + labels.size()
                            + " array(s)");
        }
        Shape hidden = predictions.get(0).getShape();
        Shape weight = predictions.get(1).getShape();
        int axes = hidden.dimension();
        if (axes < 2 || weight.dimension() != 2 || hidden.get(axes - 1) != weight.get(1)) {
            throw new IllegalArgumentException(
                    "Hidden states "
                            + hidden
                            + " and weight "
                            + weight
                            + " do not fit: they must be (B, S, H) or (N, H), and the whole (V, H)");
        }
        if (predictions.size() == 3
                && !predictions.get(2).getShape().equals(new Shape(weight.get(0)))) {
            throw new IllegalArgumentException(
                    "The bias has shape "
                            + predictions.get(2).getShape()
                            + ", but the weight "
                            + weight
                            + " needs one of ("
                            + weight.get(0)
                            + ")");
        }
        for (NDArray perToken : labels) {
            Shape expected = hidden.slice(0, axes - 1);
            if (!perToken.getShape().equals(expected)
                    && !perToken.getShape().equals(expected.add(1))) {
                throw new IllegalArgumentException(
                        (perToken == labels.head() ? "Labels" : "Weights")
                                + " of shape "
                                + perToken.getShape()
                                + " do not fit hidden states "
                                + hidden);
            }
        }
    }

    /**
     * Computes the logits that the loss sees: with its scale and its cap. For the few tokens that
     * generation needs, since the result is (.., V).
     *
     * @param predictions (hidden, weight) or (hidden, weight, bias)
     * @return logits
     */
    public NDArray logits(NDList predictions) {
        VocabKernels.Terms terms = settings.terms();
        NDArray logits =
                VocabProjection.logits(
                                predictions.get(0),
                                predictions.get(1),
                                predictions.size() > 2 ? predictions.get(2) : null)
                        .mul(terms.logitScale());
        return terms.softcap() > 0
                ? logits.div(terms.softcap()).tanh().mul(terms.softcap())
                : logits;
    }

    /**
     * Counts the tokens whose label is not the ignored one. The normalizer of an accumulation step
     * is the sum of this over its batches.
     *
     * @param labels the labels
     * @return the number of tokens that the loss counts
     */
    public long validTokens(NDArray labels) {
        try (NDManager scratch = labels.getManager().newSubManager()) {
            return VocabKernels.tokens(scratch, labels, settings.ignoreIndex(), Long.MAX_VALUE)
                    .count();
        }
    }

    /**
     * Returns how much of the loss evaluated last is z-loss; with {@link Reduction#NONE}, of the
     * sum of the losses.
     *
     * @return a part of the loss
     * @throws IllegalStateException if no loss has been evaluated
     */
    public double getZLoss() {
        Evaluation evaluation = last;
        if (evaluation == null) {
            throw new IllegalStateException("No loss has been evaluated yet");
        }
        return evaluation.outcome().zLoss();
    }

    @Override
    public void addAccumulator(String key) {
        accumulators.put(key, new Average());
    }

    @Override
    public void updateAccumulator(String key, NDList labels, NDList predictions) {
        updateAccumulators(new String[] {key}, labels, predictions);
    }

    @Override
    public void updateAccumulators(String[] keys, NDList labels, NDList predictions) {
        try (GradMode off = GradMode.off()) {
            evaluate(labels, predictions).close();
        }
        VocabSegment.Outcome outcome = last.outcome();
        for (String key : keys) {
            Average average = accumulators.get(key);
            if (average != null) {
                boolean perBatch = settings.reduction() == Reduction.SUM;
                average.add(outcome.tokenLosses(), perBatch ? 1 : outcome.tokens());
            }
        }
    }

    @Override
    public void resetAccumulator(String key) {
        accumulators.computeIfPresent(key, (k, old) -> new Average());
    }

    /**
     * Returns the average loss since the accumulator was reset: over tokens, so that a batch with
     * few of them counts little; with {@link Reduction#SUM} over batches.
     *
     * @param key the accumulator
     * @return the average, NaN if there was no batch, 0 if every token was ignored
     */
    @Override
    public float getAccumulator(String key) {
        Average average = accumulators.get(key);
        if (average == null) {
            throw new IllegalArgumentException("There is no accumulator " + key);
        }
        return average.get();
    }

    /** A weighted average. */
    private static final class Average {

        private double sum;
        private double weight;
        private boolean used;

        synchronized void add(double value, double valueWeight) {
            sum += value;
            weight += valueWeight;
            used = true;
        }

        synchronized float get() {
            if (!used) {
                return Float.NaN;
            }
            return weight == 0 ? 0 : (float) (sum / weight);
        }
    }

    /**
     * The outcome for certain arrays, in the state that they were in; it keeps none of them alive.
     */
    private static final class Evaluation {

        private final List<WeakReference<NDArray>> arrays = new ArrayList<>();
        private final long[] versions;
        private final double normalizer;
        private final VocabSegment.Outcome outcome;

        Evaluation(NDList arrays, double normalizer, VocabSegment.Outcome outcome) {
            arrays.forEach(array -> this.arrays.add(new WeakReference<>(array)));
            this.versions = versions(arrays);
            this.normalizer = normalizer;
            this.outcome = outcome;
        }

        boolean isOf(NDList others, double divisor) {
            if (others.size() != arrays.size() || Double.compare(normalizer, divisor) != 0) {
                return false;
            }
            for (int i = 0; i < arrays.size(); i++) {
                if (!arrays.get(i).refersTo(others.get(i))) {
                    return false;
                }
            }
            // a head trained on fixed hidden states comes in the same arrays at every step
            return Arrays.equals(versions, versions(others));
        }

        NDArray toArray(NDManager manager) {
            return outcome.shape().dimension() == 0
                    ? manager.create(outcome.values()[0])
                    : manager.create(outcome.values(), outcome.shape());
        }

        VocabSegment.Outcome outcome() {
            return outcome;
        }

        private static long[] versions(NDList arrays) {
            return arrays.stream().mapToLong(ArrayKernels::version).toArray();
        }
    }

    /**
     * Creates a builder.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Builds a {@link RingDtpLoss}. */
    public static final class Builder {

        private String name = "RingDtpLoss";
        private long ignoreIndex = -100;
        private Reduction reduction = Reduction.MEAN;
        private double labelSmoothing;
        private double logitScale = 1;
        private double softcap;
        private double zLoss;
        private DoubleSupplier normalizer;
        private int blockTokens = 512;

        Builder() {}

        /**
         * Sets the loss's name among the evaluators.
         *
         * @param name the name
         * @return this builder
         */
        public Builder optName(String name) {
            this.name = name;
            return this;
        }

        /**
         * Sets the label of tokens that do not count. The default is -100.
         *
         * @param ignoreIndex any number, also one of the vocabulary
         * @return this builder
         */
        public Builder optIgnoreIndex(long ignoreIndex) {
            this.ignoreIndex = ignoreIndex;
            return this;
        }

        /**
         * Sets how the losses of tokens become the loss of a batch. The default is the mean.
         *
         * @param reduction the reduction
         * @return this builder
         */
        public Builder optReduction(Reduction reduction) {
            this.reduction = reduction;
            return this;
        }

        /**
         * Sets the share of the target that is spread evenly over the vocabulary. The default is 0.
         *
         * @param labelSmoothing a number in [0, 1)
         * @return this builder
         */
        public Builder optLabelSmoothing(double labelSmoothing) {
            this.labelSmoothing = labelSmoothing;
            return this;
        }

        /**
         * Sets what logits are multiplied with, the bias included. The default is 1.
         *
         * @param logitScale a positive number
         * @return this builder
         */
        public Builder optLogitScale(double logitScale) {
            this.logitScale = logitScale;
            return this;
        }

        /**
         * Sets the bound c of logits, which become c tanh(logit / c) after scaling. The default is
         * 0, no bound.
         *
         * @param softcap a positive number, or 0
         * @return this builder
         */
        public Builder optSoftcap(double softcap) {
            this.softcap = softcap;
            return this;
        }

        /**
         * Sets the weight of the squared log-sum-exp in the loss, which keeps logits from drifting.
         * The default is 0.
         *
         * @param zLoss a number that is not negative
         * @return this builder
         */
        public Builder optZLoss(double zLoss) {
            this.zLoss = zLoss;
            return this;
        }

        /**
         * Sets what {@link Reduction#MEAN} divides by in place of the batch's number of valid
         * tokens. With gradients accumulated over several batches, this is the number of valid
         * tokens in all of them ({@link RingDtpLoss#validTokens}): the mean of means would be
         * wrong.
         *
         * @param normalizer asked at every evaluation
         * @return this builder
         */
        public Builder optNormalizer(DoubleSupplier normalizer) {
            this.normalizer = normalizer;
            return this;
        }

        /**
         * Sets how many tokens have logits at a time. The result does not depend on it. The default
         * is 512.
         *
         * @param blockTokens a positive number
         * @return this builder
         */
        public Builder optBlockTokens(int blockTokens) {
            this.blockTokens = blockTokens;
            return this;
        }

        /**
         * Builds the loss.
         *
         * @return the loss
         * @throws IllegalArgumentException if an option is out of its range
         */
        public RingDtpLoss build() {
            require(labelSmoothing >= 0 && labelSmoothing < 1, "labelSmoothing", labelSmoothing);
            require(logitScale > 0 && Double.isFinite(logitScale), "logitScale", logitScale);
            require(softcap >= 0 && Double.isFinite(softcap), "softcap", softcap);
            require(zLoss >= 0 && Double.isFinite(zLoss), "zLoss", zLoss);
            require(blockTokens > 0, "blockTokens", blockTokens);
            require(
                    normalizer == null || reduction == Reduction.MEAN,
                    "normalizer without reduction MEAN",
                    reduction);
            return new RingDtpLoss(this);
        }

        private static void require(boolean holds, String option, Object value) {
            if (!holds) {
                throw new IllegalArgumentException(option + " is out of range: " + value);
            }
        }
    }
}
