package org.djlmoe.plan;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Set;
import java.util.stream.Collectors;
import org.djlmoe.dispatch.DispatchMode;
import org.djlmoe.dispatch.DispatchRoute;
import org.djlmoe.dispatch.DispatchWorkload;
import org.djlmoe.dispatch.PipelinedDispatch;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.parallel.InProcessGroup;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** What is planned for a dispatch over ranks beside what its buffers really take. */
class PlanOverRanksTest {

    private static final int HIDDEN = 32;
    private static final int INNER = 24;
    private static final int EXPERTS = 16;
    private static final int TOP_K = 4;

    private static MoeConfig config() {
        return MoeConfig.builder()
                .setVocabSize(20)
                .setHiddenSize(HIDDEN)
                .setIntermediateSize(INNER)
                .setNumLayers(2)
                .setNumHeads(2)
                .setNumExperts(EXPERTS)
                .setTopK(TOP_K)
                .build();
    }

    private static PlanSettings settings(int ranks, int tokens, int chunk) {
        return PlanSettings.builder()
                .setBatch(1)
                .setSequence(tokens)
                .optMoeChunkTokens(chunk)
                .optRanks(ranks)
                .build();
    }

    private static long planned(PlanSettings settings, boolean backward) {
        long block = ExpertScratch.blockRows(settings.chunk(), TOP_K, EXPERTS / settings.ranks());
        if (!backward) {
            block = ExpertScratch.forwardRows(settings.chunk(), block, HIDDEN, INNER, 0, false);
        }
        return KernelScratch.dispatchRows(config(), settings, backward)
                + KernelScratch.lentExperts(config(), settings, backward)
                + ExpertScratch.bytes(block, HIDDEN, INNER, 0, false, backward);
    }

    /** Of a rank: the peak of forward, and of both directions. */
    private record Peaks(long forward, long both) {}

    private static List<Peaks> counted(DispatchWorkload workload, PlanSettings settings) {
        int tokens = (int) settings.tokens();
        int ranks = settings.ranks();
        int chunks = (int) PlanSettings.ceil(tokens, settings.chunk());
        int[] routing = workload.experts(tokens, TOP_K, EXPERTS, ranks, chunks);
        return InProcessGroup.run(
                ranks,
                group -> {
                    PipelinedDispatch dispatch =
                            PipelinedDispatch.builder()
                                    .setGroup(group)
                                    .setExperts(EXPERTS)
                                    .optMode(DispatchMode.AUTOMATIC)
                                    .optChunkTokens(settings.moeChunkTokens())
                                    .optAlpha(settings.alpha())
                                    .optLambda(settings.lambda())
                                    .optMaxForeign(Math.max(1, settings.maxForeign()))
                                    .build();
                    try (NDManager manager = NDManager.newBaseManager()) {
                        List<NDArray> weights =
                                new ArrayList<>(
                                        Collections.nCopies(
                                                Weights.values().length, TorchKernels.nothing()));
                        long own = dispatch.ownExperts();
                        weights.set(
                                Weights.GATE_UP.ordinal(),
                                manager.ones(new Shape(own, 2 * INNER, HIDDEN)));
                        weights.set(
                                Weights.DOWN.ordinal(),
                                manager.ones(new Shape(own, HIDDEN, INNER)));
                        List<NDArray> gradients = new ArrayList<>();
                        for (NDArray w : weights) {
                            gradients.add(w.size() == 0 ? w : manager.zeros(w.getShape()));
                        }
                        NDArray x = manager.ones(new Shape(tokens, HIDDEN));
                        NDArray y = manager.zeros(x.getShape());
                        Shape routes = new Shape(tokens, TOP_K);
                        NDArray ids =
                                manager.create(
                                        Arrays.stream(routing).asLongStream().toArray(), routes);
                        NDArray combine = manager.ones(routes);
                        NDArray dcombine = manager.create(routes, DataType.FLOAT32);
                        DispatchRoute route = dispatch.route(ids);
                        assertEquals(chunks, route.chunks());
                        dispatch.forward(route, x, ids, combine, weights, 0, y);
                        long forward = dispatch.metrics().peakBufferBytes();
                        dispatch.backward(
                                route, x, ids, combine, weights, 0, x, gradients, y, dcombine);
                        return new Peaks(forward, dispatch.metrics().peakBufferBytes());
                    }
                });
    }

