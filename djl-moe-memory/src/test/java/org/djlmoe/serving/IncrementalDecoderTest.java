package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.nio.file.Path;
import java.util.Arrays;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.LanguageModel;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class IncrementalDecoderTest {

    private static float[][] incremental(
            IncrementalDecoder decoder, int[] tokens, int prompt, int chunk) {
        float[][] all = new float[tokens.length][];
        try (KvCache cache = decoder.newCache(1, tokens.length)) {
            float[][] first = decoder.score(cache, Arrays.copyOf(tokens, prompt), chunk);
            System.arraycopy(first, 0, all, 0, prompt);
            for (int t = prompt; t < tokens.length; t++) {
                all[t] = decoder.decode(cache, tokens[t])[0];
            }
            assertEquals(tokens.length, cache.length());
        }
        return all;
    }

    private static void assertClose(float[][] expected, float[][] actual) {
        assertEquals(expected.length, actual.length);
        for (int t = 0; t < expected.length; t++) {
            float largest = 1;
            for (float z : expected[t]) {
                largest = Math.max(largest, Math.abs(z));
            }
            assertArrayEquals(expected[t], actual[t], 1e-5f * largest, "position " + t);
        }
    }

    @ParameterizedTest
    @CsvSource({
        // kvHeads, window, prompt, chunk: chunks that divide the prompt and that do not, one token
        // at a time, all at once; windows narrower and wider than chunk and text
        "4, 0, 20, 20",
        "2, 0, 20, 7",
        "1, 0, 1, 1",
        "2, 5, 20, 20",
        "2, 5, 20, 3",
        "2, 5, 20, 1",
        "1, 1, 9, 4",
        "4, 64, 20, 8",
    })
    void logits_anyChunksAndWindow_thoseOfTheFullForward(
            int kvHeads, int window, int prompt, int chunk) {
        MoeConfig config =
                ServedModel.config().optNumKeyValueHeads(kvHeads).optSlidingWindow(window).build();
        try (LanguageModel model = ServedModel.create(config);
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder())) {
            int[] tokens = ServedModel.tokens(33, 1);
            assertClose(
                    ServedModel.fullForward(model, tokens),
                    incremental(decoder, tokens, prompt, chunk));
        }
    }

    @ParameterizedTest
    @CsvSource({"600, 600", "300, 100", "10, 4"})
    void logits_textLongerThanTheCacheOfAWindow_thoseOfTheFullForward(int prompt, int chunk) {
        MoeConfig config = ServedModel.config().optSlidingWindow(5).build();
        try (LanguageModel model = ServedModel.create(config);
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder())) {
            int[] tokens = ServedModel.tokens(650, 2);
            try (KvCache cache = decoder.newCache(1, 700)) {
                assertEquals(2L * ServedModel.LAYERS * 2 * 4 * (5 + 256) * 4, cache.bytes());
            }
            assertClose(
                    ServedModel.fullForward(model, tokens),
                    incremental(decoder, tokens, prompt, chunk));
        }
    }

    @Test
    void logits_severalSequences_thoseOfEachAlone() {
        try (LanguageModel model = ServedModel.create(ServedModel.config().build());
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder());
                KvCache cache = decoder.newCache(3, 12)) {
            int[][] rows = {
                ServedModel.tokens(12, 3), ServedModel.tokens(12, 4), ServedModel.tokens(12, 5)
            };
            int[][] prompts =
                    Arrays.stream(rows).map(r -> Arrays.copyOf(r, 8)).toArray(int[][]::new);
            float[][] last = decoder.prefill(cache, prompts, 3);
            for (int t = 8; t < 12; t++) {
                last = decoder.decode(cache, rows[0][t], rows[1][t], rows[2][t]);
            }
            for (int b = 0; b < 3; b++) {
                assertArrayEquals(
                        ServedModel.fullForward(model, rows[b])[11], last[b], 1e-5f, "row " + b);
            }
        }
    }

    @Test
    void logits_afterClear_thoseOfANewText() {
        try (LanguageModel model = ServedModel.create(ServedModel.config().build());
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder());
                KvCache cache = decoder.newCache(1, 10)) {
            int[] tokens = ServedModel.tokens(10, 6);
            decoder.score(cache, ServedModel.tokens(10, 7), 4);
            cache.clear();
            assertClose(ServedModel.fullForward(model, tokens), decoder.score(cache, tokens, 4));
        }
    }

    @Test
    void load_checkpoint_logitsOfTheModelPriorIncluded(@TempDir Path folder) throws Exception {
        MoeConfig config = ServedModel.config().optTieWordEmbeddings(true).build();
        try (LanguageModel model = ServedModel.create(config)) {
            model.save(folder, SaveOptions.builder().build());
            boolean[] kept = new boolean[ServedModel.EXPERTS];
            Arrays.fill(kept, 0, 4, true);
            int[] tokens = ServedModel.tokens(12, 8);
            float[][] plain = ServedModel.fullForward(model, tokens);
            model.decoder()
                    .moeBlocks()
                    .forEach(b -> b.router().setPrior(kept, SelectionPrior.additive(2)));
            float[][] biased = ServedModel.fullForward(model, tokens);
            try (HostExpertStore store = HostExpertStore.load(folder, config, Packing.EXACT);
                    IncrementalDecoder decoder =
                            IncrementalDecoder.load(folder, ResidentExperts.load(store))) {
                assertClose(plain, incremental(decoder, tokens, 6, 4));
                decoder.decoder()
                        .moeBlocks()
                        .forEach(b -> b.router().setPrior(kept, SelectionPrior.additive(2)));
                assertClose(biased, incremental(decoder, tokens, 6, 4));
                assertTrue(Math.abs(plain[11][0] - biased[11][0]) > 1e-3, "the prior did nothing");
            }
        }
    }

    @Test
    void of_adapters_refusedWithTheFix() {
        try (LanguageModel model = ServedModel.create(ServedModel.config().build())) {
            model.decoder()
                    .moeBlocks()
                    .get(0)
                    .experts()
                    .attachAdapters(2, 4)
                    .initialize(model.manager(), DataType.FLOAT32, new Shape(-1, 16));
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () -> IncrementalDecoder.of(model.decoder()));
            assertTrue(e.getMessage().contains("merge"), e.getMessage());
        }
    }

    @Test
    void decode_noGraphAndNoArraysLeft() {
        try (LanguageModel model = ServedModel.create(ServedModel.config().build());
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder());
                KvCache cache = decoder.newCache(1, 200)) {
            model.train(path -> true);
            decoder.prefill(cache, new int[][] {{1, 2, 3}}, 8);
            int before = model.manager().getManagedArrays().size();
            for (int t = 0; t < 100; t++) {
                decoder.decode(cache, t % ServedModel.VOCAB);
            }
            assertEquals(before, model.manager().getManagedArrays().size());
        }
    }

    @Test
    void input_wrong_clearErrorAndUsableAfterwards() {
        try (LanguageModel model = ServedModel.create(ServedModel.config().build());
                IncrementalDecoder decoder = IncrementalDecoder.of(model.decoder());
                KvCache cache = decoder.newCache(1, 4)) {
            assertMessage("vocabulary", () -> decoder.decode(cache, ServedModel.VOCAB));
            assertMessage("vocabulary", () -> decoder.decode(cache, -1));
            assertMessage("1 sequences", () -> decoder.decode(cache, 1, 2));
            assertMessage("at least one", () -> decoder.prefill(cache, new int[][] {{}}, 4));
            assertMessage("larger", () -> decoder.prefill(cache, new int[][] {new int[5]}, 4));
            assertMessage("positions", () -> decoder.newCache(1, 2049));
            assertEquals(0, cache.length());
            decoder.prefill(cache, new int[][] {{1, 2, 3, 4}}, 4);
            assertMessage("larger", () -> decoder.decode(cache, 5));
        }
    }

    private static void assertMessage(String part, Runnable action) {
        IllegalArgumentException e = assertThrows(IllegalArgumentException.class, action::run);
        assertTrue(e.getMessage().contains(part), e.getMessage());
    }
}
