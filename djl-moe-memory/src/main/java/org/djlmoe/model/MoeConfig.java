package org.djlmoe.model;

import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Objects;
import org.djlmoe.io.AtomicFiles;

/**
 * Shapes and constants of a Mixtral-style decoder, perhaps with shared experts and balancing
 * biases.
 *
 * <p>Field names follow Hugging Face's {@code config.json}, in which {@code num_local_experts} is
 * {@code numExperts} and {@code num_experts_per_tok} is {@code topK}. A decoder with shared experts
 * or balancing biases is no Mixtral; its {@code model_type} is {@value #EXTENDED_TYPE}.
 *
 * @param vocabSize V, rows of the embedding and of the output projection
 * @param hiddenSize H, width of the residual stream
 * @param intermediateSize I, inner width of one expert
 * @param numLayers decoder layers
 * @param numHeads query heads
 * @param numKeyValueHeads key and value heads; divides {@code numHeads}
 * @param headDim width of one head, even because of the rotary embedding; {@code numHeads *
 *     headDim} may differ from H
 * @param numExperts E, experts per layer
 * @param topK experts per token
 * @param ropeTheta base of the rotary frequencies
 * @param rmsNormEps added to the mean square in every norm
 * @param slidingWindow how many positions a token attends to, itself included; 0 for all
 * @param maxPositionEmbeddings longest sequence the model is meant for
 * @param tieWordEmbeddings whether the output projection is the embedding
 * @param initializerRange standard deviation of freshly initialized weights
 * @param sharedExpertIntermediateSize S, width together of the experts that every token goes to; 0
 *     for none
 * @param sharedExpertGated whether a sigmoid gate scales the shared experts' output; false without
 *     any
 * @param useRoutingBias whether each router has a balancing bias, which is added to the
 *     probabilities in the ranking alone
 */
