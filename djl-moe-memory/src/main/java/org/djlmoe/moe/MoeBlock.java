package org.djlmoe.moe;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.util.PairList;
import org.djlmoe.autograd.RowSegment;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.Tape;
import org.djlmoe.dispatch.ChunkSchedule;
import org.djlmoe.expert.Experts;
import org.djlmoe.kernel.NormKernels;
import org.djlmoe.routing.Router;

/**
 * A Mixture-of-Experts feed-forward layer with bounded memory: {@code y = x + experts(norm(x))},
 * norm and residual optional.
 *
 * <p>The idea: everything in the layer is token-wise, so the whole of it runs chunk by chunk in
 * both directions. Under a {@code BoundedTrainer} it keeps its input and the routing (k ids and
 * weights a token) until backward, which repeats norm, gate and up projection and skips the down
 * projection. Routing is never repeated: repeated routing that picks other experts is a silent
 * error.
 *
 * <p>Bound above inputs, outputs and weights: O(c (H + k) + busiest expert of a chunk * (H + 4 I))
 * with c tokens a chunk, forward and backward, whatever the router does. A chunk takes every K-th
 * token.
 *
 * <ul>
 *   <li>input and output: [..., H]
 *   <li>parameters: {@code post_attention_layernorm.weight} [H] if there is a norm, those of {@link
 *       Router} and {@link Experts}
 * </ul>
 */
public final class MoeBlock extends AbstractBlock {

    private final int hidden;
    private final Parameter norm;
    private final Router router;
    private final Experts experts;
    private final double eps;
    private final boolean residual;
    private final int chunkTokens;
    private final int maxChunks;
    private double balanceCoefficient;

    private MoeBlock(Builder builder) {
        this.hidden = builder.hidden;
        this.eps = builder.eps;
        this.residual = builder.residual;
        this.chunkTokens = builder.chunkTokens;
        this.maxChunks = builder.maxChunks;
        this.norm =
                builder.norm
                        ? addParameter(
                                Parameter.builder()
                                        .setName("post_attention_layernorm.weight")
                                        .setType(Parameter.Type.GAMMA)
                                        .optInitializer(Initializer.ONES)
                                        .optShape(new Shape(hidden))
                                        .build())
                        : null;
        this.router =
                addChildBlock(
                        "router",
                        new Router(
                                hidden,
                                builder.experts,
                                builder.topK,
                                builder.renormalize,
                                builder.initializerRange));
        this.experts =
                addChildBlock(
                        "experts",
                        new Experts(
                                builder.experts, hidden, builder.inner, builder.initializerRange));
    }

    /**
     * Returns a builder.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Returns the norm's weight.
     *
     * @return [H], or null without norm
     */
    public Parameter norm() {
        return norm;
    }

    /**
     * Returns the router.
     *
     * @return the router
     */
    public Router router() {
        return router;
    }

    /**
     * Returns the experts.
     *
     * @return the experts
     */
    public Experts experts() {
        return experts;
    }

    /**
     * Has backward add the gradient of a balance loss, {@code coefficient * E * sum f_e P_e} with
     * f_e the number of routes to expert e a token and P_e the mean probability of e: it spreads
     * the tokens over the experts. The loss itself is not part of what is reported. It takes a
     * {@code BoundedTrainer}, and a main loss that is a mean.
     *
     * <p>Source: W. Fedus et al., "Switch Transformers", arXiv 2101.03961, as Mixtral applies it.
     *
     * @param coefficient 0 for none
     */
    public void setBalanceCoefficient(double coefficient) {
        if (!(coefficient >= 0) || Double.isInfinite(coefficient)) {
            throw new IllegalArgumentException(
                    "The balance coefficient must be finite and not negative, not " + coefficient);
        }
        balanceCoefficient = coefficient;
    }

    double balanceCoefficient() {
        return balanceCoefficient;
    }

    double eps() {
        return eps;
    }

    boolean hasResidual() {
        return residual;
    }

    /**
     * Returns K, the number of chunks for N tokens: one per {@code chunkTokens}, at most {@code
     * maxChunks}.
     *
     * @param tokens N
     * @return at least 1
     */
    public int chunks(long tokens) {
        return ChunkSchedule.numChunks(tokens, chunkTokens, maxChunks);
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray x = inputs.singletonOrThrow();
        Shape shape = x.getShape();
        if (shape.getLastDimension() != hidden) {
            throw new IllegalArgumentException(
                    "MoeBlock expects a last axis of " + hidden + ", got " + shape);
        }
        Segment segment = new MoeSegment(this, parameterStore, training);
        return Tape.apply(
                shape.dimension() == 2 ? segment : new RowSegment(segment), new NDList(x));
    }