    /** Bounds that are far off would be of no use: in chunks they are near what is there. */
    @ParameterizedTest
    @CsvSource({
        "2, 640, 64, 1.5",
        "4, 640, 64, 1.3",
        "8, 320, 64, 1.3",
        "4, 60, 64, 4",
        "4, 97, 48, 1.5"
    })
    void dispatch_anyWorkload_countedBytesWithinThePlan(
            int ranks, int tokens, int chunk, double slack) {
        PlanSettings settings = settings(ranks, tokens, chunk);
        assertWithinThePlan(settings, slack);
    }

    /** Planner settings that let a rank receive more, hold more, or hold nothing foreign. */
    @ParameterizedTest
    @CsvSource({"1, 3, 1, 1.5", "2.5, 1, 1, 1.5", "1, 1.3, 12, 1.7", "1, Infinity, 1, 1.3"})
    void dispatch_anyPlannerSettings_countedBytesWithinThePlan(
            double alpha, double lambda, int maxForeign, double slack) {
        PlanSettings settings =
                settings(4, 640, 64).toBuilder()
                        .optAlpha(alpha)
                        .optLambda(lambda)
                        .optMaxForeign(maxForeign)
                        .build();
        assertWithinThePlan(settings, slack);
        String text = MemoryPlan.of(config(), settings).toString();
        assertTrue(text.contains("alpha " + alpha), text);
        assertEquals(!Double.isInfinite(lambda), text.contains("lent experts"), text);
    }

    private static void assertWithinThePlan(PlanSettings settings, double slack) {
        long most = 0;
        for (DispatchWorkload workload : DispatchWorkload.values()) {
            for (Peaks peaks : counted(workload, settings)) {
                assertTrue(
                        peaks.forward() <= planned(settings, false),
                        () -> workload + " forward: " + peaks + " " + planned(settings, false));
                assertTrue(
                        peaks.both() <= planned(settings, true),
                        () -> workload + ": " + peaks + " " + planned(settings, true));
                most = Math.max(most, peaks.both());
            }
        }
        assertTrue(planned(settings, true) <= slack * most, planned(settings, true) + " " + most);
    }

    @Test
    void of_severalRanks_hasTheLinesOfAnExchangeAndFewerExperts() {
        MemoryPlan one = MemoryPlan.of(config(), settings(1, 640, 64));
        MemoryPlan four = MemoryPlan.of(config(), settings(4, 640, 64));

        Set<String> more = names(four);
        more.removeAll(names(one));
        assertEquals(Set.of("dispatch rows", "lent experts", "normed rows"), more);
        assertEquals(
                2L * 12 * 3 * HIDDEN * INNER * 4, bytes(one, "weights") - bytes(four, "weights"));
        assertEquals(
                4L * 3 * HIDDEN * INNER * 4 + 5L * 3 * HIDDEN * INNER * 4,
                bytes(four, "lent experts"));
        assertEquals(640L * HIDDEN * 4, bytes(four, "normed rows"));
        assertTrue(four.toString().contains("dispatch rows"));
    }

    private static Set<String> names(MemoryPlan plan) {
        return plan.components().stream().map(Component::name).collect(Collectors.toSet());
    }

    private static long bytes(MemoryPlan plan, String name) {
        return plan.components().stream()
                .filter(c -> c.name().equals(name))
                .mapToLong(Component::bytes)
                .sum();
    }

    @Test
    void settings_ranksWithoutSense_areRefused() {
        assertThrows(IllegalArgumentException.class, () -> settings(0, 8, 8));
        PlanSettings.Builder some = settings(2, 8, 8).toBuilder();
        assertThrows(IllegalArgumentException.class, () -> some.optMaxForeign(0));
        assertThrows(IllegalArgumentException.class, () -> some.optMask(1).build());
        PlanSettings.Builder alpha = settings(2, 8, 8).toBuilder().optAlpha(0.5);
        assertThrows(IllegalArgumentException.class, alpha::build);
        PlanSettings.Builder lambda = settings(2, 8, 8).toBuilder().optLambda(Double.NaN);
        assertThrows(IllegalArgumentException.class, lambda::build);
        PlanSettings.Builder adapters = settings(2, 8, 8).toBuilder().optAdapters(4);
        assertThrows(IllegalArgumentException.class, adapters::build);
        assertThrows(
                IllegalArgumentException.class,
                () -> MemoryPlan.of(config(), settings(EXPERTS + 1, 8, 8)));
    }
}
