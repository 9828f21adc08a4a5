package org.djlmoe.model;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.function.UnaryOperator;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.NamedParameters;
import org.djlmoe.dispatch.PipelinedDispatch;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.parallel.ProcessGroup;
import org.djlmoe.routing.MaskLogits;
import org.djlmoe.vocab.VocabProjection;

/**
 * A Mixtral-style decoder: embedding, layers of attention and Mixture-of-Experts, final norm,
 * vocabulary projection. Shared experts and balancing biases, which Mixtral does not have, are part
 * of the configuration.
 *
 * <p>Every half of a layer is a segment, so that from forward to backward only their inputs live: 2
 * L + 1 arrays of [B S, H], and k ids and weights a token and layer. Sequences are packed: a batch
 * has no padding, or padding on the right whose labels are ignored.
 *
 * <ul>
 *   <li>input: token ids INT64 [B, S], and optionally a mask [B, S] with 0 for padding, which then
 *       does not count in the routers' losses, statistics and balancing
 *   <li>output: hidden states [B, S, H] and the projection's weight [V, H], as {@code RingDtpLoss}
 *       takes them
 * </ul>
 *
 * <p>Parameters carry the names of a Hugging Face Mixtral with stacked experts. Over several ranks
 * ({@link Builder#optGroup(ProcessGroup)}) the experts are those of a rank.
 *
 * <p>Source: A. Jiang et al., "Mixtral of Experts", arXiv 2401.04088.
 */
public final class MoeDecoder extends AbstractBlock implements NamedParameters {

    private final MoeConfig config;
    private final TokenEmbedding embedding;
    private final List<AttentionBlock> attention = new ArrayList<>();
    private final List<MoeBlock> moe = new ArrayList<>();
    private final RmsNorm norm;
    private final VocabProjection projection;

    /**
     * Creates a decoder with MoE chunks of 4096 tokens.
     *
     * @param config sizes and constants
     */
    public MoeDecoder(MoeConfig config) {
        this(builder().setConfig(config));
    }

    /**
     * Creates a decoder.
     *
     * @param config sizes and constants
     * @param chunkTokens tokens a chunk in the MoE layers
     */
    public MoeDecoder(MoeConfig config, int chunkTokens) {
        this(builder().setConfig(config).optChunkTokens(chunkTokens));
    }

    private MoeDecoder(Builder builder) {
        config = builder.effectiveConfig();
        embedding =
                addChildBlock(
                        "embed_tokens",
                        new TokenEmbedding(
                                config.vocabSize(),
                                config.hiddenSize(),
                                config.initializerRange()));
        for (int layer = 0; layer < config.numLayers(); layer++) {
            attention.add(addChildBlock("attention" + layer, new AttentionBlock(config)));
            moe.add(
                    addChildBlock(
                            "moe" + layer,
                            MoeBlock.builder()
                                    .setHiddenSize(config.hiddenSize())
                                    .setIntermediateSize(config.intermediateSize())
                                    .setNumExperts(config.numExperts())
                                    .setTopK(config.topK())
                                    .optNorm(config.rmsNormEps())
                                    .optResidual(true)
                                    // Mixtral divides in every case, also for k = 1.
                                    .optRenormalize(true)
                                    .optInitializerRange(config.initializerRange())
                                    .optChunkTokens(builder.chunkTokens)
                                    .optMaxChunks(builder.maxChunks)
                                    .optBalanceCoefficient(builder.balanceCoefficient)
                                    .optZCoefficient(builder.zCoefficient)
                                    .optBalanceBias(config.useRoutingBias())
                                    .optBiasUpdateRate(builder.biasUpdateRate)
                                    .optSharedExperts(
                                            config.sharedExpertIntermediateSize(),
                                            config.sharedExpertGated())
                                    .optGroup(builder.group, builder.groupSettings)
                                    .build()));
        }
        norm = addChildBlock("norm", new RmsNorm(config.hiddenSize(), config.rmsNormEps()));
        VocabProjection.Builder head = VocabProjection.builder().setVocabSize(config.vocabSize());
        if (config.tieWordEmbeddings()) {
            head.optWeight(embedding.weight());
        }
        projection = addChildBlock("lm_head", head.build());
        if (!config.tieWordEmbeddings()) {
            headWeight().setInitializer(new NormalInitializer((float) config.initializerRange()));
        }
    }

    /**
     * Returns a builder, for what is not part of a configuration.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Returns the configuration, with shared experts and balancing biases that the builder added.
     *
     * @return sizes and constants
     */
    public MoeConfig config() {
        return config;
    }

    /**
     * Returns the Mixture-of-Experts half of every layer.
     *
     * @return one block a layer
     */
    public List<MoeBlock> moeBlocks() {
        return Collections.unmodifiableList(moe);
    }

