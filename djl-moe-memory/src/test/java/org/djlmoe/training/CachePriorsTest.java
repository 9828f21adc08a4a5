package org.djlmoe.training;

import static org.djlmoe.reference.Numbers.array;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.ParameterStore;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.function.Consumer;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.Router;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.routing.TokenSelector;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

class CachePriorsTest {

    private static final int EXPERTS = 6;

    /** Several chunks a batch, so that rows are not gone through in the order of the chunks. */
    private static LanguageModel model() {
        MoeConfig config =
                MoeConfig.builder()
                        .setVocabSize(19)
                        .setHiddenSize(16)
                        .setIntermediateSize(12)
                        .setNumLayers(2)
                        .setNumHeads(2)
                        .setNumExperts(EXPERTS)
                        .setTopK(2)
                        .optInitializerRange(0.3)
                        .build();
        return LanguageModel.create(config, new LanguageModel.Chunks(10, 512), 11);
    }

    private static Iterable<TokenBatch> text() {
        Random random = new Random(5);
        int[] stream = random.ints(16 * 20 + 1, 0, 19).toArray();
        return PackedTokens.of(stream, 16).sequential(3);
    }

    private static Evaluation evaluate(LanguageModel model) {
        return Evaluation.of(model, text(), t -> {});
    }

