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
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.NamedParameters;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.MaskLogits;
import org.djlmoe.vocab.VocabProjection;

/**
 * A Mixtral-style decoder: embedding, layers of attention and Mixture-of-Experts, final norm,
 * vocabulary projection.
 *
 * <p>Every half of a layer is a segment, so that from forward to backward only their inputs live: 2
 * L + 1 arrays of [B S, H], and k ids and weights a token and layer. Sequences are packed: a batch
 * has no padding, or padding on the right whose labels are ignored.
 *
 * <ul>
 *   <li>input: token ids INT64 [B, S]
 *   <li>output: hidden states [B, S, H] and the projection's weight [V, H], as {@code RingDtpLoss}
 *       takes them
 * </ul>
 *
 * <p>Parameters carry the names of a Hugging Face Mixtral with stacked experts.
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
        this(config, 4096);
    }

    /**
     * Creates a decoder.
     *
     * @param config sizes and constants
     * @param chunkTokens tokens a chunk in the MoE layers
     */
    public MoeDecoder(MoeConfig config, int chunkTokens) {
        this.config = config;
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
                                    .optInitializerRange(config.initializerRange())
                                    .optChunkTokens(chunkTokens)
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
     * Returns the configuration.
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
        NDArray ids = inputs.singletonOrThrow();
        if (ids.getShape().dimension() != 2) {
            throw new IllegalArgumentException(
                    "MoeDecoder expects token ids [batch, sequence], got " + ids.getShape());
        }
        int sequence = (int) ids.getShape().get(1);
        NDArray x = embedding.forward(parameterStore, new NDList(ids), training).singletonOrThrow();
        for (int layer = 0; layer < config.numLayers(); layer++) {
            NDArray between = attention.get(layer).forward(parameterStore, x, sequence, training);
            // What backward needs of a boundary the tape keeps; this handle would keep it until the
            // batch ends.
            x.close();
            x =
                    moe.get(layer)
                            .forward(parameterStore, new NDList(between), training)
                            .singletonOrThrow();
            between.close();
        }
        Shape shape = new Shape(ids.getShape().get(0), sequence, config.hiddenSize());
        NDArray hidden = norm.forward(parameterStore, x, shape, training);
        x.close();
        return projection.forward(parameterStore, new NDList(hidden), training);
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
}