    /**
     * Returns the vocabulary projection, which also computes logits.
     *
     * @return the projection
     */
    public VocabProjection projection() {
        return projection;
    }

    private Parameter headWeight() {
        return projection.getDirectParameters().get("weight");
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        if (training) {
            return run(parameterStore, inputs, true);
        }
        // The gradient mode is on in every new thread, and token ids have no gradient to ask for.
        try (GradMode off = GradMode.off()) {
            return run(parameterStore, inputs, false);
        }
    }

    private NDList run(ParameterStore parameterStore, NDList inputs, boolean training) {
        NDArray ids = inputs.head();
        if (inputs.size() > 2 || ids.getShape().dimension() != 2) {
            throw new IllegalArgumentException(
                    "MoeDecoder expects token ids [batch, sequence] and perhaps a mask, got "
                            + inputs);
        }
        int sequence = (int) ids.getShape().get(1);
        NDArray x = embedding.forward(parameterStore, new NDList(ids), training).singletonOrThrow();
        for (int layer = 0; layer < config.numLayers(); layer++) {
            NDArray between = attention.get(layer).forward(parameterStore, x, sequence, training);
            // What backward needs of a boundary the tape keeps; this handle would keep it until the
            // batch ends.
            x.close();
            NDList hidden = new NDList(between);
            if (inputs.size() == 2) {
                hidden.add(mask(inputs.get(1), ids.getShape(), between.getShape()));
            }
            x = moe.get(layer).forward(parameterStore, hidden, training).singletonOrThrow();
            between.close();
        }
        Shape shape = new Shape(ids.getShape().get(0), sequence, config.hiddenSize());
        NDArray hidden = norm.forward(parameterStore, x, shape, training);
        x.close();
        return projection.forward(parameterStore, new NDList(hidden), training);
    }

    /** The mask in the shape of the hidden states without their last axis. */
    private static NDArray mask(NDArray mask, Shape ids, Shape hidden) {
        if (!mask.getShape().equals(ids)) {
            throw new IllegalArgumentException(
                    "The mask has the shape " + mask.getShape() + ", but the token ids " + ids);
        }
        return mask.reshape(hidden.slice(0, hidden.dimension() - 1));
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType dataType, Shape... shapes) {
        embedding.initialize(manager, dataType, shapes);
        Shape rows = new Shape(-1, config.hiddenSize());
        for (int layer = 0; layer < config.numLayers(); layer++) {
            attention.get(layer).initialize(manager, dataType, rows);
            moe.get(layer).initialize(manager, dataType, rows);
        }
        norm.initialize(manager, dataType, rows);
        projection.initialize(manager, dataType, rows);
    }

    /**
     * Returns the parameters by their Hugging Face names, with experts stacked, without adapters.
     * Over several ranks the experts are those of this rank, which alone are no checkpoint.
     *
     * @return name to parameter, in the order of a checkpoint
     */
    public Map<String, Parameter> checkpointParameters() {
        Map<String, Parameter> named = new LinkedHashMap<>();
        named.put("model.embed_tokens.weight", embedding.weight());
        for (int layer = 0; layer < config.numLayers(); layer++) {
            String prefix = prefix(layer);
            attention
                    .get(layer)
                    .getDirectParameters()
                    .forEach(p -> named.put(prefix + p.getKey(), p.getValue()));
            MoeBlock block = moe.get(layer);
            named.put(prefix + block.norm().getName(), block.norm());
            Parameter router = block.router().weight();
            named.put(prefix + "mlp." + router.getName(), router);
            for (Parameter p : List.of(block.experts().gateUp(), block.experts().down())) {
                named.put(prefix + "mlp." + p.getName(), p);
            }
            if (block.router().balanceBias() != null) {
                Parameter bias = block.router().balanceBias();
                named.put(prefix + "mlp." + bias.getName(), bias);
            }
            if (block.sharedExperts() != null) {
                block.sharedExperts().weights().stream()
                        .filter(Objects::nonNull)
                        .forEach(p -> named.put(prefix + "mlp." + p.getName(), p));
            }
        }
        named.put("model.norm.weight", norm.weight());
        if (!config.tieWordEmbeddings()) {
            named.put("lm_head.weight", headWeight());
        }
        return named;
    }

    /**
     * Returns the adapters' parameters by name.
     *
     * @return name to parameter; empty without adapters
     */
    public Map<String, Parameter> adapterParameters() {
        Map<String, Parameter> named = new LinkedHashMap<>();
        for (int layer = 0; layer < config.numLayers(); layer++) {
            LoraExperts adapters = moe.get(layer).experts().adapters();
            if (adapters != null) {
                for (Parameter p : adapters.weights()) {
                    named.put(prefix(layer) + "mlp." + p.getName(), p);
                }
            }
        }
        return named;
    }

