package org.djlmoe.dispatch;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.stream.IntStream;
import org.djlmoe.dispatch.DispatchedLayer.Outcome;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.parallel.InProcessGroup;
import org.djlmoe.parallel.ProcessGroupException;
import org.djlmoe.parallel.Ranks;
import org.djlmoe.parallel.SoloGroup;
import org.djlmoe.reference.NaiveExperts;
import org.djlmoe.reference.Numbers;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

/** A hang is a failure: every test has a limit far above what it needs. */
@Timeout(120)
class PipelinedDispatchTest {

    private static final double[] ALPHAS = {1.0, 1.1};
    private static final long[] PIECES = {1, 64, 1024};

    /** Every workload, P and k; alpha, m, mode and overlap take turns. */
    @ParameterizedTest
    @EnumSource(DispatchWorkload.class)
    void forwardAndBackward_everyWorkload_equalTheReference(DispatchWorkload workload) {
        int turn = workload.ordinal();
        for (int ranks : new int[] {1, 2, 4, 8}) {
            for (int topK : new int[] {1, 2, 4, 8}) {
                int[] tokens = new int[ranks];
                Arrays.fill(tokens, 16 / ranks + 6);
                DispatchedLayer layer = DispatchedLayer.of(workload, topK, 16, 4, tokens);
                double alpha = ALPHAS[turn % 2];
                long piece = PIECES[turn % 3];
                DispatchMode mode = DispatchMode.values()[turn % 5];
                boolean overlap = turn % 4 != 0;
                turn++;
                List<Outcome> got =
                        layer.run(
                                b ->
                                        b.optAlpha(alpha)
                                                .optMinPiece(piece)
                                                .optMode(mode)
                                                .optOverlap(overlap)
                                                .optChunkTokens(3)
                                                .optMaxChunks(4));
                layer.assertEqual(
                        layer.reference(), got, 1, workload + " P" + ranks + " k" + topK + mode);
                for (Outcome outcome : got) {
                    assertTrue(ChunkSchedule.withinBound(outcome.route().received()));
                    assertEquals(mode.isChunked() ? 1 : 0, outcome.route().chunks() > 1 ? 1 : 0);
                }
            }
        }
    }

