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
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Optional;
import java.util.function.UnaryOperator;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.StepListener;
import org.djlmoe.autograd.Tape;
import org.djlmoe.dispatch.ChunkSchedule;
import org.djlmoe.dispatch.PipelinedDispatch;
import org.djlmoe.expert.Experts;
import org.djlmoe.expert.SharedExperts;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.NormKernels;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.parallel.ProcessGroup;
import org.djlmoe.routing.Router;
import org.djlmoe.routing.RoutingStatistics;

/**
 * A Mixture-of-Experts feed-forward layer with bounded memory: {@code y = x + experts(norm(x))},
 * norm and residual optional.
 *
 * <p>The idea: everything in the layer is token-wise, so the whole of it runs on a part of the rows
 * at a time, in both directions. Under a {@code BoundedTrainer} it keeps its input and the routing
 * (k ids and weights a token) until backward, which repeats norm, gate and up projection and skips
 * the down projection. Routing is never repeated: repeated routing that picks other experts is a
 * silent error.
 *
 * <p>Bound above inputs, outputs and weights, whatever the router does: 2 I + H numbers forward and
 * 5 I + 2 H backward for each of {@code max(512, c k / E)} rows, with c tokens a chunk; and k ids
 * and weights a token with their order by expert. Shared experts run in the same memory; if they
 * are wider than I, their width counts in place of I. No token is ever dropped. Over several ranks
 * ({@link Builder#optGroup(ProcessGroup)}) the bound is that of {@link PipelinedDispatch}, and with
 * a norm N H numbers for the normed rows.
 *
 * <p>Two losses keep the router in order, computed in every forward pass of training: the balance
 * loss E * sum f_e P_e, with f_e the number of routes to expert e a token and P_e its mean
 * probability, which is k if all is even; and the z-loss, the mean squared log-sum-exp of the
 * logits. With a coefficient the block adds their gradients to those of the objective by itself:
 * {@code coefficient * loss} once a forward pass, whatever the main loss is multiplied by, so
 * divide a coefficient by the number of batches where a step accumulates several. {@link
 * #statistics} tells their values. Or {@link Builder#optLossOutputs} hands them out, for a loss
 * function of your own. Under DJL's trainer all this works as well; a coefficient costs one more
 * backward through the network before each such block there.
 *
 * <p>Router and losses compute in F32, also for FLOAT16 inputs, whose output is FLOAT16 again.
 *
 * <ul>
 *   <li>input: [..., H], and optionally a mask [...] with 0 for tokens (padding) that do not count
 *       in losses, statistics and balancing; they pass through the layer like others
 *   <li>output: [..., H]; with loss outputs also balance loss and z-loss, () each
 *   <li>parameters: {@code post_attention_layernorm.weight} [H] if there is a norm, those of {@link
 *       Router}, {@link Experts} and {@link SharedExperts}
 * </ul>
 *
 * <p>Source: W. Fedus et al., "Switch Transformers", arXiv 2101.03961, for the balance loss, in the
 * form of Mixtral; B. Zoph et al., "ST-MoE", arXiv 2202.08906, for the z-loss.
 */
public final class MoeBlock extends AbstractBlock implements StepListener {

    private final int hidden;
    private final Parameter norm;
    private final Router router;
    private final Experts experts;
    private final SharedExperts shared;
    private final double eps;
    private final boolean residual;
    private final int chunkTokens;
    private final int maxChunks;
    private final boolean lossOutputs;
    private final PipelinedDispatch dispatch;
    private final ProcessGroup group;
    private double balanceCoefficient;
    private double zCoefficient;
    private volatile RoutingStatistics statistics;