public record MoeConfig(
        int vocabSize,
        int hiddenSize,
        int intermediateSize,
        int numLayers,
        int numHeads,
        int numKeyValueHeads,
        int headDim,
        int numExperts,
        int topK,
        double ropeTheta,
        double rmsNormEps,
        int slidingWindow,
        int maxPositionEmbeddings,
        boolean tieWordEmbeddings,
        double initializerRange,
        int sharedExpertIntermediateSize,
        boolean sharedExpertGated,
        boolean useRoutingBias) {

    /** The model type in {@code config.json} of a Mixtral. */
    static final String MIXTRAL_TYPE = "mixtral";

    /** The model type in {@code config.json} of what Mixtral's configuration has no place for. */
    public static final String EXTENDED_TYPE = "djl_moe";

    /** Checks that the numbers fit together. */
    public MoeConfig {
        positive("vocabSize", vocabSize);
        positive("hiddenSize", hiddenSize);
        positive("intermediateSize", intermediateSize);
        positive("numLayers", numLayers);
        positive("numHeads", numHeads);
        positive("numKeyValueHeads", numKeyValueHeads);
        positive("headDim", headDim);
        positive("numExperts", numExperts);
        positive("topK", topK);
        positive("ropeTheta", ropeTheta);
        positive("rmsNormEps", rmsNormEps);
        positive("maxPositionEmbeddings", maxPositionEmbeddings);
        positive("initializerRange", initializerRange);
        if (slidingWindow < 0) {
            throw new IllegalArgumentException(
                    "slidingWindow must be 0 (none) or a width, not " + slidingWindow);
        }
        if (numHeads % numKeyValueHeads != 0) {
            throw new IllegalArgumentException(
                    "numHeads ("
                            + numHeads
                            + ") must be a multiple of numKeyValueHeads ("
                            + numKeyValueHeads
                            + ")");
        }
        if (headDim % 2 != 0) {
            throw new IllegalArgumentException(
                    "headDim must be even for rotary pairs, not " + headDim);
        }
        if (topK > numExperts) {
            throw new IllegalArgumentException(
                    "topK (" + topK + ") exceeds numExperts (" + numExperts + ")");
        }
        if (sharedExpertIntermediateSize < 0) {
            throw new IllegalArgumentException(
                    "sharedExpertIntermediateSize must be 0 (none) or a width, not "
                            + sharedExpertIntermediateSize);
        }
        if (sharedExpertGated && sharedExpertIntermediateSize == 0) {
            throw new IllegalArgumentException(
                    "sharedExpertGated is true, but there are no shared experts: set"
                            + " sharedExpertIntermediateSize");
        }
    }

    private static void positive(String name, double value) {
        if (!(value > 0 && value < Double.POSITIVE_INFINITY)) {
            throw new IllegalArgumentException(name + " must be positive and finite, not " + value);
        }
    }

    /**
     * Creates a builder.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Creates a builder that starts from this configuration.
     *
     * @return a builder
     */
    public Builder toBuilder() {
        return builder()
                .setVocabSize(vocabSize)
                .setHiddenSize(hiddenSize)
                .setIntermediateSize(intermediateSize)
                .setNumLayers(numLayers)
                .setNumHeads(numHeads)
                .optNumKeyValueHeads(numKeyValueHeads)
                .optHeadDim(headDim)
                .setNumExperts(numExperts)
                .setTopK(topK)
                .optRopeTheta(ropeTheta)
                .optRmsNormEps(rmsNormEps)
                .optSlidingWindow(slidingWindow)
                .optMaxPositionEmbeddings(maxPositionEmbeddings)
                .optTieWordEmbeddings(tieWordEmbeddings)
                .optInitializerRange(initializerRange)
                .optSharedExperts(sharedExpertIntermediateSize, sharedExpertGated)
                .optRoutingBias(useRoutingBias);
    }

    private boolean isMixtral() {
        return sharedExpertIntermediateSize == 0 && !useRoutingBias;
    }

    /**
     * Reads a Hugging Face {@code config.json} of a Mixtral model, or of one of the type {@value
     * #EXTENDED_TYPE}.
     *
     * <p>Both spellings of the rotary settings are understood ({@code rope_theta} with {@code
     * rope_scaling}, and {@code rope_parameters}). What the decoder does not compute is refused.
     * Keys that do not change what it computes are ignored: token ids, cache, storage types, and
     * the weight of the router's auxiliary loss, which is the training loop's choice.
     *
     * @param configJson the file
     * @return the configuration
     * @throws IllegalArgumentException if a key is missing, senseless or asks for something that
     *     the decoder does not implement; the message names file and key
     * @throws IOException if the file cannot be read
     */
    public static MoeConfig fromJson(Path configJson) throws IOException {
        return new HfConfigReader(configJson).read();
    }

    /**
     * Writes a {@code config.json} as {@link #toJson(Path, String)}, without a storage type.
     *
     * @param configJson the file, replaced if it exists
     * @throws IOException if writing fails
     */
    public void toJson(Path configJson) throws IOException {
        toJson(configJson, null);
    }

    /**
     * Writes a {@code config.json}. Token ids (BOS, EOS) are the tokenizer's matter and are left to
     * its files.
     *
     * <p>Without shared experts and balancing biases it is a Mixtral's, which transformers 4 and 5
     * both read. With them the model type is {@value #EXTENDED_TYPE}, which no other software
     * knows: under the name of Mixtral these weights would be left out without an error. To
     * Mixtral's keys it adds
     *
     * <ul>
     *   <li>{@code shared_expert_intermediate_size}: S, 0 for none, as in Qwen2-MoE
     *   <li>{@code shared_expert_gated}: whether a sigmoid gate scales their output
     *   <li>{@code use_routing_bias}: whether there are balancing biases, as in MiniMax-M2
     *   <li>{@code scoring_func} and {@code norm_topk_prob}: always "softmax" and true
     * </ul>
     *
     * @param configJson the file, replaced if it exists
     * @param torchDtype storage type of the weights beside it in PyTorch's words, for instance
     *     {@code bfloat16}; null to leave it out
     * @throws IOException if writing fails
     */
    public void toJson(Path configJson, String torchDtype) throws IOException {
        JsonObject json = new JsonObject();
        JsonArray architectures = new JsonArray();
        architectures.add(isMixtral() ? "MixtralForCausalLM" : "DjlMoeForCausalLM");
        json.add("architectures", architectures);
        json.addProperty("model_type", isMixtral() ? MIXTRAL_TYPE : EXTENDED_TYPE);
        json.addProperty("vocab_size", vocabSize);
        json.addProperty("hidden_size", hiddenSize);
        json.addProperty("intermediate_size", intermediateSize);
        json.addProperty("num_hidden_layers", numLayers);
        json.addProperty("num_attention_heads", numHeads);
        json.addProperty("num_key_value_heads", numKeyValueHeads);
        json.addProperty("head_dim", headDim);
        json.addProperty("num_local_experts", numExperts);
        json.addProperty("num_experts_per_tok", topK);
        if (!isMixtral()) {
            json.addProperty("shared_expert_intermediate_size", sharedExpertIntermediateSize);
            json.addProperty("shared_expert_gated", sharedExpertGated);
            json.addProperty("use_routing_bias", useRoutingBias);
            json.addProperty("scoring_func", "softmax");
            json.addProperty("norm_topk_prob", true);
        }
        json.addProperty("hidden_act", "silu");
        json.addProperty("max_position_embeddings", maxPositionEmbeddings);
        json.addProperty("initializer_range", initializerRange);
        json.addProperty("rms_norm_eps", rmsNormEps);
        json.addProperty("attention_dropout", 0.0);
        json.addProperty("router_jitter_noise", 0.0);
        if (slidingWindow == 0) {
            json.add("sliding_window", JsonNull.INSTANCE);
        } else {
            json.addProperty("sliding_window", slidingWindow);
        }
        json.addProperty("tie_word_embeddings", tieWordEmbeddings);
        // transformers 4 reads the first, transformers 5 the second.
        json.addProperty("rope_theta", ropeTheta);
        JsonObject rope = new JsonObject();
        rope.addProperty("rope_theta", ropeTheta);
        rope.addProperty("rope_type", "default");
        json.add("rope_parameters", rope);
        if (torchDtype != null) {
            json.addProperty("torch_dtype", torchDtype);
        }
        String text = new GsonBuilder().setPrettyPrinting().serializeNulls().create().toJson(json);
        AtomicFiles.writeString(configJson, text + "\n");
    }

    /**
     * Builds a {@link MoeConfig}; {@code set} methods are required, {@code opt} methods are not.
     */
    public static final class Builder {

        private Integer vocabSize;
        private Integer hiddenSize;
        private Integer intermediateSize;
        private Integer numLayers;
        private Integer numHeads;
        private Integer numKeyValueHeads;
        private Integer headDim;
        private Integer numExperts;
        private Integer topK;
        private double ropeTheta = 1e6;
        private double rmsNormEps = 1e-5;
        private int slidingWindow;
        private int maxPositionEmbeddings = 131072;
        private boolean tieWordEmbeddings;
        private double initializerRange = 0.02;
        private int sharedExpertIntermediateSize;
        private boolean sharedExpertGated;
        private boolean useRoutingBias;

        private Builder() {}

        /**
         * Sets V.
         *
         * @param value the size of the vocabulary
         * @return this builder
         */
        public Builder setVocabSize(int value) {
            vocabSize = value;
            return this;
        }

        /**
         * Sets H.
         *
         * @param value the width of the residual stream
         * @return this builder
         */
        public Builder setHiddenSize(int value) {
            hiddenSize = value;
            return this;
        }

        /**
         * Sets I.
         *
         * @param value the inner width of one expert
         * @return this builder
         */
        public Builder setIntermediateSize(int value) {
            intermediateSize = value;
            return this;
        }

        /**
         * Sets the depth.
         *
         * @param value the number of decoder layers
         * @return this builder
         */
        public Builder setNumLayers(int value) {
            numLayers = value;
            return this;
        }

        /**
         * Sets the query heads.
         *
         * @param value their number
         * @return this builder
         */
        public Builder setNumHeads(int value) {
            numHeads = value;
            return this;
        }

        /**
         * Sets the key and value heads.
         *
         * @param value their number; default {@code numHeads}
         * @return this builder
         */
        public Builder optNumKeyValueHeads(int value) {
            numKeyValueHeads = value;
            return this;
        }

        /**
         * Sets the width of a head.
         *
         * @param value the width; default {@code hiddenSize / numHeads}
         * @return this builder
         */
        public Builder optHeadDim(int value) {
            headDim = value;
            return this;
        }

        /**
         * Sets E.
         *
         * @param value the number of experts per layer
         * @return this builder
         */
        public Builder setNumExperts(int value) {
            numExperts = value;
            return this;
        }

        /**
         * Sets how many experts a token goes to.
         *
         * @param value the number of experts per token
         * @return this builder
         */
        public Builder setTopK(int value) {
            topK = value;
            return this;
        }

        /**
         * Sets the base of the rotary frequencies.
         *
         * @param value the base; default 10^6
         * @return this builder
         */
        public Builder optRopeTheta(double value) {
            ropeTheta = value;
            return this;
        }

        /**
         * Sets the epsilon of the norms.
         *
         * @param value the epsilon; default 10^-5
         * @return this builder
         */
        public Builder optRmsNormEps(double value) {
            rmsNormEps = value;
            return this;
        }

        /**
         * Sets the attention window.
         *
         * @param value the width, the token itself included; default 0, no window
         * @return this builder
         */
        public Builder optSlidingWindow(int value) {
            slidingWindow = value;
            return this;
        }

        /**
         * Sets the longest sequence.
         *
         * @param value the number of positions; default 131072
         * @return this builder
         */
        public Builder optMaxPositionEmbeddings(int value) {
            maxPositionEmbeddings = value;
            return this;
        }

        /**
         * Sets whether the output projection is the embedding.
         *
         * @param value true to share one weight; default false
         * @return this builder
         */
        public Builder optTieWordEmbeddings(boolean value) {
            tieWordEmbeddings = value;
            return this;
        }

        /**
         * Sets the spread of fresh weights.
         *
         * @param value the standard deviation; default 0.02
         * @return this builder
         */
        public Builder optInitializerRange(double value) {
            initializerRange = value;
            return this;
        }

        /**
         * Adds experts that every token goes to. Default: none.
         *
         * @param width S, their width together; 0 for none
         * @param gated whether a sigmoid gate scales their output
         * @return this builder
         */
        public Builder optSharedExperts(int width, boolean gated) {
            sharedExpertIntermediateSize = width;
            sharedExpertGated = gated && width != 0;
            return this;
        }

        /**
         * Sets whether each router has a balancing bias. Default: false. How far training moves it
         * is {@link MoeDecoder.Builder#optBiasUpdateRate}.
         *
         * @param value whether it has
         * @return this builder
         */
        public Builder optRoutingBias(boolean value) {
            useRoutingBias = value;
            return this;
        }

        /**
         * Checks the settings.
         *
         * @return the configuration
         * @throws IllegalArgumentException if something required is missing or does not fit
         */
        public MoeConfig build() {
            int heads = required("numHeads", numHeads);
            int hidden = required("hiddenSize", hiddenSize);
            if (headDim == null && (heads <= 0 || hidden % heads != 0)) {
                throw new IllegalArgumentException(
                        "hiddenSize ("
                                + hidden
                                + ") is no multiple of numHeads ("
                                + heads
                                + "): give optHeadDim");
            }
            return new MoeConfig(
                    required("vocabSize", vocabSize),
                    hidden,
                    required("intermediateSize", intermediateSize),
                    required("numLayers", numLayers),
                    heads,
                    Objects.requireNonNullElse(numKeyValueHeads, heads),
                    headDim == null ? hidden / heads : headDim,
                    required("numExperts", numExperts),
                    required("topK", topK),
                    ropeTheta,
                    rmsNormEps,
                    slidingWindow,
                    maxPositionEmbeddings,
                    tieWordEmbeddings,
                    initializerRange,
                    sharedExpertIntermediateSize,
                    sharedExpertGated,
                    useRoutingBias);
        }

        private static int required(String name, Integer value) {
            if (value == null) {
                throw new IllegalArgumentException(name + " is required");
            }
            return value;
        }
    }
}
