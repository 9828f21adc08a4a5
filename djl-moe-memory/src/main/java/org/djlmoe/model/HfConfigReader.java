package org.djlmoe.model;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.Reader;
import java.math.BigDecimal;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Objects;
import java.util.Set;

/**
 * Turns a Hugging Face {@code config.json} into a {@link MoeConfig}.
 *
 * <p>A key that is null counts as absent, as in transformers. Defaults for absent keys are those of
 * its {@code MixtralConfig}, except for the sizes: a file without them is more likely damaged than
 * meant to be Mixtral-8x7B.
 */
final class HfConfigReader {

    private static final double DEFAULT_ROPE_THETA = 1e6;

    private static final String SHARED_WIDTH = "shared_expert_intermediate_size";
    private static final String SHARED_GATED = "shared_expert_gated";
    private static final String ROUTING_BIAS = "use_routing_bias";

    /** What the decoder never has, by the names of several families. */
    private static final List<String> NEVER =
            List.of(
                    "attention_bias",
                    "mlp_bias",
                    "qkv_bias",
                    "use_bias",
                    "use_qk_norm",
                    "use_grouped_topk");

    /** Numbers that change nothing if they are 1. */
    private static final List<String> ONE =
            List.of("routed_scaling_factor", "n_group", "topk_group", "decoder_sparse_step");

    /** How other families say that there are shared experts. */
    private static final List<String> SHARED_ELSEWHERE =
            List.of(
                    "n_shared_experts",
                    "num_shared_experts",
                    "moe_num_shared_experts",
                    "shared_intermediate_size");

    private final Path file;
    private final JsonObject json;

    HfConfigReader(Path file) throws IOException {
        this.file = file;
        try (Reader text = Files.newBufferedReader(file, StandardCharsets.UTF_8)) {
            JsonElement root = JsonParser.parseReader(text);
            if (!root.isJsonObject()) {
                throw new IllegalArgumentException(file + ": is not a JSON object");
            }
            json = root.getAsJsonObject();
        } catch (JsonParseException e) {
            throw new IllegalArgumentException(file + ": is not valid JSON", e);
        }
    }

    MoeConfig read() {
        String type = text(json, "model_type");
        boolean extended = MoeConfig.EXTENDED_TYPE.equals(type);
        if (!extended && !MoeConfig.MIXTRAL_TYPE.equals(type)) {
            throw fail(
                    "model_type",
                    "is '"
                            + type
                            + "'; only '"
                            + MoeConfig.MIXTRAL_TYPE
                            + "' and '"
                            + MoeConfig.EXTENDED_TYPE
                            + "' are implemented");
        }
        requireOrAbsent("hidden_act", "silu");
        requireZero("attention_dropout");
        requireZero("router_jitter_noise");
        for (String key : NEVER) {
            requireFalse(key);
        }
        requireRouting();
        if (!extended) {
            requireMixtral();
        }
        if (present(json, "quantization_config")) {
            throw fail(
                    "quantization_config",
                    "is there; only weights in F32, F16 and BF16 are read, so convert them");
        }
        if (!present(json, "num_key_value_heads") && !json.has("num_key_value_heads")) {
            throw fail("num_key_value_heads", "is missing");
        }
        int heads = size("num_attention_heads");
        MoeConfig.Builder builder =
                MoeConfig.builder()
                        .setVocabSize(size("vocab_size"))
                        .setHiddenSize(size("hidden_size"))
                        .setIntermediateSize(size("intermediate_size"))
                        .setNumLayers(size("num_hidden_layers"))
                        .setNumHeads(heads)
                        .optNumKeyValueHeads(optionalSize("num_key_value_heads", heads))
                        .setNumExperts(size("num_local_experts"))
                        .setTopK(size("num_experts_per_tok"))
                        .optRopeTheta(ropeTheta())
                        .optRmsNormEps(optionalNumber(json, "rms_norm_eps", 1e-5))
                        .optSlidingWindow(slidingWindow())
                        .optMaxPositionEmbeddings(optionalSize("max_position_embeddings", 131072))
                        .optTieWordEmbeddings(optionalBoolean("tie_word_embeddings"))
                        .optInitializerRange(optionalNumber(json, "initializer_range", 0.02))
                        .optRoutingBias(optionalBoolean(ROUTING_BIAS));
        if (present(json, "head_dim")) {
            builder.optHeadDim(size("head_dim"));
        }
        int shared = sharedWidth();
        boolean gated = optionalBoolean(SHARED_GATED);
        if (gated && shared == 0) {
            throw fail(SHARED_GATED, "is true, but " + SHARED_WIDTH + " is 0 or missing");
        }
        builder.optSharedExperts(shared, gated);
        requireFit(heads);
        try {
            return builder.build();
        } catch (IllegalArgumentException e) {
            throw new IllegalArgumentException(file + ": " + e.getMessage(), e);
        }
    }

