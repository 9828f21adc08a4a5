package org.djlmoe.examples.serving;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.serving.Packing;
import org.djlmoe.serving.Prefetch;
import org.djlmoe.training.LanguageModel;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class GenerationBenchTest {

    private static final int VOCAB = 30;
    private static final List<int[]> TEXTS = List.of(text(40, 3), text(25, 7));

    @TempDir private static Path folder;
    private static double expectedPerplexity;

    private static int[] text(int length, int step) {
        int[] ids = new int[length];
        Arrays.setAll(ids, i -> (i * i + step * i) % VOCAB);
        return ids;
    }

    @BeforeAll
    static void save() throws IOException {
        MoeConfig config =
                MoeConfig.builder()
                        .setVocabSize(VOCAB)
                        .setHiddenSize(16)
                        .setIntermediateSize(8)
                        .setNumLayers(2)
                        .setNumHeads(2)
                        .setNumExperts(6)
                        .setTopK(2)
                        .optInitializerRange(0.3)
                        .build();
        try (LanguageModel model = LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, 3)) {
            model.save(folder, SaveOptions.builder().build());
            double sum = 0;
            int count = 0;
            for (int[] text : TEXTS) {
                // Loss of the tokens behind the prompt: that of all minus that of the prompt's.
                sum += total(model, text, text.length - 1) - total(model, text, 5);
                count += text.length - 1 - 5;
            }
            expectedPerplexity = Math.exp(sum / count);
        }
    }

    private static double total(LanguageModel model, int[] text, int tokens) {
        int[] inputs = Arrays.copyOf(text, tokens);
        int[] targets = Arrays.copyOfRange(text, 1, tokens + 1);
        return tokens * model.loss(new TokenBatch(1, tokens, inputs, targets));
    }

    @Test
    void run_residentOffloadedPrefetchedPadded_perplexityOfTheModelAndLoadsThatFit()
            throws IOException {
        ServingSettings offloaded = ServingSettings.offloaded(3);
        List<GenerationBench.Result> results =
                GenerationBench.run(
                        List.of(
                                GenerationBench.Arm.of(
                                        "resident",
                                        folder,
                                        ServingSettings.allResident(Packing.EXACT)),
                                GenerationBench.Arm.of("file", folder, offloaded),
                                GenerationBench.Arm.of(
                                        "host",
                                        folder,
                                        offloaded.withTier(ServingSettings.Tier.HOST)),
                                GenerationBench.Arm.of(
                                        "prefetch",
                                        folder,
                                        offloaded.withPrefetch(Prefetch.ROUTER)),
                                GenerationBench.Arm.of(
                                        "padded",
                                        folder,
                                        offloaded.withPacking(new Packing(false, 4))),
                                GenerationBench.Arm.of("cold", folder, offloaded.withCold(true))),
                        TEXTS,
                        5);
        for (GenerationBench.Result result : results) {
            assertEquals(expectedPerplexity, result.perplexity(), 1e-4, result.toString());
            assertEquals(34 + 19 - 16, result.tokens());
            assertTrue(result.millisPerToken() > 0);
            assertTrue(result.loadingShare() >= 0 && result.loadingShare() <= 1);
            if (!result.name().equals("resident")) {
                assertEquals(results.get(1).loadsPerToken(), result.loadsPerToken(), result.name());
            }
        }
        assertEquals(0, results.get(0).loadsPerToken());
        assertEquals(1, results.get(0).hitRate());
        GenerationBench.Result file = results.get(1);
        assertTrue(file.loadsPerToken() > 0 && file.hitRate() < 1, file.toString());
        assertEquals(file.loadsPerToken() * 3 * 16 * 8 * 4, file.bytesPerToken(), 1e-6);
        assertEquals(4 * file.bytesPerToken(), results.get(4).bytesPerToken(), 1e-6);
        assertEquals((2 * 3 + 2) * 3 * 16 * 8 * 4, file.residentBytes());
    }

    @Test
    void run_hardPrior_fewerLoads() throws IOException {
        boolean[] kept = {true, true, true, false, false, false};
        ExpertPrior prior =
                new ExpertPrior(
                        ExpertMask.of(new boolean[][] {kept, kept}), SelectionPrior.hardMask());
        List<GenerationBench.Result> results =
                GenerationBench.run(
                        List.of(
                                new GenerationBench.Arm(
                                        "free", folder, null, ServingSettings.offloaded(3)),
                                new GenerationBench.Arm(
                                        "kept", folder, prior, ServingSettings.offloaded(3))),
                        TEXTS,
                        5);
        assertEquals(0, results.get(1).loadsPerToken());
        assertTrue(results.get(0).loadsPerToken() > 0);
    }

    @Test
    void run_tooLittleTextOrTooSmallACache_refused() {
        assertRefused(
                "leaves nothing", () -> run(List.of(text(6, 1)), ServingSettings.offloaded(3)));
        assertRefused("not timed", () -> run(List.of(text(20, 1)), ServingSettings.offloaded(3)));
        assertRefused("at least 2", () -> run(TEXTS, ServingSettings.offloaded(1)));
        assertRefused("Cold", () -> ServingSettings.allResident(Packing.EXACT).withCold(true));
    }

    private static void run(List<int[]> texts, ServingSettings settings) {
        try {
            GenerationBench.run(folder, texts, 5, settings);
        } catch (IOException e) {
            throw new AssertionError(e);
        }
    }

    private static void assertRefused(String part, Runnable action) {
        IllegalArgumentException e = assertThrows(IllegalArgumentException.class, action::run);
        assertTrue(e.getMessage().contains(part), e.getMessage());
    }
}