    /** The layer from its parts, differentiable and unbounded. */
    NDArray plain(ParameterStore parameterStore, NDArray x, boolean training) {
        if (training && balanceCoefficient > 0) {
            throw new IllegalStateException(
                    "The balance loss of a MoeBlock needs a BoundedTrainer; set its coefficient to 0"
                            + " to train without one");
        }
        NDArray h =
                norm == null
                        ? x
                        : NormKernels.rmsNormPlain(
                                x, parameterStore.getValue(norm, x.getDevice(), training), eps);
        NDList chosen = router.forward(parameterStore, new NDList(h), training);
        NDArray y =
                experts.forward(
                                parameterStore,
                                new NDList(h, chosen.get(0), chosen.get(1)),
                                training)
                        .singletonOrThrow();
        return residual ? x.add(y) : y;
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType dataType, Shape... shapes) {
        router.initialize(manager, dataType, new Shape(-1, hidden));
        experts.initialize(manager, dataType, new Shape(-1, hidden));
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return new Shape[] {inputShapes[0]};
    }

    /** Builds a {@link MoeBlock}. */
    public static final class Builder {

        private int hidden;
        private int inner;
        private int experts;
        private int topK;
        private boolean norm;
        private double eps = 1e-5;
        private boolean residual;
        private boolean renormalize = true;
        private double initializerRange = 0.02;
        private int chunkTokens = 4096;
        private int maxChunks = 10;

        Builder() {}

        /**
         * Sets H.
         *
         * @param value width of the hidden states
         * @return this builder
         */
        public Builder setHiddenSize(int value) {
            hidden = value;
            return this;
        }

        /**
         * Sets I.
         *
         * @param value width of an expert
         * @return this builder
         */
        public Builder setIntermediateSize(int value) {
            inner = value;
            return this;
        }

        /**
         * Sets E.
         *
         * @param value number of experts
         * @return this builder
         */
        public Builder setNumExperts(int value) {
            experts = value;
            return this;
        }

        /**
         * Sets k.
         *
         * @param value experts a token
         * @return this builder
         */
        public Builder setTopK(int value) {
            topK = value;
            return this;
        }

        /**
         * Puts a root mean square norm before router and experts.
         *
         * @param epsilon added to the mean square
         * @return this builder
         */
        public Builder optNorm(double epsilon) {
            norm = true;
            eps = epsilon;
            return this;
        }

        /**
         * Sets whether the input is added to the output. Default: false.
         *
         * @param value whether it is
         * @return this builder
         */
        public Builder optResidual(boolean value) {
            residual = value;
            return this;
        }

        /**
         * Sets whether the combine weights of a token are divided by their sum. Default: true.
         *
         * @param value whether they are
         * @return this builder
         */
        public Builder optRenormalize(boolean value) {
            renormalize = value;
            return this;
        }

        /**
         * Sets the standard deviation of the initial weights. Default: 0.02.
         *
         * @param value the deviation
         * @return this builder
         */
        public Builder optInitializerRange(double value) {
            initializerRange = value;
            return this;
        }

        /**
         * Sets how many tokens a chunk should have at most. Default: 4096.
         *
         * @param value c
         * @return this builder
         */
        public Builder optChunkTokens(int value) {
            chunkTokens = value;
            return this;
        }

        /**
         * Sets how many chunks there are at most; where it binds, chunks grow beyond c tokens.
         * Default: 10.
         *
         * @param value the largest K
         * @return this builder
         */
        public Builder optMaxChunks(int value) {
            maxChunks = value;
            return this;
        }

        /**
         * Builds the block.
         *
         * @return the block
         * @throws IllegalArgumentException if a size is missing or not positive
         */
        public MoeBlock build() {
            positive("hiddenSize", hidden);
            positive("intermediateSize", inner);
            positive("numExperts", experts);
            positive("topK", topK);
            positive("chunkTokens", chunkTokens);
            positive("maxChunks", maxChunks);
            return new MoeBlock(this);
        }

        private static void positive(String name, int value) {
            if (value < 1) {
                throw new IllegalArgumentException(
                        "MoeBlock needs a positive " + name + ", got " + value);
            }
        }
    }
}
