package org.djlmoe.vocab;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.Arrays;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.kernel.VocabKernels;
import org.djlmoe.kernel.VocabKernels.Gradients;
import org.djlmoe.kernel.VocabKernels.Projection;
import org.djlmoe.kernel.VocabKernels.Tokens;

/**
 * The loss of one batch on one rank. Inputs: hidden, weight and perhaps bias.
 *
 * <p>A scalar loss saves its gradients, which backward scales with the upstream number. A loss a
 * token saves the log-sum-exp and the weight of every token, with which backward recomputes.
 */
final class VocabSegment implements Segment {

    private static final String[] NAMES = {"hidden", "weight", "bias"};

    private final LossSettings settings;
    private final double normalizer;
    private final NDArray labels;
    private final NDArray weights;
    private final boolean[] wanted;
    private final boolean scored;
    private Outcome outcome;

    /**
     * @param settings the loss's options
     * @param normalizer what a mean divides by, or NaN for the number of valid tokens
     * @param labels a label for each token
     * @param weights a weight for each token, or null
     * @param wanted which inputs need a gradient
     * @param scored whether to count how well tokens are predicted
     */
    VocabSegment(
            LossSettings settings,
            double normalizer,
            NDArray labels,
            NDArray weights,
            boolean[] wanted,
            boolean scored) {
        this.settings = settings;
        this.normalizer = normalizer;
        this.labels = labels;
        this.weights = weights;
        this.wanted = wanted;
        this.scored = scored;
    }

    /**
     * What remains of an evaluation.
     *
     * @param values the loss
     * @param shape its shape
     * @param tokens the number of tokens that count
     * @param tokenLosses the sum of their losses, whatever the loss divides by
     * @param zLoss the part of the loss that is z-loss
     * @param scores how well tokens were predicted, or null
     */
    record Outcome(
            float[] values,
            Shape shape,
            long tokens,
            double tokenLosses,
            double zLoss,
            Scores scores) {}

    /**
     * How well tokens were predicted, each that counts alike.
     *
     * @param tokens their number
     * @param nll the sum of the negative log-likelihoods of their labels
     * @param correct how many labels were the likeliest id
     */
    record Scores(long tokens, double nll, long correct) {}

    /** Returns the outcome of the forward pass. */
    Outcome outcome() {
        return outcome;
    }

    private boolean isVector() {
        return settings.reduction() == RingDtpLoss.Reduction.NONE;
    }

    private static Projection projection(NDList inputs) {
        return new Projection(
                inputs.get(0), inputs.get(1), inputs.size() > 2 ? inputs.get(2) : null);
    }

    private Tokens tokens(NDManager manager, Projection projection) {
        long vocabSize = projection.weight().getShape().get(0);
        Tokens tokens = VocabKernels.tokens(manager, labels, settings.ignoreIndex(), vocabSize);
        long wrong = tokens.firstWrong();
        if (wrong >= 0) {
            long[] shape = labels.getShape().getShape();
            long[] position = new long[shape.length];
            for (int axis = shape.length - 1; axis >= 0; axis--) {
                position[axis] = wrong % shape[axis];
                wrong /= shape[axis];
            }
            Number label =
                    labels.reshape(-1)
                            .toType(DataType.FLOAT64, true)
                            .getDouble(tokens.firstWrong());
            throw new IllegalArgumentException(
                    "Label "
                            + (label.doubleValue() == label.longValue() ? label.longValue() : label)
                            + " at position "
                            + Arrays.toString(position)
                            + " is neither in [0, "
                            + vocabSize
                            + ") nor the ignored label "
                            + settings.ignoreIndex());
        }
        return tokens;
    }

