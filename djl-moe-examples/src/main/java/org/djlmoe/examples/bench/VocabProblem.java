package org.djlmoe.examples.bench;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import org.djlmoe.vocab.RingDtpLoss;
import org.djlmoe.vocab.RingDtpLoss.Reduction;

/** Hidden states, a weight and labels; the same in every child. */
final class VocabProblem implements AutoCloseable {

    static final double SCALE = 0.5;
    static final double SOFTCAP = 8;
    static final double SMOOTHING = 0.1;
    static final double Z_LOSS = 1e-3;
    static final long IGNORED = -100;

    /** What the loss is made of. */
    enum Kind {
        /** The mean over all tokens. */
        MEAN,
        /** A loss for each token, with a random upstream gradient. */
        NONE,
        /**
         * Every option at once: ignored labels, weights, smoothing, scale, softcap, z-loss, bias.
         */
        ALL_OPTIONS
    }

    final Kind kind;
    final NDManager manager;
    final NDArray hidden;
    final NDArray weight;
    final NDArray bias;
    final NDArray labels;
    final NDArray tokenWeights;
    final NDArray upstream;
    private final int blockTokens;

    VocabProblem(Kind kind, CaseSettings settings) {
        this.kind = kind;
        long tokens = settings.number("tokens");
        long size = settings.number("hidden");
        long vocab = settings.number("vocab");
        blockTokens = settings.number("block");
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        manager.getEngine().setRandomSeed(settings.number("seed"));
        hidden = manager.randomNormal(new Shape(tokens, size));
        weight = manager.randomNormal(0, 0.05f, new Shape(vocab, size), DataType.FLOAT32);
        NDArray ids = manager.randomInteger(0, vocab, new Shape(tokens), DataType.INT64);
        NDArray perToken = manager.randomUniform(0, 2, new Shape(tokens));
        boolean all = kind == Kind.ALL_OPTIONS;
        if (all) {
            NDArray every7th = manager.arange(tokens).mod(7).eq(3).toType(DataType.INT64, false);
            labels = ids.mul(every7th.mul(-1).add(1)).add(every7th.mul(IGNORED));
        } else {
            labels = ids;
        }
        bias = all ? manager.randomNormal(new Shape(vocab)) : null;
        tokenWeights = all ? perToken : null;
        upstream = kind == Kind.NONE ? perToken : null;
    }

    NDList labels() {
        return tokenWeights == null ? new NDList(labels) : new NDList(labels, tokenWeights);
    }

    NDList predictions() {
        return bias == null ? new NDList(hidden, weight) : new NDList(hidden, weight, bias);
    }

    RingDtpLoss loss() {
        RingDtpLoss.Builder loss = RingDtpLoss.builder().optBlockTokens(blockTokens);
        if (kind == Kind.NONE) {
            loss.optReduction(Reduction.NONE);
        } else if (kind == Kind.ALL_OPTIONS) {
            loss.optLogitScale(SCALE)
                    .optSoftcap(SOFTCAP)
                    .optLabelSmoothing(SMOOTHING)
                    .optZLoss(Z_LOSS)
                    .optIgnoreIndex(IGNORED);
        }
        return loss.build();
    }

    @Override
    public void close() {
        manager.close();
    }
}