    /**
     * Returns the logits of masks that train, by name.
     *
     * @return name to parameter; empty without such masks
     */
    public Map<String, Parameter> maskParameters() {
        Map<String, Parameter> named = new LinkedHashMap<>();
        for (int layer = 0; layer < config.numLayers(); layer++) {
            MaskLogits mask = moe.get(layer).router().mask();
            if (mask != null) {
                named.put(prefix(layer) + "mlp." + mask.logits().getName(), mask.logits());
            }
        }
        return named;
    }

    private static String prefix(int layer) {
        return "model.layers." + layer + ".";
    }

    @Override
    public Map<String, Parameter> namedParameters() {
        Map<String, Parameter> named = checkpointParameters();
        named.putAll(adapterParameters());
        named.putAll(maskParameters());
        return named;
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return new Shape[] {
            inputShapes[0].add(config.hiddenSize()),
            new Shape(config.vocabSize(), config.hiddenSize())
        };
    }

    /** Builds a {@link MoeDecoder}. */
    public static final class Builder {

        private MoeConfig config;
        private int chunkTokens = 4096;
        private int maxChunks = 10;
        private double balanceCoefficient;
        private double zCoefficient;
        private double biasUpdateRate;
        private Integer sharedWidth;
        private boolean sharedGate;
        private ProcessGroup group;
        private UnaryOperator<PipelinedDispatch.Builder> groupSettings = UnaryOperator.identity();

        private Builder() {}

        /**
         * Sets the configuration.
         *
         * @param value sizes and constants
         * @return this builder
         */
        public Builder setConfig(MoeConfig value) {
            config = value;
            return this;
        }

        /**
         * Sets how many tokens a chunk of a MoE layer should have at most. Default: 4096.
         *
         * @param value c
         * @return this builder
         */
        public Builder optChunkTokens(int value) {
            chunkTokens = value;
            return this;
        }

        /**
         * Sets how many chunks a MoE layer has at most; where it binds, chunks grow. Default: 10.
         *
         * @param value the largest K
         * @return this builder
         */
        public Builder optMaxChunks(int value) {
            maxChunks = value;
            return this;
        }

        /**
         * Adds {@code coefficient * balance loss} of every layer to the objective. Default: 0.
         *
         * @param coefficient for instance 0.01
         * @return this builder
         */
        public Builder optBalanceCoefficient(double coefficient) {
            balanceCoefficient = coefficient;
            return this;
        }

        /**
         * Adds {@code coefficient * z-loss} of every layer to the objective. Default: 0.
         *
         * @param coefficient for instance 0.001
         * @return this builder
         */
        public Builder optZCoefficient(double coefficient) {
            zCoefficient = coefficient;
            return this;
        }

        /**
         * Balances every layer's load by a bias in the ranking alone. Default: 0; then there is a
         * bias only if the configuration says so, and it stays as it is.
         *
         * @param rate how far the bias moves a step, in probability; for instance 0.001
         * @return this builder
         */
        public Builder optBiasUpdateRate(double rate) {
            biasUpdateRate = rate;
            return this;
        }

        /**
         * Sets the experts that every token goes to. Default: those of the configuration.
         *
         * @param width their width together; 0 for none
         * @param gated whether a sigmoid gate scales their output
         * @return this builder
         */
        public Builder optSharedExperts(int width, boolean gated) {
            sharedWidth = width;
            sharedGate = gated;
            return this;
        }

        /**
         * Spreads the experts of every layer over the ranks of a group. See {@link
         * #optGroup(ProcessGroup, UnaryOperator)}.
         *
         * @param value the group; one process alone has all experts and exchanges nothing
         * @return this builder
         */
        public Builder optGroup(ProcessGroup value) {
            return optGroup(value, UnaryOperator.identity());
        }

        /**
         * Spreads the experts of every layer over the ranks of a group, as {@link
         * MoeBlock.Builder#optGroup(ProcessGroup, UnaryOperator)} says. Everything else is on every
         * rank: start it equal, and add its gradients up with {@link ProcessGroup#sum} before a
         * step. Gradients are those of a sum over the ranks' losses: for their mean divide each by
         * the number of ranks.
         *
         * @param value the group, which stays the caller's to close
         * @param settings of the dispatch, the same on all ranks; those of chunks are the decoder's
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
         * Builds the decoder.
         *
         * @return the decoder, not initialized
         * @throws IllegalArgumentException if the configuration is missing or a number senseless
         */
        public MoeDecoder build() {
            if (config == null) {
                throw new IllegalArgumentException("MoeDecoder needs a config: setConfig");
            }
            return new MoeDecoder(this);
        }

        private MoeConfig effectiveConfig() {
            MoeConfig.Builder effective = config.toBuilder();
            if (sharedWidth != null) {
                effective.optSharedExperts(sharedWidth, sharedGate);
            }
            return effective.optRoutingBias(config.useRoutingBias() || biasUpdateRate > 0).build();
        }
    }
}
