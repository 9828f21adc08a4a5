package org.djlmoe.kernel;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;

/**
 * Vocabulary projection and cross-entropy by blocks of tokens: logits exist for one block at a
 * time, in scratch memory that the blocks of a call share.
 *
 * <p>With logit = cap tanh(scale (x w + bias) / cap), lse their log-sum-exp, y the label's and s
 * the sum of all, eps the smoothing and zeta the z-loss, a token's loss is
 *
 * <pre>factor [(1 - eps) (lse - y) + eps (lse - s / V) + zeta lse^2]</pre>
 *
 * <p>Everything is computed in F32, whatever the types of the inputs; of a weight in another type a
 * copy in F32 exists while a call runs.
 *
 * <p>Scratch: {@code blockTokens * V * 4} bytes, twice that with a softcap.
 */
public final class VocabKernels {

    private static final TorchKernels KERNELS = TorchKernels.load(VocabKernels.class, "vocab.py");

    private VocabKernels() {}

    /**
     * The terms of the loss.
     *
     * @param logitScale multiplies the logits; 1 for none
     * @param softcap bounds the logits smoothly; 0 for none
     * @param labelSmoothing the share of the target that is spread evenly over the vocabulary
     * @param zLoss the weight of the squared log-sum-exp
     */
    public record Terms(double logitScale, double softcap, double labelSmoothing, double zLoss) {}

    /**
     * What is projected onto the vocabulary.
     *
     * @param hidden hidden states, shape (..., H)
     * @param weight the projection's weight, shape (V, H)
     * @param bias the projection's bias, shape (V), or null
     */
    public record Projection(NDArray hidden, NDArray weight, NDArray bias) {}

    /**
     * The tokens that count.
     *
     * @param rows their numbers among all tokens, shape (n)
     * @param labels their labels, shape (n)
     * @param firstWrong the number of the first token with an unusable label, or -1
     */
    public record Tokens(NDArray rows, NDArray labels, long firstWrong) {

        /**
         * Returns the number of tokens.
         *
         * @return n
         */
        public long count() {
            return rows.size();
        }
    }

    /**
     * Arrays in F32 that are overwritten with gradients, each of its input's shape, or null where
     * no gradient is wanted.
     *
     * @param hidden the gradient of the hidden states
     * @param weight the gradient of the weight
     * @param bias the gradient of the bias
     */
    public record Gradients(NDArray hidden, NDArray weight, NDArray bias) {

        /** No gradients: forward only. */
        public static final Gradients NONE = new Gradients(null, null, null);
    }

    /**
     * How well tokens were predicted, whatever their factors.
     *
     * @param nll the negative log-likelihoods of the labels, F32, shape (n), or null
     * @param best the likeliest ids, INT64, shape (n), or null
     */
    public record Scores(NDArray nll, NDArray best) {

        /** Not asked for. */
        public static final Scores NONE = new Scores(null, null);

        /**
         * Creates arrays to be filled.
         *
         * @param manager their owner
         * @param tokens the tokens
         * @return the arrays
         */
        public static Scores create(NDManager manager, Tokens tokens) {
            Shape shape = new Shape(tokens.count());
            return new Scores(manager.create(shape), manager.create(shape, DataType.INT64));
        }

        /**
         * Adds up, in double precision.
         *
         * @param tokens the tokens
         * @return the sum of the negative log-likelihoods and the number of right predictions
         */
        public double[] totals(Tokens tokens) {
            try (NDArray sums =
                    KERNELS.call(nll.getManager(), "scores", nll, best, tokens.labels()).head()) {
                return sums.toDoubleArray();
            }
        }
    }

    /**
     * Finds the tokens whose label is not the ignored one.
     *
     * @param manager the owner of the result
     * @param labels labels of any numeric type and shape
     * @param ignoreIndex the ignored label
     * @param vocabSize V; a label is usable if it is a whole number in [0, V)
     * @return the tokens
     */
    public static Tokens tokens(
            NDManager manager, NDArray labels, long ignoreIndex, long vocabSize) {
        NDList found = KERNELS.call(manager, "tokens", labels, ignoreIndex, vocabSize);
        try (NDArray wrong = found.get(2)) {
            return new Tokens(found.get(0), found.get(1), wrong.toLongArray()[0]);
        }
    }

    /**
     * Computes the factor of each token.
     *
     * @param manager the owner of the result
     * @param tokens the tokens
     * @param weights a weight for each of all tokens, or null
     * @param upstream an upstream gradient for each of all tokens, or null
     * @param scale a number for all of them
     * @return the products, shape (n)
     */
    public static NDArray factors(
            NDManager manager, Tokens tokens, NDArray weights, NDArray upstream, double scale) {
        return KERNELS.call(
                        manager,
                        "factors",
                        tokens.rows(),
                        orNothing(weights),
                        orNothing(upstream),
                        scale)
                .head();
    }