    private MoeBlock(Builder builder) {
        this.hidden = builder.hidden;
        this.eps = builder.eps;
        this.residual = builder.residual;
        this.chunkTokens = builder.chunkTokens;
        this.maxChunks = builder.maxChunks;
        this.lossOutputs = builder.lossOutputs;
        this.dispatch = builder.dispatch();
        this.group = builder.group;
        setBalanceCoefficient(builder.balanceCoefficient);
        setZCoefficient(builder.zCoefficient);
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
                                builder.renormalize == null
                                        ? builder.topK > 1
                                        : builder.renormalize,
                                builder.initializerRange,
                                builder.balanceBias || builder.biasUpdateRate != 0,
                                builder.biasUpdateRate));
        this.experts =
                addChildBlock(
                        "experts",
                        new Experts(
                                dispatch == null ? builder.experts : dispatch.ownExperts(),
                                hidden,
                                builder.inner,
                                builder.initializerRange));
        this.shared =
                builder.sharedInner == 0
                        ? null
                        : addChildBlock(
                                "shared",
                                new SharedExperts(
                                        hidden,
                                        builder.sharedInner,
                                        builder.sharedGate,
                                        builder.initializerRange));
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
     * @return the experts; in a group of several ranks those of this rank
     */
    public Experts experts() {
        return experts;
    }

    /**
     * Returns the shared experts.
     *
     * @return the shared experts, or null without
     */
    public SharedExperts sharedExperts() {
        return shared;
    }

    /**
     * Returns what runs the experts over the ranks of a group: first expert, bytes sent, peak.
     *
     * @return the dispatch, or null if one process has all experts
     */
    public PipelinedDispatch dispatch() {
        return dispatch;
    }

    /**
     * Sets the coefficient with which the balance loss is part of the objective.
     *
     * @param coefficient 0 for none
     * @throws IllegalArgumentException if it is negative or not finite, or if the block hands its
     *     losses out, which would count them twice
     */
    public void setBalanceCoefficient(double coefficient) {
        balanceCoefficient = checked("balance coefficient", coefficient);
    }

    /**
     * Sets the coefficient with which the z-loss is part of the objective.
     *
     * @param coefficient 0 for none
     * @throws IllegalArgumentException as for {@link #setBalanceCoefficient}
     */
    public void setZCoefficient(double coefficient) {
        zCoefficient = checked("z-loss coefficient", coefficient);
    }

    private double checked(String name, double coefficient) {
        if (!(coefficient >= 0) || Double.isInfinite(coefficient)) {
            throw new IllegalArgumentException(
                    "The " + name + " must be finite and not negative, not " + coefficient);
        }
        if (lossOutputs && coefficient > 0) {
            throw new IllegalArgumentException(
                    "The losses of this block are outputs, which your loss adds; a "
                            + name
                            + " would count one of them twice: leave it at 0");
        }
        return coefficient;
    }

    double balanceCoefficient() {
        return balanceCoefficient;
    }

    double zCoefficient() {
        return zCoefficient;
    }

    boolean hasLossOutputs() {
        return lossOutputs;
    }

    /**
     * Returns what the router did in the last forward pass of training.
     *
     * @return the statistics; empty before the first
     */
    public Optional<RoutingStatistics> statistics() {
        return Optional.ofNullable(statistics);
    }

    /** Takes a router's sums; those of a pass that will be repeated do not count for balancing. */
    void report(double[] sums, boolean training, boolean counts) {
        if (training) {
            statistics = RoutingStatistics.of(sums);
            if (counts) {
                router.addLoad(statistics.routes());
            }
        }
    }

    /**
     * Moves the router's balancing bias, if it has one. A {@code BoundedTrainer} calls this; under
     * DJL's trainer call it after {@code trainer.step()}. Over several ranks it adds their loads
     * up, so all ranks take equally many steps.
     */
    @Override
    public void afterStep() {
        router.updateBalanceBias(dispatch == null ? UnaryOperator.identity() : this::overRanks);
    }

    private long[] overRanks(long[] load) {
        long[] sum = new long[load.length];
        for (long[] rank : group.allGather(load)) {
            Arrays.setAll(sum, e -> sum[e] + rank[e]);
        }
        return sum;
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

    /** Returns the tokens of the largest chunk. */
    long chunkRows(long tokens) {
        int chunks = chunks(tokens);
        return (tokens + chunks - 1) / chunks;
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray x = inputs.head();
        Shape shape = x.getShape();
        if (shape.getLastDimension() != hidden) {
            throw new IllegalArgumentException(
                    "MoeBlock expects a last axis of " + hidden + ", got " + shape);
        }
        boolean half = x.getDataType() == DataType.FLOAT16;
        if (!half && x.getDataType() != DataType.FLOAT32) {
            throw new IllegalArgumentException(
                    "MoeBlock takes FLOAT32 or FLOAT16 inputs, not " + x.getDataType());
        }
        Segment segment = new MoeSegment(this, parameterStore, mask(inputs), training);
        NDList outputs = Tape.apply(segment, new NDList(half ? ArrayKernels.convert(x, false) : x));
        return half ? inHalf(outputs) : outputs;
    }

    private static NDArray mask(NDList inputs) {
        if (inputs.size() == 1) {
            return TorchKernels.nothing();
        }
        Shape shape = inputs.head().getShape();
        NDArray mask = inputs.get(1);
        if (inputs.size() > 2 || !mask.getShape().equals(shape.slice(0, shape.dimension() - 1))) {
            throw new IllegalArgumentException(
                    "MoeBlock takes hidden states [..., H] and a mask [...], got " + inputs);
        }
        return mask;
    }

    private static NDList inHalf(NDList outputs) {
        NDList result = new NDList(ArrayKernels.convert(outputs.head(), true));
        result.addAll(outputs.subNDList(1));
        return result;
    }

    NDArray normedPlain(ParameterStore parameterStore, NDArray x, boolean training) {
        return norm == null
                ? x
                : NormKernels.rmsNormPlain(
                        x, parameterStore.getValue(norm, x.getDevice(), training), eps);
    }

    /** The layer behind the router from its parts, differentiable and unbounded. */
    NDArray expertsPlain(
            ParameterStore parameterStore, NDArray x, NDArray h, NDList chosen, boolean training) {
        if (dispatch != null) {
            throw new IllegalStateException(
                    "The experts of this block lie on several ranks, which plain autograd cannot"
                            + " follow: train with a BoundedTrainer, or switch gradient mode off"
                            + " for inference");
        }
        NDArray y =
                experts.forward(
                                parameterStore,
                                new NDList(h, chosen.get(0), chosen.get(1)),
                                training)
                        .singletonOrThrow();
        if (shared != null) {
            y = y.add(shared.forward(parameterStore, new NDList(h), training).head());
        }
        return residual ? x.add(y) : y;
    }

    /** Adds the gradients of the losses without the tape, at once. */
    void addLosses(NDList losses) {
        Gradients.add(losses.get(0).mul(balanceCoefficient).add(losses.get(1).mul(zCoefficient)));
    }

    /** The last three of the kernels' weights, null for absent ones. */
    List<Parameter> sharedWeights() {
        return shared == null ? Collections.nCopies(3, null) : shared.weights();
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType dataType, Shape... shapes) {
        router.initialize(manager, dataType, new Shape(-1, hidden));
        experts.initialize(manager, dataType, new Shape(-1, hidden));
        if (shared != null) {
            shared.initialize(manager, dataType, new Shape(-1, hidden));
        }
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return lossOutputs
                ? new Shape[] {inputShapes[0], new Shape(), new Shape()}
                : new Shape[] {inputShapes[0]};
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
        private Boolean renormalize;
        private double balanceCoefficient;
        private double zCoefficient;
        private boolean lossOutputs;
        private double biasUpdateRate;
        private boolean balanceBias;
        private int sharedInner;
        private boolean sharedGate;
        private double initializerRange = 0.02;
        private int chunkTokens = 4096;
        private int maxChunks = 10;
        private ProcessGroup group;
        private UnaryOperator<PipelinedDispatch.Builder> groupSettings = UnaryOperator.identity();

        Builder() {}

        /** Null where there is nobody to exchange with. */
        private PipelinedDispatch dispatch() {
            return group == null || group.size() == 1
                    ? null
                    : groupSettings
                            .apply(
                                    PipelinedDispatch.builder()
                                            .setGroup(group)
                                            .setExperts(experts)
                                            .optChunkTokens(chunkTokens)
                                            .optMaxChunks(maxChunks))
                            .build();
        }

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
         * Sets whether the combine weights of a token are divided by their sum. Default: true for k
         * above 1. A single weight divided by itself is 1 and the router learns nothing from it.
         *
         * @param value whether they are
         * @return this builder
         */
        public Builder optRenormalize(boolean value) {
            renormalize = value;
            return this;
        }

        /**
         * Adds {@code coefficient * balance loss} to the objective. Default: 0.
         *
         * @param coefficient for instance 0.01
         * @return this builder
         */
        public Builder optBalanceCoefficient(double coefficient) {
            balanceCoefficient = coefficient;
            return this;
        }

        /**
         * Adds {@code coefficient * z-loss} to the objective. Default: 0.
         *
         * @param coefficient for instance 0.001
         * @return this builder
         */
        public Builder optZCoefficient(double coefficient) {
            zCoefficient = coefficient;
            return this;
        }

        /**
         * Sets whether balance loss and z-loss are outputs beside the hidden states, for a loss of
         * your own to add. Default: false.
         *
         * @param value whether they are
         * @return this builder
         */
        public Builder optLossOutputs(boolean value) {
            lossOutputs = value;
            return this;
        }

        /**
         * Balances the load by a bias in the ranking alone, see {@link Router}. Default: 0, none.
         *
         * @param rate u, how far the bias moves a step, in probability; for instance 0.001
         * @return this builder
         */
        public Builder optBiasUpdateRate(double rate) {
            biasUpdateRate = rate;
            return this;
        }

        /**
         * Sets whether the router has a balancing bias even if no rate moves it: for weights that
         * were balanced before. Default: false, one only with a rate.
         *
         * @param value whether it has
         * @return this builder
         */
        public Builder optBalanceBias(boolean value) {
            balanceBias = value;
            return this;
        }

        /**
         * Adds experts that every token goes to, see {@link SharedExperts}. Default: none.
         *
         * @param width S, their width together; 0 for none
         * @param gated whether a sigmoid gate scales their output
         * @return this builder
         */
        public Builder optSharedExperts(int width, boolean gated) {
            sharedInner = width;
            sharedGate = gated;
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
         * Spreads the experts over the ranks of a group: this block then has those of its own rank,
         * and the router chooses among all. See {@link #optGroup(ProcessGroup, UnaryOperator)}.
         *
         * @param value the group; one process alone has all experts and exchanges nothing
         * @return this builder
         */
        public Builder optGroup(ProcessGroup value) {
            return optGroup(value, UnaryOperator.identity());
        }

        /**
         * Spreads the experts over the ranks of a group. All ranks call the block equally often, in
         * training and in evaluation, though with batches of their own, of any number of tokens.
         * Gradients of the experts are those of all ranks' tokens. Norm, router and shared experts
         * are on every rank: start them equal, and add their gradients up with {@link
         * ProcessGroup#sum} before a step. Balance loss, z-loss and statistics are of a rank's own
         * tokens; balancing biases follow the load of all. Needs the tape of a {@code
         * BoundedTrainer}; adapters need a group of one.
         *
         * @param value the group, which stays the caller's to close
         * @param settings of the dispatch, the same on all ranks; those of chunks are the block's
         *     unless set here
         * @return this builder
         */
        public Builder optGroup(
                ProcessGroup value, UnaryOperator<PipelinedDispatch.Builder> settings) {
            group = value;
            groupSettings = settings;
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
            if (sharedInner < 0) {
                throw new IllegalArgumentException(
                        "The width of shared experts must be positive, or 0 for none, not "
                                + sharedInner);
            }
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