    private static int[][] ids(ExpertTrace trace) {
        int[][] ids = new int[trace.numLayers()][trace.tokens() * trace.topK()];
        for (int l = 0; l < ids.length; l++) {
            int layer = l;
            Arrays.setAll(ids[l], i -> trace.expert(layer, i / trace.topK(), i % trace.topK()));
        }
        return ids;
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void moeBlock_selectorOfTheTop_bitEqualToPlainRouting(boolean renormalize) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                GradMode off = GradMode.off()) {
            MoeBlock block =
                    MoeBlock.builder()
                            .setHiddenSize(16)
                            .setIntermediateSize(12)
                            .setNumExperts(EXPERTS)
                            .setTopK(2)
                            .optNorm(1e-5)
                            .optRenormalize(renormalize)
                            .optInitializerRange(0.3)
                            .optChunkTokens(5)
                            .build();
            block.initialize(manager, DataType.FLOAT32, new Shape(-1, 16));
            NDArray x = manager.randomNormal(new Shape(23, 16));
            ParameterStore store = new ParameterStore(manager, false);
            float[] plain = block.forward(store, new NDList(x), false).head().toFloatArray();
            block.router().setSelector((z, added, chosen) -> TokenSelector.top(z, z, 0, chosen));
            float[] selected = block.forward(store, new NDList(x), false).head().toFloatArray();
            assertArrayEquals(plain, selected);
        }
    }

    @Test
    void evaluate_lambdaZero_bitEqualToPlainRouting() {
        try (LanguageModel model = model()) {
            Evaluation plain = evaluate(model);
            List<Double> ranges = LogitRanges.measure(model, text());
            try (CachePriors priors =
                    CachePriors.attach(model, 0, ranges, 3, EvictionPolicy.Type.LRU, 1)) {
                Evaluation zero = evaluate(model);
                assertEquals(plain.loss(), zero.loss());
                assertArrayEquals(ids(plain.trace()), ids(zero.trace()));
            }
            assertEquals(plain.loss(), evaluate(model).loss());
        }
    }

    @ParameterizedTest
    @EnumSource(
            value = EvictionPolicy.Type.class,
            names = {"LRU", "LFU", "LFU_LIFETIME", "FIFO", "RANDOM", "DISCOUNTED"})
    void evaluate_anyPolicy_traceReplaysToTheLoadsThatWereCounted(EvictionPolicy.Type policy) {
        try (LanguageModel model = model()) {
            List<Double> ranges = LogitRanges.measure(model, text());
            double plain =
                    LoadReplay.builder()
                            .setCapacity(3)
                            .build()
                            .run(evaluate(model).trace(), policy)
                            .loadsPerToken();
            try (CachePriors priors = CachePriors.attach(model, 0.3, ranges, 3, policy, 1)) {
                ExpertTrace trace = evaluate(model).trace();
                double replayed =
                        LoadReplay.builder()
                                .setCapacity(3)
                                .build()
                                .run(trace, policy)
                                .loadsPerToken();
                assertEquals(replayed, priors.loadsPerToken());
                assertTrue(replayed < 0.9 * plain, replayed + " of " + plain);
            }
        }
    }

    @Test
    void evaluate_onTopOfAStaticPrior_bothCount() {
        try (LanguageModel model = model()) {
            boolean[] kept = {true, true, true, false, false, false};
            List<Double> ranges = LogitRanges.measure(model, text());
            for (MoeBlock layer : model.decoder().moeBlocks()) {
                layer.router().setPrior(kept, SelectionPrior.hardMask());
            }
            Evaluation masked = evaluate(model);
            try (CachePriors priors =
                    CachePriors.attach(model, 0, ranges, 2, EvictionPolicy.Type.LRU, 1)) {
                Evaluation zero = evaluate(model);
                assertEquals(masked.loss(), zero.loss());
                assertArrayEquals(ids(masked.trace()), ids(zero.trace()));
            }
            try (CachePriors priors =
                    CachePriors.attach(model, 0.5, ranges, 2, EvictionPolicy.Type.LRU, 1)) {
                Evaluation both = evaluate(model);
                assertNotEquals(masked.loss(), both.loss());
                for (long[] usage : both.trace().usage()) {
                    assertEquals(0, usage[3] + usage[4] + usage[5]);
                }
            }
        }
    }

    @Test
    void select_byLogitsAlone_isTheRoutersOwnChoice() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                LanguageModel model = model()) {
            Router router = model.decoder().moeBlocks().get(0).router();
            Random random = new Random(9);
            float[] rows = new float[4 * 16];
            for (int i = 0; i < rows.length; i++) {
                rows[i] = (float) random.nextGaussian();
            }
            router.setSelector((z, added, top) -> TokenSelector.top(z, z, 0, top));
            NDArray x = manager.create(rows, new Shape(4, 16));
            NDList chosen =
                    router.forward(new ParameterStore(manager, false), new NDList(x), false);
            router.setSelector(null);
            NDList plain = router.forward(new ParameterStore(manager, false), new NDList(x), false);
            assertArrayEquals(plain.get(0).toLongArray(), chosen.get(0).toLongArray());
            assertEquals(DataType.INT64, chosen.get(0).getDataType());
            assertArrayEquals(plain.get(1).toFloatArray(), chosen.get(1).toFloatArray(), 1e-6f);
        }
    }

    @Test
    void measure_someoneWatchesTheLogits_watchesOnAfterwards() {
        try (LanguageModel model = model()) {
            Consumer<NDArray> watcher = logits -> {};
            model.decoder().moeBlocks().get(0).router().setLogitObserver(watcher);
            LogitRanges.measure(model, text());
            assertSame(watcher, model.decoder().moeBlocks().get(0).router().logitObserver());
            assertNull(model.decoder().moeBlocks().get(1).router().logitObserver());
        }
    }

    @Test
    void forward_selectorAndLogitObserver_observerSeesTheLogits() {
        try (LanguageModel model = model()) {
            Router router = model.decoder().moeBlocks().get(0).router();
            List<Shape> seen = new ArrayList<>();
            router.setSelector((z, added, top) -> TokenSelector.top(z, z, 0, top));
            router.setLogitObserver(logits -> seen.add(logits.getShape()));
            evaluate(model);
            assertFalse(seen.isEmpty());
            seen.forEach(shape -> assertEquals(router.experts(), shape.getLastDimension()));
        }
    }

    @Test
    void close_always_routersChooseAsBefore() {
        try (LanguageModel model = model()) {
            CachePriors.attach(model, 1, List.of(1.0, 1.0), 3, EvictionPolicy.Type.LRU, 1).close();
            model.decoder().moeBlocks().forEach(l -> assertNull(l.router().selector()));
            assertThrows(
                    IllegalArgumentException.class,
                    () ->
                            CachePriors.attach(
                                    model, 1, List.of(1.0), 3, EvictionPolicy.Type.LRU, 1));
            model.decoder().moeBlocks().forEach(l -> assertNull(l.router().selector()));
        }
    }

    @Test
    void forward_selectorThatMayNotBe_refusedWithTheReason() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            Router router = new Router(3, 3, 2, true, 0.02);
            router.initialize(manager, DataType.FLOAT32, new Shape(-1, 3));
            NDArray x = array(manager, new double[] {1, 2, 3}, 1, 3);
            ParameterStore store = new ParameterStore(manager, false);
            router.setSelector((logits, added, chosen) -> Arrays.fill(chosen, 1));
            assertFailure("A token selector chose", router, store, x, false);
            router.setSelector((logits, added, chosen) -> Arrays.setAll(chosen, i -> i + 2));
            assertFailure("A token selector chose", router, store, x, false);
            router.setSelector((logits, added, chosen) -> Arrays.setAll(chosen, i -> i));
            assertFailure("A token selector is for evaluation", router, store, x, true);
            boolean[] kept = {false, true, true};
            router.setPrior(kept, SelectionPrior.hardMask());
            assertFailure("A token selector chose", router, store, x, false);
            router.setPrior(kept, SelectionPrior.probability(1));
            assertFailure("A token selector ranks logits", router, store, x, false);

            Router balanced = new Router(3, 3, 2, true, 0.02, 0.1);
            balanced.initialize(manager, DataType.FLOAT32, new Shape(-1, 3));
            balanced.setSelector((logits, added, chosen) -> Arrays.setAll(chosen, i -> i));
            assertEquals(2, balanced.forward(store, new NDList(x), false).size());
            balanced.addLoad(new long[] {2, 1, 0});
            balanced.updateBalanceBias();
            assertFailure(
                    "A token selector ranks logits, but the balancing", balanced, store, x, false);
        }
    }

    private static void assertFailure(
            String start, Router router, ParameterStore store, NDArray x, boolean training) {
        String message =
                assertThrows(
                                IllegalStateException.class,
                                () -> router.forward(store, new NDList(x), training))
                        .getMessage();
        assertTrue(message.startsWith(start), message);
    }
}
