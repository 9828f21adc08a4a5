package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.stream.Collectors;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.training.LanguageModel;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class GeneratorTest {

    private static final MoeConfig CONFIG = ServedModel.config().build();
    private static final int[] PROMPT = {1, 2, 3};

    @TempDir private static Path folder;

    @BeforeAll
    static void save() throws IOException {
        ServedModel.save(folder);
    }

    /** A letter a token. */
    private static String decode(int[] ids) {
        return Arrays.stream(ids)
                .mapToObj(id -> String.valueOf((char) ('0' + id)))
                .collect(Collectors.joining());
    }

    private static GenerationSettings.Builder settings() {
        return GenerationSettings.builder().optMaxTokens(40).optTemperature(1).optSeed(9);
    }

    private static Generator.Result resident(GenerationSettings settings) throws IOException {
        try (LanguageModel model = ServedModel.create(CONFIG);
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder())) {
            StringBuilder heard = new StringBuilder();
            Generator.Result result =
                    new Generator(decoder, GeneratorTest::decode)
                            .generate(PROMPT, settings, heard::append);
            assertEquals(result.text(), heard.toString());
            return result;
        }
    }

    @Test
    void generate_offloadedOrResidentAndAnyCache_sameTextForASeed() throws IOException {
        Generator.Result expected = resident(settings().build());
        assertEquals(40, expected.tokens().size());
        assertEquals(39, expected.decodedTokens());
        assertEquals(39, expected.decode().tokens());
        assertEquals(1, expected.decode().hitRate());
        assertEquals(Generator.StopReason.MAX_TOKENS, expected.reason());
        for (int capacity : new int[] {2, 4, 8}) {
            try (HostExpertStore store = HostExpertStore.load(folder, CONFIG, Packing.EXACT);
                    IncrementalDecoder decoder =
                            IncrementalDecoder.load(
                                    folder,
                                    OffloadedExperts.builder()
                                            .setStore(store)
                                            .setCapacity(capacity)
                                            .setTopK(2)
                                            .optPrefetch(Prefetch.ROUTER)
                                            .build())) {
                Generator generator = new Generator(decoder, GeneratorTest::decode);
                Generator.Result first =
                        generator.generate(PROMPT, settings().build(), piece -> {});
                Generator.Result second =
                        generator.generate(
                                PROMPT, settings().optPromptChunk(1).build(), piece -> {});
                assertEquals(expected.tokens(), first.tokens());
                assertEquals(expected.tokens(), second.tokens());
                assertEquals(39, second.decode().tokens());
                assertEquals(39L * 2 * ServedModel.LAYERS, second.decode().requests());
            }
        }
        assertNotEquals(expected.tokens(), resident(settings().optSeed(10).build()).tokens());
    }

    @Test
    void generate_greedy_likeliestTokenOfTheFullForward() throws IOException {
        Generator.Result result = resident(GenerationSettings.builder().optMaxTokens(10).build());
        int[] text = Arrays.copyOf(PROMPT, 3 + 10);
        for (int t = 0; t < 10; t++) {
            text[3 + t] = result.tokens().get(t);
        }
        try (LanguageModel model = ServedModel.create(CONFIG)) {
            float[][] logits = ServedModel.fullForward(model, text);
            for (int t = 2; t < text.length - 1; t++) {
                float[] z = logits[t];
                for (float other : z) {
                    assertTrue(z[text[t + 1]] >= other - 1e-4f, "token " + t);
                }
            }
        }
    }

    @Test
    void generate_stopTokenAndStopString_textEndsBefore() throws IOException {
        Generator.Result all = resident(settings().build());
        int stop = all.tokens().get(7);
        int first = all.tokens().indexOf(stop);
        Generator.Result stopped = resident(settings().optStopTokens(Set.of(stop)).build());
        assertEquals(Generator.StopReason.STOP_TOKEN, stopped.reason());
        assertEquals(all.tokens().subList(0, first), stopped.tokens());

        String part = all.text().substring(10, 13);
        Generator.Result cut = resident(settings().optStopStrings(List.of(part)).build());
        assertEquals(Generator.StopReason.STOP_STRING, cut.reason());
        assertEquals(all.text().substring(0, all.text().indexOf(part)), cut.text());
    }

    @Test
    void generate_oneToken_noTimePerToken() throws IOException {
        Generator.Result result = resident(settings().optMaxTokens(1).build());
        assertEquals(1, result.tokens().size());
        assertTrue(Double.isNaN(result.millisPerToken()));
        assertEquals(0, result.loadingShare());
    }

    @Test
    void generate_emptyOrTooLong_refused() throws IOException {
        try (LanguageModel model = ServedModel.create(CONFIG);
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder())) {
            Generator generator = new Generator(decoder, GeneratorTest::decode);
            assertThrows(
                    IllegalArgumentException.class,
                    () -> generator.generate(new int[0], settings().build(), piece -> {}));
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () ->
                                    generator.generate(
                                            PROMPT,
                                            settings().optMaxTokens(2047).build(),
                                            piece -> {}));
            assertTrue(e.getMessage().contains("2048 positions"), e.getMessage());
        }
    }
}
