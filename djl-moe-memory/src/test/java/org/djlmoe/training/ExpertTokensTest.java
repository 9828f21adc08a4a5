package org.djlmoe.training;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.stream.IntStream;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.optimizer.IdleExperts;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.routing.RoutingObserver;
import org.djlmoe.routing.SelectionPrior;
import org.junit.jupiter.api.Test;

class ExpertTokensTest {

    private static final TokenBatch BATCH =
            new TokenBatch(
                    2,
                    8,
                    IntStream.range(0, 16).map(i -> i * 7 % 31).toArray(),
                    IntStream.range(0, 16).map(i -> (i + 1) * 7 % 31).toArray());

    private static LanguageModel model() {
        return LanguageModel.create(
                MoeConfig.builder()
                        .setVocabSize(31)
                        .setHiddenSize(8)
                        .setIntermediateSize(16)
                        .setNumLayers(2)
                        .setNumHeads(2)
                        .setNumExperts(4)
                        .setTopK(2)
                        .build(),
                LanguageModel.Chunks.DEFAULT,
                3);
    }

    @Test
    void take_afterSteps_countsTrainingOnlyAndBeginsAgain() {
        try (LanguageModel model = model();
                ExpertTokens tokens = ExpertTokens.observe(model.decoder())) {
            model.decoder()
                    .moeBlocks()
                    .get(0)
                    .experts()
                    .attachAdapters(2, 4)
                    .initialize(model.manager(), DataType.FLOAT32, new Shape(1));
            model.loss(BATCH);
            Map<String, long[]> taken = tokens.take();
            assertEquals(2 * 2 + 4, taken.size());
            taken.forEach(
                    (path, counts) -> {
                        assertTrue(path.contains("mlp.experts."), path);
                        assertEquals(4, counts.length);
                        assertEquals(2 * 16, Arrays.stream(counts).sum(), path);
                    });
            Evaluation.of(model, List.of(BATCH), done -> {});
            tokens.take().values().forEach(counts -> assertEquals(0, Arrays.stream(counts).sum()));
        }
    }

    @Test
    void close_routersHadObservers_theyAreSeenAndGivenBack() {
        try (LanguageModel model = model()) {
            List<MoeBlock> layers = model.decoder().moeBlocks();
            int[] seen = {0};
            RoutingObserver other = ids -> seen[0]++;
            layers.get(1).router().setObserver(other);
            try (ExpertTokens tokens = ExpertTokens.observe(model.decoder())) {
                model.loss(BATCH);
                assertEquals(1, seen[0]);
            }
            assertSame(other, layers.get(1).router().observer());
            assertNull(layers.get(0).router().observer());
        }
    }

    /** Backward gives masked experts gradients of zeros, with which AdamW would decay them. */
    @Test
    void step_idleExpertsSkipped_theirWeightsStayToTheBit() {
        try (LanguageModel model = model();
                ExpertTokens tokens = ExpertTokens.observe(model.decoder())) {
            MoeBlock layer = model.decoder().moeBlocks().get(1);
            layer.router()
                    .setPrior(new boolean[] {true, false, true, false}, SelectionPrior.hardMask());
            NDArray weight = layer.experts().down().getArray();
            float[] before = weight.toFloatArray();
            try (OffloadStreamAdamW optimizer =
                            OffloadStreamAdamW.builder()
                                    .setLearningRateTracker(Tracker.fixed(0.01f))
                                    .optWeightDecay(0.1)
                                    .optIdleExperts(IdleExperts.SKIP, tokens::take)
                                    .build();
                    LanguageModelTrainer trainer = new LanguageModelTrainer(model, optimizer, 0)) {
                for (int step = 0; step < 3; step++) {
                    trainer.step(BATCH);
                }
                assertArrayEquals(
                        new long[] {3, 0, 3, 0},
                        optimizer.state().steps("model.layers.1.mlp.experts.down_proj"));
                float[] after = weight.toFloatArray();
                int size = after.length / 4;
                for (int e = 0; e < 4; e++) {
                    boolean same =
                            Arrays.equals(
                                    Arrays.copyOfRange(before, e * size, (e + 1) * size),
                                    Arrays.copyOfRange(after, e * size, (e + 1) * size));
                    assertEquals(e % 2 == 1, same, "expert " + e);
                }
            }
        }
    }
}