    @Override
    public NDList forward(SegmentContext context, NDList inputs) {
        NDManager manager = context.manager();
        Projection projection = projection(inputs);
        Tokens tokens = tokens(manager, projection);
        double scale = settings.scale(tokens.count(), normalizer);
        NDArray factors = VocabKernels.factors(manager, tokens, weights, null, scale);
        NDArray losses = manager.create(new Shape(tokens.count()));
        NDArray lse = manager.create(new Shape(tokens.count()));
        Gradients gradients =
                context.isRecording() && !isVector() ? allocate(manager, inputs) : Gradients.NONE;
        VocabKernels.Scores scores =
                scored ? VocabKernels.Scores.create(manager, tokens) : VocabKernels.Scores.NONE;
        VocabKernels.fused(
                projection,
                tokens,
                factors,
                settings.terms(),
                settings.blockTokens(),
                losses,
                lse,
                scores,
                gradients);
        if (context.isRecording()) {
            if (isVector()) {
                context.save("rows", tokens.rows());
                context.save("labels", tokens.labels());
                context.save("lse", lse);
                if (weights != null) {
                    // The caller may close or change its own before backward.
                    context.save("weights", weights.duplicate());
                }
            } else {
                save(context, gradients.hidden(), 0);
                save(context, gradients.weight(), 1);
                save(context, gradients.bias(), 2);
            }
        }
        double[] totals = VocabKernels.totals(losses, lse, factors, settings.terms().zLoss());
        NDArray loss;
        if (isVector()) {
            loss = manager.create(labels.getShape());
            VocabKernels.spread(loss, tokens, losses);
        } else {
            loss = manager.create((float) totals[0]);
        }
        outcome =
                outcome(
                        loss,
                        tokens.count(),
                        scale,
                        totals[0],
                        totals[1],
                        scored ? totals(scores, tokens) : null);
        return new NDList(loss);
    }

    private static Outcome outcome(
            NDArray loss, long tokens, double scale, double total, double zLoss, Scores scores) {
        double tokenLosses = tokens == 0 ? 0 : total / scale;
        return new Outcome(
                loss.toFloatArray(), loss.getShape(), tokens, tokenLosses, zLoss, scores);
    }

    private static Scores totals(VocabKernels.Scores scores, Tokens tokens) {
        double[] totals = scores.totals(tokens);
        return new Scores(tokens.count(), totals[0], (long) totals[1]);
    }

    private Gradients allocate(NDManager manager, NDList inputs) {
        NDArray[] arrays = new NDArray[NAMES.length];
        for (int i = 0; i < inputs.size(); i++) {
            if (wanted[i]) {
                arrays[i] = manager.create(inputs.get(i).getShape());
            }
        }
        return new Gradients(arrays[0], arrays[1], arrays[2]);
    }

    private static void save(SegmentContext context, NDArray gradient, int input) {
        if (gradient != null) {
            context.save(NAMES[input], gradient);
        }
    }

    @Override
    public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
        NDArray[] found = new NDArray[NAMES.length];
        if (isVector()) {
            Tokens tokens = new Tokens(context.get("rows"), context.get("labels"), -1);
            Gradients gradients = allocate(context.manager(), inputs);
            VocabKernels.backward(
                    projection(inputs),
                    tokens,
                    VocabKernels.factors(
                            context.manager(),
                            tokens,
                            weights == null ? null : context.get("weights"),
                            outputGradients.head(),
                            1),
                    settings.terms(),
                    settings.blockTokens(),
                    context.get("lse"),
                    gradients);
            found[0] = gradients.hidden();
            found[1] = gradients.weight();
            found[2] = gradients.bias();
        } else {
            float upstream = outputGradients.head().getFloat();
            for (int i = 0; i < inputs.size(); i++) {
                if (wanted[i]) {
                    found[i] = context.get(NAMES[i]);
                    if (upstream != 1) {
                        found[i].muli(upstream);
                    }
                }
            }
        }
        NDList gradients = new NDList();
        for (int i = 0; i < inputs.size(); i++) {
            if (wanted[i] && inputs.get(i).getDataType() != DataType.FLOAT32) {
                try (NDArray wide = found[i]) {
                    found[i] = VocabKernels.cast(context.manager(), wide, inputs.get(i));
                }
            }
            gradients.add(wanted[i] ? context.handOver(found[i]) : null);
        }
        return gradients;
    }

    /** Weight and bias are inputs, so nothing is left that could train. */
    @Override
    public boolean hasTrainableParameters() {
        return false;
    }

    @Override
    public NDList plain(NDList inputs) {
        NDManager manager = inputs.head().getManager();
        Projection projection = projection(inputs);
        long count;
        try (NDManager scratch = manager.newSubManager()) {
            count = tokens(scratch, projection).count();
        }
        double scale = settings.scale(count, normalizer);
        NDList made =
                VocabKernels.plain(
                        manager,
                        projection,
                        labels,
                        settings.ignoreIndex(),
                        weights,
                        settings.terms(),
                        scale);
        NDArray total = made.get(0).sum();
        NDArray loss = isVector() ? made.get(0) : total;
        outcome = outcome(loss, count, scale, total.getFloat(), made.get(1).getFloat(), null);
        return new NDList(loss);
    }
}
