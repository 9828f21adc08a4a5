package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import org.djlmoe.checkpoint.Layout;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.training.LanguageModel;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;

/** Serving what a Mixtral does not have, beside the full forward pass. */
class SharedExpertsServingTest {

    private static final int PROMPT = 9;
    private static final int[] TOKENS = ServedModel.tokens(40, 11);

    @TempDir private Path folder;

    /** Logits of every position, and what every layer chose, position by position. */
    private record Run(float[][] logits, List<List<Long>> routing) {}

    private static List<List<Long>> observe(List<MoeBlock> blocks) {
        List<List<Long>> routing = new ArrayList<>();
        for (MoeBlock block : blocks) {
            List<Long> chosen = new ArrayList<>();
            routing.add(chosen);
            block.router()
                    .setObserver(ids -> Arrays.stream(ids.toLongArray()).forEach(chosen::add));
        }
        return routing;
    }

    private static Run full(LanguageModel model) {
        List<List<Long>> routing = observe(model.decoder().moeBlocks());
        return new Run(ServedModel.fullForward(model, TOKENS), routing);
    }

    private static Run incremental(IncrementalDecoder decoder) {
        List<List<Long>> routing = observe(decoder.decoder().moeBlocks());
        float[][] logits = new float[TOKENS.length][];
        try (KvCache cache = decoder.newCache(1, TOKENS.length)) {
            float[][] prompt = decoder.score(cache, Arrays.copyOf(TOKENS, PROMPT), 4);
            System.arraycopy(prompt, 0, logits, 0, PROMPT);
            for (int t = PROMPT; t < TOKENS.length; t++) {
                logits[t] = decoder.decode(cache, TOKENS[t])[0];
            }
        }
        return new Run(logits, routing);
    }

    private static void assertClose(Run expected, Run actual) {
        assertEquals(expected.routing(), actual.routing());
        for (int t = 0; t < TOKENS.length; t++) {
            float largest = 1;
            for (float z : expected.logits()[t]) {
                largest = Math.max(largest, Math.abs(z));
            }
            assertArrayEquals(
                    expected.logits()[t], actual.logits()[t], 1e-5f * largest, "position " + t);
        }
    }

    private static MoeConfig config(int shared, boolean gated, boolean bias) {
        return ServedModel.config().optSharedExperts(shared, gated).optRoutingBias(bias).build();
    }