    /** What other families do between the router's logits and the sum over experts. */
    private void requireRouting() {
        requireOrAbsent("scoring_func", "softmax");
        requireOrAbsent("topk_method", "greedy");
        if (present(json, "norm_topk_prob") && !optionalBoolean("norm_topk_prob")) {
            throw fail(
                    "norm_topk_prob",
                    "is false; only true (weights divided by their sum) is implemented");
        }
        for (String key : ONE) {
            double value = optionalNumber(json, key, 1);
            if (value != 1) {
                throw fail(key, "is " + value + "; only 1 is implemented");
            }
        }
        requireZero("first_k_dense_replace");
        if (present(json, "mlp_only_layers")) {
            JsonElement layers = json.get("mlp_only_layers");
            if (!layers.isJsonArray() || !layers.getAsJsonArray().isEmpty()) {
                throw fail(
                        "mlp_only_layers",
                        "is " + layers + "; only layers with experts are implemented");
            }
        }
        for (String key : SHARED_ELSEWHERE) {
            double value = optionalNumber(json, key, 0);
            if (value != 0) {
                throw fail(
                        key,
                        "is "
                                + value
                                + "; say how wide shared experts are together by "
                                + SHARED_WIDTH);
            }
        }
    }

    /** Mixtral has none of this, so that other software would leave it out without a word. */
    private void requireMixtral() {
        for (String key : List.of(SHARED_WIDTH, SHARED_GATED, ROUTING_BIAS)) {
            if (key.equals(SHARED_WIDTH) ? sharedWidth() > 0 : optionalBoolean(key)) {
                throw fail(
                        key,
                        "is "
                                + json.get(key)
                                + ", which a Mixtral does not have: set model_type to '"
                                + MoeConfig.EXTENDED_TYPE
                                + "'");
            }
        }
    }

    private int sharedWidth() {
        if (!present(json, SHARED_WIDTH)) {
            return 0;
        }
        int width = requiredInt(SHARED_WIDTH);
        if (width < 0) {
            throw fail(SHARED_WIDTH, "must be 0 (none) or a width, not " + width);
        }
        return width;
    }

    /** Sizes that exclude each other. */
    private void requireFit(int heads) {
        int hidden = size("hidden_size");
        boolean given = present(json, "head_dim");
        if (!given && hidden % heads != 0) {
            throw fail(
                    "hidden_size",
                    "is "
                            + hidden
                            + ", no multiple of num_attention_heads, "
                            + heads
                            + ": correct one of them or give head_dim");
        }
        int width = given ? size("head_dim") : hidden / heads;
        if (width % 2 != 0) {
            throw fail(
                    "head_dim",
                    "is "
                            + width
                            + (given ? "" : " (hidden_size / num_attention_heads)")
                            + ", but rotary pairs need an even width");
        }
        int keys = optionalSize("num_key_value_heads", heads);
        if (heads % keys != 0) {
            throw fail(
                    "num_attention_heads",
                    "is " + heads + ", no multiple of num_key_value_heads, " + keys);
        }
        int topK = size("num_experts_per_tok");
        int experts = size("num_local_experts");
        if (topK > experts) {
            throw fail(
                    "num_experts_per_tok",
                    "is " + topK + ", more than the " + experts + " of num_local_experts");
        }
    }

    private int slidingWindow() {
        if (!present(json, "sliding_window")) {
            return 0;
        }
        int width = requiredInt("sliding_window");
        if (width <= 0) {
            throw fail("sliding_window", "must be null or a positive width, not " + width);
        }
        return width;
    }

