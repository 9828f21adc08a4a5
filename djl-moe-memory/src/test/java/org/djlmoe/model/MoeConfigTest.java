package org.djlmoe.model;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class MoeConfigTest {

    @TempDir private Path folder;

    private static MoeConfig.Builder builder() {
        return MoeConfig.builder()
                .setVocabSize(11)
                .setHiddenSize(8)
                .setIntermediateSize(6)
                .setNumLayers(2)
                .setNumHeads(2)
                .setNumExperts(5)
                .setTopK(2);
    }

    private static MoeConfig extended() {
        return builder().optSharedExperts(7, true).optRoutingBias(true).build();
    }

    private JsonObject json(MoeConfig config) throws IOException {
        Path file = folder.resolve("config.json");
        config.toJson(file);
        return JsonParser.parseString(Files.readString(file)).getAsJsonObject();
    }

    private MoeConfig read(JsonObject json) throws IOException {
        Path file = folder.resolve("config.json");
        Files.writeString(file, json.toString());
        return MoeConfig.fromJson(file);
    }

    private void assertRefused(JsonObject json, String... parts) {
        IllegalArgumentException e =
                assertThrows(IllegalArgumentException.class, () -> read(json), json::toString);
        for (String part : parts) {
            assertTrue(e.getMessage().contains(part), e.getMessage());
        }
    }

    @Property(tries = 60)
    void toJsonAndFromJson_anyForm_equal(
            @ForAll @IntRange(max = 40) int shared,
            @ForAll boolean gated,
            @ForAll boolean bias,
            @ForAll boolean tied,
            @ForAll @IntRange(max = 9) int window)
            throws IOException {
        MoeConfig config =
                builder()
                        .optSharedExperts(shared, gated)
                        .optRoutingBias(bias)
                        .optTieWordEmbeddings(tied)
                        .optSlidingWindow(window)
                        .build();
        assertEquals(config, config.toBuilder().build());
        Path file = Files.createTempFile("config", ".json");
        try {
            config.toJson(file, "bfloat16");
            assertEquals(config, MoeConfig.fromJson(file));
            String type = shared == 0 && !bias ? "\"mixtral\"" : "\"djl_moe\"";
            assertTrue(Files.readString(file).contains("\"model_type\": " + type));
        } finally {
            Files.delete(file);
        }
    }

    /** Other software must not take such a model for a Mixtral and drop what it does not know. */
    @Test
    void toJson_sharedExpertsOrBias_noMixtral() throws IOException {
        JsonObject json = json(extended());
        assertEquals("djl_moe", json.get("model_type").getAsString());
        assertEquals(7, json.get("shared_expert_intermediate_size").getAsInt());
        assertTrue(json.get("shared_expert_gated").getAsBoolean());
        assertTrue(json.get("use_routing_bias").getAsBoolean());
        assertEquals("softmax", json.get("scoring_func").getAsString());
        assertTrue(json.get("norm_topk_prob").getAsBoolean());
    }

    @Test
    void toJson_neither_mixtralWithoutNewKeys() throws IOException {
        JsonObject json = json(builder().build());
        assertEquals("mixtral", json.get("model_type").getAsString());
        assertEquals("MixtralForCausalLM", json.get("architectures").getAsString());
        for (String key :
                new String[] {
                    "shared_expert_intermediate_size",
                    "shared_expert_gated",
                    "use_routing_bias",
                    "scoring_func",
                    "norm_topk_prob"
                }) {
            assertFalse(json.has(key), key);
        }
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            value = {
                "scoring_func                    | \"sigmoid\"",
                "topk_method                     | \"noaux_tc\"",
                "topk_method                     | \"group_limited_greedy\"",
                "norm_topk_prob                  | false",
                "routed_scaling_factor           | 2.5",
                "n_group                         | 8",
                "topk_group                      | 4",
                "use_grouped_topk                | true",
                "n_shared_experts                | 1",
                "num_shared_experts              | 2",
                "moe_num_shared_experts          | 2",
                "shared_intermediate_size        | 64",
                "first_k_dense_replace           | 1",
                "decoder_sparse_step             | 2",
                "mlp_only_layers                 | [0]",
                "mlp_only_layers                 | 3",
                "qkv_bias                        | true",
                "use_bias                        | true",
                "use_qk_norm                     | true",
                "shared_expert_intermediate_size | -1",
                "shared_expert_intermediate_size | 3.5",
                "shared_expert_intermediate_size | \"wide\"",
                "shared_expert_gated             | 1",
                "use_routing_bias                | \"yes\"",
                "model_type                      | \"deepseek_v3\"",
                "model_type                      | \"qwen2_moe\"",
                "hidden_act                      | \"gelu\"",
            })
    void fromJson_whatTheDecoderDoesNotCompute_refusedByKey(String key, String value)
            throws IOException {
        for (MoeConfig config : new MoeConfig[] {extended(), builder().build()}) {
            JsonObject json = json(config);
            json.add(key, JsonParser.parseString(value));
            assertRefused(json, folder.resolve("config.json").toString(), key + " ");
        }
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            value = {
                "scoring_func          | \"softmax\"",
                "topk_method           | \"greedy\"",
                "norm_topk_prob        | true",
                "routed_scaling_factor | 1.0",
                "n_group               | 1",
                "topk_group            | 1",
                "n_shared_experts      | 0",
                "n_shared_experts      | null",
                "mlp_only_layers       | []",
                "decoder_sparse_step   | 1",
                "qkv_bias              | false",
            })
    void fromJson_whatChangesNothing_accepted(String key, String value) throws IOException {
        for (MoeConfig config : new MoeConfig[] {extended(), builder().build()}) {
            JsonObject json = json(config);
            json.add(key, JsonParser.parseString(value));
            assertEquals(config, read(json));
        }
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "shared_expert_intermediate_size",
                "use_routing_bias",
                "shared_expert_gated"
            })
    void fromJson_newKeyInAMixtral_refusedWithTheFix(String key) throws IOException {
        JsonElement value = json(extended()).get(key);
        JsonObject json = json(builder().build());
        json.add(key, value);
        assertRefused(json, key + " is " + value, "set model_type to 'djl_moe'");
    }

    @Test
    void fromJson_gateWithoutSharedExperts_refused() throws IOException {
        JsonObject json = json(extended());
        json.remove("shared_expert_intermediate_size");
        assertRefused(json, "shared_expert_gated is true", "shared_expert_intermediate_size");
    }

    @Test
    void build_wrongSharedExperts_clearError() {
        assertThrows(
                IllegalArgumentException.class, () -> builder().optSharedExperts(-1, true).build());
        assertFalse(builder().optSharedExperts(0, true).build().sharedExpertGated());
    }
}