    @ParameterizedTest
    @EnumSource(DispatchMode.class)
    void forwardAndBackward_raggedRanksAndOneEmpty_equalTheReference(DispatchMode mode) {
        for (int[] tokens : new int[][] {{0, 13}, {7, 0, 1, 22}, {0, 0, 5}, {1, 0}, {0, 0}}) {
            DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_80_16, 3, 9, 3, tokens);
            layer.assertEqual(
                    layer.reference(),
                    layer.run(b -> b.optMode(mode).optChunkTokens(5).optLambda(1)),
                    1,
                    Arrays.toString(tokens));
        }
    }

    /** The second step finds NaN in the memory that the first one left. */
    @ParameterizedTest
    @EnumSource(DispatchMode.class)
    void forwardAndBackward_secondStepInDirtyMemory_gradientsAddUp(DispatchMode mode) {
        DispatchedLayer layer =
                DispatchedLayer.of(DispatchWorkload.HOT_95_16, 2, 8, 3, 11, 9, 0, 14);
        layer.assertEqual(
                layer.reference(), layer.run(2, b -> b.optMode(mode).optChunkTokens(4)), 2, "");
    }

    @ParameterizedTest
    @ValueSource(ints = {1, 2})
    void forwardAndBackward_allTokensToOneExpert_sharedByAllRanks(int topK) {
        int[][] ids = new int[4][12 * topK];
        for (int[] row : ids) {
            Arrays.fill(row, 5);
        }
        DispatchedLayer layer = new DispatchedLayer(ids, topK, 8, 6, 5, 3);
        List<Outcome> got = layer.run(b -> b.optChunkTokens(5));
        layer.assertEqual(layer.reference(), got, 1, "one expert");
        DispatchPlan plan = got.get(0).route().plan();
        for (int r = 0; r < 4; r++) {
            assertEquals(12L * topK, plan.received(r));
        }
    }

    @Test
    void backward_sameDataOnOneAndManyRanks_gradientsNotMultiplied() {
        Random random = new Random(4);
        int[] all = IntStream.range(0, 48).map(i -> random.nextInt(8)).toArray();
        DispatchedLayer one = new DispatchedLayer(new int[][] {all}, 2, 8, 6, 5, 8);
        int[][] parts = new int[4][];
        Arrays.setAll(parts, r -> Arrays.copyOfRange(all, r * 12, (r + 1) * 12));
        DispatchedLayer four = new DispatchedLayer(parts, 2, 8, 6, 5, 8);
        four.gateUp = one.gateUp;
        four.down = one.down;
        for (int r = 0; r < 4; r++) {
            four.x[r] = Arrays.copyOfRange(one.x[0], r * 36, (r + 1) * 36);
            four.dy[r] = Arrays.copyOfRange(one.dy[0], r * 36, (r + 1) * 36);
            four.combine[r] = Arrays.copyOfRange(one.combine[0], r * 12, (r + 1) * 12);
        }
        NaiveExperts.Result expected = one.reference();
        one.assertEqual(expected, one.run(b -> b), 1, "one rank");
        four.assertEqual(expected, four.run(b -> b.optLambda(1)), 1, "four ranks");
    }

    /** On whole numbers F32 is exact, so any lost, doubled or exchanged row would show. */
    @ParameterizedTest
    @EnumSource(DispatchMode.class)
    void forward_wholeNumbers_exact(DispatchMode mode) {
        DispatchedLayer layer =
                DispatchedLayer.of(DispatchWorkload.ROTATING, 4, 16, 4, 40, 33, 17, 40);
        Random random = new Random(5);
        for (int r = 0; r < layer.ranks; r++) {
            Arrays.setAll(layer.combine[r], i -> 0.25);
            for (int i = 0; i < layer.x[r].length; i++) {
                // silu(64) is 64 in F32, so the gate is exact too.
                layer.x[r][i] = i % layer.hidden == 0 ? 64 : random.nextInt(7) - 3;
            }
        }
        for (int i = 0; i < layer.gateUp.length; i++) {
            boolean gate = i / layer.hidden % (2 * layer.inner) < layer.inner;
            layer.gateUp[i] = gate ? (i % layer.hidden == 0 ? 1 : 0) : random.nextInt(5) - 2;
        }
        Arrays.setAll(layer.down, i -> random.nextInt(5) - 2);
        float[] got =
                DispatchedLayer.joined(
                        layer.run(b -> b.optMode(mode).optChunkTokens(8)), Outcome::y);
        assertArrayEquals(Numbers.floats(layer.reference().y()), got);
    }

    @Test
    void route_oneRowATokenAndRank_allTokensArrive() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_30_4, 8, 16, 4, 30, 21);
        List<DispatchRoute> routes =
                layer.run(b -> b.optChunkTokens(8)).stream().map(Outcome::route).toList();
        for (int to = 0; to < 2; to++) {
            long received = 0;
            long sent = 0;
            for (int i = 0; i < routes.get(0).chunks(); i++) {
                received += Arrays.stream(routes.get(to).rowsReceived(i)).sum();
                for (DispatchRoute route : routes) {
                    long[] tokens = route.tokens(i, to);
                    assertEquals(tokens.length, Arrays.stream(tokens).distinct().count());
                    sent += tokens.length;
                }
            }
            assertEquals(sent, received);
            assertTrue(received <= 51);
        }
        // Nothing is dropped: the routes computed are all tokens * k.
        DispatchPlan plan = routes.get(0).plan();
        assertEquals(51 * 8, plan.received(0) + plan.received(1));
    }

    @Test
    void backward_frozenWeights_othersUnchanged() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_80_16, 2, 8, 3, 12, 9);
        NaiveExperts.Result expected = layer.reference();
        for (Weights frozen : LentExperts.MOVED) {
            List<Outcome> got = runFrozen(layer, r -> List.of(frozen));
            Numbers.assertClose(
                    expected.dx(), DispatchedLayer.joined(got, Outcome::dx), 1e-5, "dx");
            boolean down = frozen == Weights.GATE_UP;
            Numbers.assertClose(
                    down ? expected.ddown() : expected.dgateUp(),
                    DispatchedLayer.joined(got, down ? Outcome::ddown : Outcome::dgateUp),
                    1e-5,
                    "trained");
        }
        List<Outcome> got = runFrozen(layer, r -> LentExperts.MOVED);
        Numbers.assertClose(
                expected.dcombine(), DispatchedLayer.joined(got, Outcome::dcombine), 1e-5, "dc");
    }

    @Test
    void forwardAndBackward_bf16Experts_withinTheirPrecision() {
        TorchKernels half =
                TorchKernels.compile(
                        "half", "def half(self, x: Tensor) -> Tensor:\n  return x.to(dtype=15)\n");
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_80_16, 2, 8, 3, 12, 9);
        NaiveExperts.Result expected = layer.reference();
        List<Outcome> got =
                InProcessGroup.run(
                        2,
                        group ->
                                layer.onRank(
                                        group,
                                        PipelinedDispatch.builder()
                                                .setGroup(group)
                                                .setExperts(8)
                                                .optChunkTokens(5)
                                                .build(),
                                        1,
                                        (manager, w) -> half.call(manager, "half", w).head()));
        assertTrue(got.get(0).route().plan().maxForeign() > 0);
        Numbers.assertClose(expected.y(), DispatchedLayer.joined(got, Outcome::y), 1e-2, "y");
        Numbers.assertClose(expected.dx(), DispatchedLayer.joined(got, Outcome::dx), 1e-2, "dx");
        Numbers.assertClose(
                expected.ddown(), DispatchedLayer.joined(got, Outcome::ddown), 1e-2, "down");
    }

    @Test
    void backward_ranksTrainDifferentWeights_refusedOnAll() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_80_16, 2, 8, 3, 12, 9);
        ProcessGroupException e =
                assertThrows(
                        ProcessGroupException.class,
                        () -> runFrozen(layer, r -> r == 0 ? List.of() : List.of(Weights.DOWN)));
        assertTrue(e.getMessage().contains("freeze an expert weight on all ranks"), e.getMessage());
    }

    private interface Frozen {
        List<Weights> on(int rank);
    }

    private static List<Outcome> runFrozen(DispatchedLayer layer, Frozen frozen) {
        return InProcessGroup.run(
                layer.ranks,
                group -> {
                    int r = group.rank();
                    try (NDManager manager = NDManager.newBaseManager()) {
                        PipelinedDispatch dispatch =
                                PipelinedDispatch.builder()
                                        .setGroup(group)
                                        .setExperts(layer.experts)
                                        .optChunkTokens(5)
                                        .build();
                        List<NDArray> weights = layer.weights(manager, r);
                        List<NDArray> gradients = layer.zeros(manager, weights);
                        for (Weights w : frozen.on(r)) {
                            gradients.set(w.ordinal(), TorchKernels.nothing());
                        }
                        NDArray x =
                                Numbers.array(manager, layer.x[r], layer.tokens[r], layer.hidden);
                        NDArray ids = layer.idArray(manager, r);
                        NDArray c =
                                Numbers.array(
                                        manager, layer.combine[r], layer.tokens[r], layer.topK);
                        NDArray g =
                                Numbers.array(manager, layer.dy[r], layer.tokens[r], layer.hidden);
                        NDArray dx = manager.zeros(x.getShape());
                        NDArray dc = manager.zeros(c.getShape());
                        DispatchRoute route = dispatch.route(ids);
                        dispatch.backward(route, x, ids, c, weights, 0, g, gradients, dx, dc);
                        return new Outcome(
                                new float[0],
                                dx.toFloatArray(),
                                dc.toFloatArray(),
                                gradients.get(Weights.GATE_UP.ordinal()).toFloatArray(),
                                gradients.get(Weights.DOWN.ordinal()).toFloatArray(),
                                route,
                                dispatch.metrics());
                    }
                });
    }

    /**
     * The experts of chunk i begin, and do not go on before the exchange of chunk i + 1 has begun;
     * that begins, and does not go on before the experts of chunk i have begun. Were one of the two
     * over before the other starts, this would never end.
     */
    @Test
    void forward_overlap_nextChunkTravelsWhileThisOneComputes() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.BALANCED, 2, 8, 4, 16, 16);
        int chunks = 4;
        // Per rank: how many exchanges the transport has begun. Of forward, two a chunk:
        // D0 D1 R0 D2 R1 D3 R2 R3.
        CountDownLatch[][] begun = new CountDownLatch[2][2 * chunks];
        for (CountDownLatch[] row : begun) {
            Arrays.setAll(row, i -> new CountDownLatch(1));
        }
        CountDownLatch[][] computing = new CountDownLatch[2][chunks];
        for (CountDownLatch[] row : computing) {
            Arrays.setAll(row, i -> new CountDownLatch(1));
        }
        ThreadLocal<AtomicInteger> count = ThreadLocal.withInitial(AtomicInteger::new);
        AtomicInteger seen = new AtomicInteger();
        InProcessGroup.run(
                2,
                bytes -> {
                    int rank = Thread.currentThread().getName().endsWith("0") ? 0 : 1;
                    int n = count.get().getAndIncrement();
                    begun[rank][n].countDown();
                    if (n % 2 == 1 && n < 2 * chunks - 1) {
                        await(computing[rank][(n - 1) / 2]);
                    }
                    return 0;
                },
                group -> {
                    PipelinedDispatch dispatch =
                            PipelinedDispatch.builder()
                                    .setGroup(group)
                                    .setExperts(8)
                                    .optChunkTokens(4)
                                    .optObserver(
                                            i -> {
                                                computing[group.rank()][i].countDown();
                                                int next = 2 * i + 1;
                                                if (i + 1 < chunks) {
                                                    await(begun[group.rank()][next]);
                                                    seen.incrementAndGet();
                                                }
                                            })
                                    .build();
                    try (NDManager manager = NDManager.newBaseManager()) {
                        int r = group.rank();
                        NDArray x = Numbers.array(manager, layer.x[r], 16, layer.hidden);
                        NDArray ids = layer.idArray(manager, r);
                        NDArray c = Numbers.array(manager, layer.combine[r], 16, 2);
                        NDArray y = manager.zeros(x.getShape());
                        dispatch.forward(
                                dispatch.route(ids), x, ids, c, layer.weights(manager, r), 0, y);
                    }
                    return null;
                });
        assertEquals(2 * (chunks - 1), seen.get());
    }

    private static void await(CountDownLatch latch) {
        try {
            assertTrue(latch.await(30, TimeUnit.SECONDS), "experts and exchange take turns");
        } catch (InterruptedException e) {
            throw new IllegalStateException(e);
        }
    }

    /** In every chunk, forward and backward: all ranks are released and learn why. */
    @Test
    void pass_aRankFailsInAnyChunk_reachesAllAndReleasesEverything() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_50_16, 2, 8, 3, 12, 12, 12);
        for (int at = 0; at < 6; at++) {
            int fails = at;
            RuntimeException cause = new ArithmeticException("chunk " + at);
            AtomicInteger learned = new AtomicInteger();
            ProcessGroupException e =
                    Ranks.failure(
                            3,
                            group -> {
                                AtomicInteger n = new AtomicInteger();
                                PipelinedDispatch dispatch =
                                        PipelinedDispatch.builder()
                                                .setGroup(group)
                                                .setExperts(8)
                                                .optChunkTokens(4)
                                                .optObserver(
                                                        i -> {
                                                            if (group.rank() == 1
                                                                    && n.getAndIncrement()
                                                                            == fails) {
                                                                throw cause;
                                                            }
                                                        })
                                                .build();
                                try {
                                    return layer.onRank(group, dispatch, 1);
                                } catch (ProcessGroupException other) {
                                    assertSame(cause, other.getCause());
                                    learned.incrementAndGet();
                                    throw other;
                                }
                            });
            assertSame(cause, e.getCause());
            assertEquals(2, learned.get());
        }
    }

    @Test
    void pass_afterAnException_noMemoryStays() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_50_16, 2, 8, 3, 12, 12);
        List<Integer> left = new ArrayList<>();
        Ranks.failure(
                2,
                group -> {
                    int r = group.rank();
                    PipelinedDispatch dispatch =
                            PipelinedDispatch.builder()
                                    .setGroup(group)
                                    .setExperts(8)
                                    .optChunkTokens(4)
                                    .optObserver(
                                            i -> {
                                                throw new ArithmeticException();
                                            })
                                    .build();
                    try (NDManager manager = NDManager.newBaseManager()) {
                        List<NDArray> weights = layer.weights(manager, r);
                        NDArray x = Numbers.array(manager, layer.x[r], 12, layer.hidden);
                        NDArray ids = layer.idArray(manager, r);
                        NDArray c = Numbers.array(manager, layer.combine[r], 12, 2);
                        NDArray y = manager.zeros(x.getShape());
                        DispatchRoute route = dispatch.route(ids);
                        int before = manager.getManagedArrays().size();
                        try {
                            dispatch.forward(route, x, ids, c, weights, 0, y);
                        } finally {
                            synchronized (left) {
                                left.add(manager.getManagedArrays().size() - before);
                            }
                        }
                    }
                    return null;
                });
        assertEquals(List.of(0, 0), left);
    }

    @Test
    void dispatch_wrongInput_saysWhatAndHow() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.BALANCED, 2, 8, 3, 5);
        try (NDManager manager = NDManager.newBaseManager();
                SoloGroup solo = new SoloGroup()) {
            PipelinedDispatch.Builder builder = PipelinedDispatch.builder();
            assertThrows(IllegalArgumentException.class, builder::build);
            builder.setGroup(solo);
            assertThrows(IllegalArgumentException.class, builder::build);
            // Zero is a number, not the absence of one.
            assertThrows(IllegalArgumentException.class, () -> builder.optMaxForeign(0));
            PipelinedDispatch dispatch = builder.setExperts(8).build();
            assertMessage(
                    "expert 8",
                    () -> dispatch.route(manager.create(new long[] {8}, new Shape(1, 1))));
            assertMessage("INT64", () -> dispatch.route(manager.zeros(new Shape(1, 1))));
            NDArray ids = layer.idArray(manager, 0);
            DispatchRoute route = dispatch.route(ids);
            NDArray x = manager.zeros(new Shape(4, 6));
            List<NDArray> weights = layer.weights(manager, 0);
            assertMessage("4 rows", () -> dispatch.forward(route, x, ids, x, weights, 0, x));
            List<NDArray> few = new ArrayList<>(weights);
            few.set(Weights.DOWN.ordinal(), manager.zeros(new Shape(3, 6, 5)));
            assertMessage("those of 3", () -> dispatch.forward(route, x, ids, x, few, 0, x));
        }
    }

    @Test
    void route_settingsDiffer_refusedOnAllRanks() {
        ProcessGroupException e =
                Ranks.failure(
                        2,
                        group -> {
                            try (NDManager manager = NDManager.newBaseManager()) {
                                return PipelinedDispatch.builder()
                                        .setGroup(group)
                                        .setExperts(8)
                                        .optChunkTokens(4 + group.rank())
                                        .build()
                                        .route(manager.create(new long[2], new Shape(1, 2)));
                            }
                        });
        assertTrue(e.getMessage().contains("chunk tokens"), e.getMessage());
    }

    @Test
    void forward_adaptersAcrossRanks_refused() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.BALANCED, 2, 8, 3, 5, 5);
        ProcessGroupException e =
                Ranks.failure(
                        2,
                        group -> {
                            try (NDManager manager = NDManager.newBaseManager()) {
                                PipelinedDispatch dispatch =
                                        PipelinedDispatch.builder()
                                                .setGroup(group)
                                                .setExperts(8)
                                                .build();
                                NDArray ids = layer.idArray(manager, group.rank());
                                List<NDArray> weights = layer.weights(manager, group.rank());
                                weights.set(
                                        Weights.GATE_UP_A.ordinal(),
                                        manager.zeros(new Shape(4, 2, 6)));
                                NDArray x = manager.zeros(new Shape(5, 6));
                                dispatch.forward(
                                        dispatch.route(ids),
                                        x,
                                        ids,
                                        manager.zeros(new Shape(5, 2)),
                                        weights,
                                        1,
                                        x);
                            }
                            return null;
                        });
        assertTrue(e.getMessage().contains("LoRA"), e.getMessage());
    }

    private static void assertMessage(String part, Runnable call) {
        IllegalArgumentException e = assertThrows(IllegalArgumentException.class, call::run);
        assertTrue(e.getMessage().contains(part), e.getMessage());
    }

    /** The routing does not decide the memory; that of the usual way is decided by it. */
    @Test
    void peakBuffers_anyWorkload_thatOfBalanced() {
        long balanced = peak(DispatchWorkload.BALANCED, DispatchMode.AUTOMATIC);
        for (DispatchWorkload workload : DispatchWorkload.values()) {
            long peak = peak(workload, DispatchMode.AUTOMATIC);
            assertTrue(peak <= 1.1 * balanced, workload + " " + peak + " / " + balanced);
        }
        long dealt = peak(DispatchWorkload.HOT_50_16, DispatchMode.PIPELINED_DEALT);
        assertTrue(dealt <= 1.1 * balanced, dealt + " / " + balanced);
        long standard = peak(DispatchWorkload.BALANCED, DispatchMode.STANDARD);
        assertTrue(balanced < standard, balanced + " is not below " + standard);
        long hot = peak(DispatchWorkload.HOT_80_16, DispatchMode.STANDARD);
        assertTrue(hot >= 3 * balanced, hot + " / " + balanced);
        assertTrue(hot >= 2 * standard, hot + " / " + standard);
    }

    /** The worst rank's peak, forward and backward. */
    private static long peak(DispatchWorkload workload, DispatchMode mode) {
        int ranks = 8;
        int[][] ids = new int[ranks][];
        Arrays.fill(ids, workload.experts(1280, 8, 128, ranks, 10));
        DispatchedLayer layer = new DispatchedLayer(ids, 8, 128, 32, 20, 1);
        return layer.run(b -> b.optMode(mode).optChunkTokens(128)).stream()
                .mapToLong(
                        o -> {
                            assertTrue(
                                    mode == DispatchMode.STANDARD
                                            || ChunkSchedule.withinBound(o.route().received()));
                            return o.metrics().peakBufferBytes();
                        })
                .max()
                .orElseThrow();
    }

    @Test
    void forwardAndBackward_again_sameBits() {
        DispatchedLayer layer =
                DispatchedLayer.of(DispatchWorkload.HOT_95_16, 4, 16, 4, 21, 18, 20, 7);
        List<Outcome> first = layer.run(b -> b.optChunkTokens(6));
        for (int i = 0; i < 3; i++) {
            List<Outcome> again = layer.run(b -> b.optChunkTokens(6));
            for (int r = 0; r < layer.ranks; r++) {
                assertArrayEquals(first.get(r).y(), again.get(r).y());
                assertArrayEquals(first.get(r).dx(), again.get(r).dx());
                assertArrayEquals(first.get(r).dcombine(), again.get(r).dcombine());
                assertArrayEquals(first.get(r).dgateUp(), again.get(r).dgateUp());
                assertArrayEquals(first.get(r).ddown(), again.get(r).ddown());
            }
        }
    }

    /** The layer's own kernel is checked against the reference elsewhere. */
    @Test
    void soloGroup_adapters_asTheLayerItself() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_50_16, 2, 8, 4, 23);
        try (NDManager manager = NDManager.newBaseManager();
                SoloGroup solo = new SoloGroup()) {
            List<NDArray> weights = layer.weights(manager, 0);
            Random random = new Random(2);
            long[][] adapters = {{8, 3, 6}, {8, 10, 3}, {8, 3, 5}, {8, 6, 3}};
            for (int i = 0; i < 4; i++) {
                int size = (int) (adapters[i][0] * adapters[i][1] * adapters[i][2]);
                weights.set(
                        Weights.GATE_UP_A.ordinal() + i,
                        Numbers.array(manager, Numbers.random(random, size, 0.5), adapters[i]));
            }
            weights.set(Weights.ROUTER.ordinal(), manager.zeros(new Shape(8, 6)));
            List<NDArray> expected = layer.zeros(manager, weights);
            List<NDArray> got = layer.zeros(manager, weights);
            NDArray x = Numbers.array(manager, layer.x[0], 23, 6);
            NDArray g = Numbers.array(manager, layer.dy[0], 23, 6);
            NDArray c = Numbers.array(manager, layer.combine[0], 23, 2);
            NDArray ids = layer.idArray(manager, 0);
            NDArray y = manager.zeros(x.getShape());
            NDArray plain = manager.zeros(x.getShape());
            NDArray dx = manager.zeros(x.getShape());
            NDArray dc = manager.zeros(c.getShape());
            ExpertKernels.Settings settings = new ExpertKernels.Settings(2, 0, 1.5, false, false);
            try (ExpertScratch scratch = ExpertScratch.backward(manager, 23, 2, weights)) {
                ExpertKernels.forward(x, 0, 1, weights, settings, ids, c, scratch, plain);
                ExpertKernels.backward(
                        x,
                        0,
                        1,
                        g,
                        weights,
                        expected,
                        settings,
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        ids,
                        c,
                        scratch,
                        manager.zeros(x.getShape()),
                        TorchKernels.nothing());
            }
            PipelinedDispatch dispatch =
                    PipelinedDispatch.builder()
                            .setGroup(solo)
                            .setExperts(8)
                            .optChunkTokens(6)
                            .build();
            DispatchRoute route = dispatch.route(ids);
            dispatch.forward(route, x, ids, c, weights, 1.5, y);
            dispatch.backward(route, x, ids, c, weights, 1.5, g, got, dx, dc);
            Numbers.assertClose(plain.toFloatArray(), y.toFloatArray(), 1e-5, "y");
            for (int w = Weights.GATE_UP.ordinal(); w < weights.size(); w++) {
                Numbers.assertClose(
                        expected.get(w).toFloatArray(),
                        got.get(w).toFloatArray(),
                        1e-5,
                        Weights.values()[w].toString());
            }
        }
    }

    @Test
    void soloGroup_chunks_nothingIsSent() {
        DispatchedLayer layer = DispatchedLayer.of(DispatchWorkload.HOT_80_16, 4, 16, 4, 50);
        try (SoloGroup solo = new SoloGroup()) {
            PipelinedDispatch dispatch =
                    PipelinedDispatch.builder()
                            .setGroup(solo)
                            .setExperts(16)
                            .optChunkTokens(13)
                            .build();
            Outcome got = layer.onRank(solo, dispatch, 1);
            layer.assertEqual(layer.reference(), List.of(got), 1, "solo");
            assertEquals(4, got.route().chunks());
            assertEquals(0, got.metrics().rowBytesSent() + got.metrics().weightBytesSent());
            assertFalse(got.metrics().peakBufferBytes() == 0);
        }
    }
}