    /** Reads the base from either spelling; both may be there if they agree. */
    private double ropeTheta() {
        checkRope("rope_scaling");
        checkRope("rope_parameters");
        requireWholeRotation(json, "partial_rotary_factor");
        Double theta = null;
        if (present(json, "rope_theta")) {
            theta = optionalNumber(json, "rope_theta", DEFAULT_ROPE_THETA);
        }
        for (String key : new String[] {"rope_parameters", "rope_scaling"}) {
            JsonObject rope = present(json, key) ? json.getAsJsonObject(key) : new JsonObject();
            if (present(rope, "rope_theta")) {
                double inner = optionalNumber(rope, "rope_theta", DEFAULT_ROPE_THETA);
                if (theta != null && theta != inner) {
                    throw fail("rope_theta", "is " + theta + ", but " + key + " says " + inner);
                }
                theta = inner;
            }
        }
        return Objects.requireNonNullElse(theta, DEFAULT_ROPE_THETA);
    }

    private void checkRope(String key) {
        if (!present(json, key)) {
            return;
        }
        if (!json.get(key).isJsonObject()) {
            throw fail(key, "must be null or an object");
        }
        JsonObject rope = json.getAsJsonObject(key);
        for (String typeKey : new String[] {"rope_type", "type"}) {
            String type = text(rope, typeKey);
            if (type != null && !type.equals("default")) {
                throw fail(
                        key + "." + typeKey,
                        "is '" + type + "'; only 'default' (no scaling) is implemented");
            }
        }
        for (String name : rope.keySet()) {
            boolean known =
                    Set.of("rope_type", "type", "rope_theta", "partial_rotary_factor")
                            .contains(name);
            boolean typed = present(rope, "rope_type") || present(rope, "type");
            if (!known && !typed) {
                throw fail(key, "has '" + name + "' but no rope_type");
            }
        }
        requireWholeRotation(rope, "partial_rotary_factor");
    }

    private void requireWholeRotation(JsonObject object, String key) {
        double factor = optionalNumber(object, key, 1);
        if (factor != 1) {
            throw fail(key, "is " + factor + "; only 1 (rotate the whole head) is implemented");
        }
    }

    private void requireOrAbsent(String key, String wanted) {
        String found = text(json, key);
        if (found != null && !wanted.equals(found)) {
            throw fail(key, "is '" + found + "'; only '" + wanted + "' is implemented");
        }
    }

    private void requireZero(String key) {
        double value = optionalNumber(json, key, 0);
        if (value != 0) {
            throw fail(key, "is " + value + "; only 0 is implemented");
        }
    }

    private void requireFalse(String key) {
        if (optionalBoolean(key)) {
            throw fail(key, "is true; only false is implemented");
        }
    }

    private int requiredInt(String key) {
        if (!present(json, key)) {
            throw fail(key, "is missing");
        }
        BigDecimal value = number(json, key);
        try {
            return value.intValueExact();
        } catch (ArithmeticException e) {
            throw fail(key, "is " + value + ", not a whole number below 2^31");
        }
    }

    private int size(String key) {
        int value = requiredInt(key);
        if (value < 1) {
            throw fail(key, "is " + value + ", but must be at least 1");
        }
        return value;
    }

    private int optionalSize(String key, int fallback) {
        return present(json, key) ? size(key) : fallback;
    }

    private double optionalNumber(JsonObject object, String key, double fallback) {
        return present(object, key) ? number(object, key).doubleValue() : fallback;
    }

    private boolean optionalBoolean(String key) {
        if (!present(json, key)) {
            return false;
        }
        JsonElement value = json.get(key);
        if (!value.isJsonPrimitive() || !value.getAsJsonPrimitive().isBoolean()) {
            throw fail(key, "is " + value + ", neither true nor false");
        }
        return value.getAsBoolean();
    }

    private BigDecimal number(JsonObject object, String key) {
        JsonElement value = object.get(key);
        if (value.isJsonPrimitive() && value.getAsJsonPrimitive().isNumber()) {
            try {
                return value.getAsBigDecimal();
            } catch (NumberFormatException e) {
                throw fail(key, "is " + value + ", not a finite number");
            }
        }
        throw fail(key, "is " + value + ", not a number");
    }

    private String text(JsonObject object, String key) {
        if (!present(object, key)) {
            return null;
        }
        JsonElement value = object.get(key);
        if (!value.isJsonPrimitive() || !value.getAsJsonPrimitive().isString()) {
            throw fail(key, "is " + value + ", not a string");
        }
        return value.getAsString();
    }

    private static boolean present(JsonObject object, String key) {
        return object.has(key) && !object.get(key).isJsonNull();
    }

    private IllegalArgumentException fail(String key, String detail) {
        return new IllegalArgumentException(file + ": " + key + " " + detail);
    }
}