    /**
     * Computes losses and, if wanted, gradients of their sum in the same pass, with three matrix
     * products a block.
     *
     * @param projection the inputs
     * @param tokens the tokens that count
     * @param factors one a token
     * @param terms the terms of the loss
     * @param blockTokens the tokens of a block
     * @param losses overwritten with the tokens' losses, shape (n)
     * @param lse overwritten with the log-sum-exp of the tokens' logits, shape (n)
     * @param scores overwritten if not {@link Scores#NONE}
     * @param gradients overwritten where wanted
     */
    public static void fused(
            Projection projection,
            Tokens tokens,
            NDArray factors,
            Terms terms,
            int blockTokens,
            NDArray losses,
            NDArray lse,
            Scores scores,
            Gradients gradients) {
        KERNELS.run(
                "fused",
                projection.hidden(),
                projection.weight(),
                orNothing(projection.bias()),
                tokens.rows(),
                tokens.labels(),
                factors,
                terms.logitScale(),
                terms.softcap(),
                terms.labelSmoothing(),
                terms.zLoss(),
                blockTokens,
                losses,
                lse,
                orNothing(scores.nll()),
                orNothing(scores.best()),
                orNothing(gradients.hidden()),
                orNothing(gradients.weight()),
                orNothing(gradients.bias()));
    }

    /**
     * Computes gradients from the log-sum-exp of an earlier {@link #fused}, with three matrix
     * products a block.
     *
     * @param projection the inputs
     * @param tokens the tokens that count
     * @param factors one a token, upstream gradients included
     * @param terms the terms of the loss
     * @param blockTokens the tokens of a block
     * @param lse the log-sum-exp of the tokens' logits, shape (n)
     * @param gradients overwritten where wanted
     */
    public static void backward(
            Projection projection,
            Tokens tokens,
            NDArray factors,
            Terms terms,
            int blockTokens,
            NDArray lse,
            Gradients gradients) {
        KERNELS.run(
                "backward",
                projection.hidden(),
                projection.weight(),
                orNothing(projection.bias()),
                tokens.rows(),
                tokens.labels(),
                factors,
                terms.logitScale(),
                terms.softcap(),
                terms.labelSmoothing(),
                terms.zLoss(),
                blockTokens,
                lse,
                orNothing(gradients.hidden()),
                orNothing(gradients.weight()),
                orNothing(gradients.bias()));
    }

    /**
     * Adds up losses, in double precision.
     *
     * @param losses the tokens' losses
     * @param lse the log-sum-exp of the tokens' logits
     * @param factors one a token
     * @param zLoss the weight of the squared log-sum-exp
     * @return the sum of the losses and the part of it that is z-loss
     */
    public static double[] totals(NDArray losses, NDArray lse, NDArray factors, double zLoss) {
        try (NDArray sums =
                KERNELS.call(losses.getManager(), "totals", losses, lse, factors, zLoss).head()) {
            return sums.toDoubleArray();
        }
    }

    /**
     * Puts losses at their tokens' places, and zero at all others.
     *
     * @param out overwritten, one a token of all
     * @param tokens the tokens
     * @param losses one a token
     */
    public static void spread(NDArray out, Tokens tokens, NDArray losses) {
        KERNELS.run("spread", out, tokens.rows(), losses);
    }

    /**
     * Converts an array to the type of another, which need not be a type that DJL knows.
     *
     * @param manager the owner of the result
     * @param array the array
     * @param like an array of the wanted type
     * @return the converted array, an ordinary one
     */
    public static NDArray cast(NDManager manager, NDArray array, NDArray like) {
        return KERNELS.record(manager, "cast", array, like).head();
    }

    /**
     * Computes the loss of every token by operations that are recorded under gradient mode. Not
     * bounded: all logits exist at once.
     *
     * @param manager the owner of the results
     * @param projection the inputs
     * @param labels labels, all of them usable or ignored
     * @param ignoreIndex the ignored label
     * @param weights a weight for each token, or null
     * @param terms the terms of the loss
     * @param scale a factor for all losses
     * @return the losses, of the labels' shape, zero at ignored labels; and the sum of their z-loss
     */
    public static NDList plain(
            NDManager manager,
            Projection projection,
            NDArray labels,
            long ignoreIndex,
            NDArray weights,
            Terms terms,
            double scale) {
        double[] options = {
            terms.logitScale(),
            terms.softcap(),
            terms.labelSmoothing(),
            terms.zLoss(),
            ignoreIndex,
            scale
        };
        try (NDArray numbers = manager.create(options)) {
            return KERNELS.record(
                    manager,
                    "plain",
                    projection.hidden(),
                    projection.weight(),
                    orNothing(projection.bias()),
                    labels,
                    orNothing(weights),
                    numbers);
        }
    }

    private static NDArray orNothing(NDArray array) {
        return array == null ? TorchKernels.nothing() : array;
    }
}