    @ParameterizedTest
    @CsvSource({
        // S narrower and wider than I = 12
        "5, false, false",
        "20, true, false",
        "0, false, true",
        "7, true, true",
        "1, false, true",
    })
    void logits_inMemory_thoseOfTheFullForward(int shared, boolean gated, boolean bias) {
        try (LanguageModel model = ServedModel.create(config(shared, gated, bias));
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder())) {
            assertClose(full(model), incremental(decoder));
        }
    }

    @ParameterizedTest
    @EnumSource(Layout.class)
    void logits_loadedAndOffloaded_residentOnesBitForBitAndThoseOfTheFullForward(Layout layout)
            throws IOException {
        MoeConfig config = config(7, true, true);
        Run expected;
        try (LanguageModel model = ServedModel.create(config)) {
            model.save(folder, SaveOptions.builder().optLayout(layout).build());
            expected = full(model);
        }
        try (HostExpertStore store = HostExpertStore.load(folder, config, Packing.EXACT)) {
            Run resident;
            try (IncrementalDecoder decoder =
                    IncrementalDecoder.load(folder, ResidentExperts.load(store))) {
                assertEquals(config, decoder.decoder().config());
                resident = incremental(decoder);
                assertClose(expected, resident);
            }
            for (Prefetch prefetch : Prefetch.values()) {
                OffloadedExperts experts =
                        OffloadedExperts.builder()
                                .setStore(store)
                                .setCapacity(3)
                                .setTopK(ServedModel.TOP_K)
                                .optPrefetch(prefetch)
                                .build();
                try (IncrementalDecoder decoder = IncrementalDecoder.load(folder, experts)) {
                    Run offloaded = incremental(decoder);
                    assertEquals(resident.routing(), offloaded.routing());
                    for (int t = 0; t < TOKENS.length; t++) {
                        assertArrayEquals(resident.logits()[t], offloaded.logits()[t]);
                    }
                    assertTrue(experts.decodeTraffic().loads() > 0, "nothing was loaded");
                }
            }
        }
    }

    /** Shared experts lie beside attention, not in the slots, and are no traffic. */
    @Test
    void residentBytes_sharedExperts_notAmongTheSlots() throws IOException {
        MoeConfig config = config(20, true, false);
        try (LanguageModel model = ServedModel.create(config)) {
            model.save(folder, SaveOptions.builder().build());
        }
        try (HostExpertStore store = HostExpertStore.load(folder, config, Packing.EXACT);
                OffloadedExperts experts =
                        OffloadedExperts.builder()
                                .setStore(store)
                                .setCapacity(3)
                                .setTopK(ServedModel.TOP_K)
                                .build()) {
            long slots = ServedModel.LAYERS * 3L + ServedModel.TOP_K;
            assertEquals(slots * 3 * 16 * 12 * Float.BYTES, experts.residentBytes());
        }
    }

    /** Neither test above would notice weights that have no effect. */
    @Test
    void logits_withoutSharedExpertsOrBias_different() {
        Map<String, MoeConfig> forms =
                Map.of("shared", config(7, true, false), "bias", config(0, false, true));
        try (LanguageModel plain = ServedModel.create(config(0, false, false))) {
            forms.forEach(
                    (name, config) -> {
                        try (LanguageModel model = ServedModel.create(config)) {
                            plain.decoder()
                                    .checkpointParameters()
                                    .forEach(
                                            (parameter, p) ->
                                                    p.getArray()
                                                            .copyTo(
                                                                    model.decoder()
                                                                            .checkpointParameters()
                                                                            .get(parameter)
                                                                            .getArray()));
                            Run with = full(model);
                            Run without = full(plain);
                            int last = TOKENS.length - 1;
                            assertTrue(
                                    Math.abs(with.logits()[last][0] - without.logits()[last][0])
                                            > 1e-3,
                                    name);
                            if (name.equals("bias")) {
                                assertFalse(with.routing().equals(without.routing()), name);
                            }
                        }
                    });
        }
    }

    @Test
    void generate_sameTextResidentAndOffloaded() throws IOException {
        MoeConfig config = config(7, false, true);
        try (LanguageModel model = ServedModel.create(config);
                IncrementalDecoder inMemory = IncrementalDecoder.of(model.decoder())) {
            model.save(folder, SaveOptions.builder().build());
            GenerationSettings settings =
                    GenerationSettings.builder().optMaxTokens(12).optTemperature(0).build();
            int[] prompt = Arrays.copyOf(TOKENS, PROMPT);
            StringBuilder expected = new StringBuilder();
            new Generator(inMemory, SharedExpertsServingTest::text)
                    .generate(prompt, settings, expected::append);
            try (HostExpertStore store = HostExpertStore.load(folder, config, Packing.EXACT);
                    IncrementalDecoder offloaded =
                            IncrementalDecoder.load(
                                    folder,
                                    OffloadedExperts.builder()
                                            .setStore(store)
                                            .setCapacity(2)
                                            .setTopK(ServedModel.TOP_K)
                                            .build())) {
                StringBuilder actual = new StringBuilder();
                new Generator(offloaded, SharedExpertsServingTest::text)
                        .generate(prompt, settings, actual::append);
                assertEquals(expected.toString(), actual.toString());
                assertEquals(12, actual.length());
            }
        }
    }

    private static String text(int[] ids) {
        StringBuilder text = new StringBuilder();
        Arrays.stream(ids).forEach(id -> text.append((char) ('0' + id)));
        return text.toString();
    }
}
