package org.djlmoe.examples.bench;

import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.index.NDIndex;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.GradientCollector;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.Function;
import java.util.stream.Collectors;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.dispatch.ChunkSchedule;
import org.djlmoe.dispatch.DispatchMetrics;
import org.djlmoe.dispatch.DispatchMode;
import org.djlmoe.dispatch.DispatchRoute;
import org.djlmoe.dispatch.DispatchWorkload;
import org.djlmoe.dispatch.PipelinedDispatch;
import org.djlmoe.examples.bench.Benchmark.Progress;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.parallel.InProcessGroup;
import org.djlmoe.parallel.ProcessGroup;

/**
 * Forward and backward of the experts of a layer over ranks, for routings even and skewed, in every
 * mode of dispatch.
 *
 * <p>The ranks are threads of this process. Peaks are the bytes of the buffers, counted, on the
 * rank that has most. Times are of all ranks sharing this computer's cores, so only their ratios
 * mean something. Loss and gradients are compared with DJL's automatic differentiation of the layer
 * in one piece.
 */
public final class RankBenchmark {

    private final Map<String, Object> settings;
    private final int ranks;
    private final int tokens;
    private final int topK;
    private final int experts;
    private final int chunks;
    private final List<DispatchWorkload> workloads;
    private final List<DispatchMode> modes;
    private final int runs;

    /**
     * Creates the benchmark.
     *
     * @param settings ranks, tokens (of a rank), hidden, inner, experts, top-k, chunks, seed
     * @param workloads the routings
     * @param modes the modes
     * @param runs timed runs of each
     */
    public RankBenchmark(
            Map<String, Object> settings,
            List<DispatchWorkload> workloads,
            List<DispatchMode> modes,
            int runs) {
        this.settings = new LinkedHashMap<>(settings);
        this.settings.put("runs", runs);
        this.ranks = number("ranks");
        this.tokens = number("tokens");
        this.topK = number("top-k");
        this.experts = number("experts");
        this.chunks = number("chunks");
        this.workloads = List.copyOf(workloads);
        this.modes = List.copyOf(modes);
        this.runs = runs;
    }

    private int number(String setting) {
        return (Integer) settings.get(setting);
    }

    /**
     * Returns the number of steps that {@link #run} reports.
     *
     * @return their number
     */
    public int steps() {
        return workloads.size() * (1 + modes.size() * (1 + runs));
    }

    /**
     * Returns the name of a case.
     *
     * @param workload the routing
     * @param mode the mode
     * @return such as {@code 80/16 automatic}
     */
    public static String nameOf(DispatchWorkload workload, DispatchMode mode) {
        return workload + " " + nameOf(mode);
    }

    /**
     * Returns the name of a mode.
     *
     * @param mode the mode
     * @return such as {@code least-loaded}
     */
    public static String nameOf(DispatchMode mode) {
        return mode.name().toLowerCase(Locale.ROOT).replace('_', '-');
    }

    /** What a layer gives: its loss, and its gradients over all ranks. */
    private record Outcome(
            double loss, float[] dx, float[] dcombine, float[] dgateUp, float[] ddown) {

        double error(Outcome reference) {
            double worst = 0;
            for (Function<Outcome, float[]> part :
                    List.<Function<Outcome, float[]>>of(
                            Outcome::dx, Outcome::dcombine, Outcome::dgateUp, Outcome::ddown)) {
                worst = Math.max(worst, relative(part.apply(this), part.apply(reference)));
            }
            return worst;
        }

        private static double relative(float[] got, float[] expected) {
            double difference = 0;
            double norm = 0;
            for (int i = 0; i < expected.length; i++) {
                double d = (double) got[i] - expected[i];
                difference += d * d;
                norm += (double) expected[i] * expected[i];
            }
            return Math.sqrt(difference / norm);
        }

        static Outcome joined(List<Outcome> parts) {
            return new Outcome(
                    parts.stream().mapToDouble(Outcome::loss).sum(),
                    joined(parts, Outcome::dx),
                    joined(parts, Outcome::dcombine),
                    joined(parts, Outcome::dgateUp),
                    joined(parts, Outcome::ddown));
        }

        private static float[] joined(List<Outcome> parts, Function<Outcome, float[]> part) {
            float[] all = new float[parts.stream().mapToInt(p -> part.apply(p).length).sum()];
            int at = 0;
            for (Outcome each : parts) {
                float[] values = part.apply(each);
                System.arraycopy(values, 0, all, at, values.length);
                at += values.length;
            }
            return all;
        }
    }

    /** What a rank saw of one mode. */
    private static final class Measured {
        Outcome outcome;
        DispatchRoute route;
        DispatchMetrics metrics;
        final List<Double> seconds = new ArrayList<>();
    }

    /**
     * Measures.
     *
     * @param progress told about every step
     * @return the figures
     */
    public RankReport run(Progress progress) {
        Map<String, String> options =
                settings.entrySet().stream()
                        .collect(Collectors.toMap(Map.Entry::getKey, e -> "" + e.getValue()));
        options.put("tokens", String.valueOf(Math.multiplyExact(ranks, tokens)));
        List<RankReport.Row> rows = new ArrayList<>();
        try (DispatchProblem problem = new DispatchProblem(new CaseSettings("ranks", options))) {
            List<NDArray> parts = problem.expertWeights();
            List<NDArray> stacks =
                    new ArrayList<>(
                            Collections.nCopies(Weights.values().length, TorchKernels.nothing()));
            problem.stack(parts, stacks);
            problem.x.setRequiresGradient(true);
            parts.forEach(part -> part.setRequiresGradient(true));
            for (DispatchWorkload workload : workloads) {
                int[] routing = workload.experts(tokens, topK, experts, ranks, chunks);
                Outcome reference = reference(problem, parts, routing);
                progress.step(workload + ": reference");
                List<List<Measured>> byRank =
                        InProcessGroup.run(
                                ranks,
                                group ->
                                        new Rank(group, problem, stacks, routing)
                                                .measure(
                                                        group.rank() == 0
                                                                ? mode ->
                                                                        progress.step(
                                                                                nameOf(
                                                                                        workload,
                                                                                        mode))
                                                                : mode -> {}));
                for (int i = 0; i < modes.size(); i++) {
                    int index = i;
                    List<Measured> measured = byRank.stream().map(r -> r.get(index)).toList();
                    rows.add(row(workload, modes.get(i), measured, reference));
                }
            }
        }
        return new RankReport(settings, rows);
    }

    private Outcome reference(DispatchProblem problem, List<NDArray> parts, int[] routing) {
        long[] all = new long[ranks * routing.length];
        Arrays.setAll(all, i -> routing[i % routing.length]);
        Gradients.zero(problem.x);
        parts.forEach(Gradients::zero);
        try (NDManager batch = problem.manager.newSubManager();
                GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            NDArray ids = batch.create(all).duplicate();
            NDArray combine = batch.full(new Shape(all.length), 1f / topK);
            combine.setRequiresGradient(true);
            // What is computed belongs to the manager of what it is computed from.
            NDArray x = ArrayKernels.alias(batch, problem.x);
            NDArray loss = StockExperts.apply(x, ids, combine, parts).square().mean();
            collector.backward(loss);
            List<float[]> gateUp = new ArrayList<>();
            List<float[]> down = new ArrayList<>();
            for (int i = 0; i < parts.size(); i++) {
                (i % 3 == 2 ? down : gateUp).add(values(parts.get(i)));
            }
            return new Outcome(
                    loss.getFloat(),
                    values(problem.x),
                    values(combine),
                    joined(gateUp),
                    joined(down));
        }
    }

    private static float[] values(NDArray weight) {
        try (NDArray gradient = Gradients.of(weight)) {
            return gradient.toFloatArray();
        }
    }

    private static float[] joined(List<float[]> parts) {
        float[] all = new float[parts.stream().mapToInt(p -> p.length).sum()];
        int at = 0;
        for (float[] part : parts) {
            System.arraycopy(part, 0, all, at, part.length);
            at += part.length;
        }
        return all;
    }

    private static RankReport.Row row(
            DispatchWorkload workload,
            DispatchMode mode,
            List<Measured> byRank,
            Outcome reference) {
        Outcome outcome = Outcome.joined(byRank.stream().map(m -> m.outcome).toList());
        DispatchRoute route = byRank.get(0).route;
        long[][] received = route.received();
        double ofBound = 0;
        for (int d = 0; d < received[0].length; d++) {
            double bound = ChunkSchedule.bound(route.plan().received(d), received.length);
            for (long[] chunk : received) {
                ofBound = Math.max(ofBound, chunk[d] / bound);
            }
        }
        return new RankReport.Row(
                workload,
                mode,
                BenchReport.median(byRank.get(0).seconds),
                byRank.stream().mapToLong(m -> m.metrics.peakBufferBytes()).max().orElseThrow(),
                Math.abs(outcome.loss() - reference.loss()) / reference.loss(),
                outcome.error(reference),
                byRank.stream().mapToDouble(m -> m.route.sendRatio()).max().orElseThrow(),
                route.receiveRatio(),
                ofBound,
                ChunkSchedule.withinBound(received),
                byRank.stream().mapToLong(m -> m.metrics.rowBytesSent()).sum(),
                byRank.stream().mapToLong(m -> m.metrics.weightBytesSent()).sum());
    }

    private interface Told {
        void of(DispatchMode mode);
    }

    /** One rank: its tokens, its experts, and room for its results. */
    private final class Rank {

        private final ProcessGroup group;
        private final DispatchProblem problem;
        private final List<NDArray> stacks;
        private final int[] routing;
        private NDArray x;
        private NDArray ids;
        private NDArray combine;
        private NDArray y;
        private NDArray g;
        private NDArray dx;
        private NDArray dcombine;
        private final List<NDArray> weights = new ArrayList<>();
        private final List<NDArray> gradients = new ArrayList<>();

        Rank(ProcessGroup group, DispatchProblem problem, List<NDArray> stacks, int[] routing) {
            this.group = group;
            this.problem = problem;
            this.stacks = stacks;
            this.routing = routing;
        }

        /** All modes once for their figures, then in turn for their times. */
        List<Measured> measure(Told progress) {
            try (NDManager manager = NDManager.newBaseManager()) {
                List<PipelinedDispatch> dispatches =
                        modes.stream().map(mode -> dispatch(mode)).toList();
                prepare(manager, dispatches.get(0));
                List<Measured> measured = new ArrayList<>();
                for (int i = 0; i < modes.size(); i++) {
                    measured.add(first(dispatches.get(i)));
                    progress.of(modes.get(i));
                }
                for (int run = 0; run < runs; run++) {
                    for (int i = 0; i < modes.size(); i++) {
                        group.barrier();
                        long start = System.nanoTime();
                        pass(dispatches.get(i));
                        group.barrier();
                        measured.get(i).seconds.add((System.nanoTime() - start) / 1e9);
                        progress.of(modes.get(i));
                    }
                }
                return measured;
            }
        }

        private PipelinedDispatch dispatch(DispatchMode mode) {
            return PipelinedDispatch.builder()
                    .setGroup(group)
                    .setExperts(experts)
                    .optMode(mode)
                    .optChunkTokens((tokens + chunks - 1) / chunks)
                    .optMaxChunks(chunks)
                    .build();
        }

        private void prepare(NDManager manager, PipelinedDispatch dispatch) {
            int rank = group.rank();
            int from = dispatch.firstExpert();
            int to = from + dispatch.ownExperts();
            // Copies: the originals ask for gradients, and belong to another thread.
            x =
                    problem.x
                            .get(manager, new NDIndex(rank * tokens + ":" + (rank + 1) * tokens))
                            .stopGradient()
                            .duplicate();
            long[] wide = Arrays.stream(routing).asLongStream().toArray();
            Shape routes = new Shape(tokens, topK);
            ids = manager.create(wide, routes).duplicate();
            combine = manager.full(routes, 1f / topK);
            dcombine = manager.zeros(routes);
            y = manager.zeros(x.getShape());
            g = manager.zeros(x.getShape());
            dx = manager.zeros(x.getShape());
            for (NDArray stack : stacks) {
                NDArray own =
                        stack.size() == 0
                                ? stack
                                : stack.get(manager, new NDIndex(from + ":" + to)).duplicate();
                weights.add(own);
                gradients.add(own.size() == 0 ? own : manager.zeros(own.getShape()));
            }
        }

        private Measured first(PipelinedDispatch dispatch) {
            Measured measured = new Measured();
            y.muli(0);
            dx.muli(0);
            gradients.stream().filter(d -> d.size() > 0).forEach(d -> d.muli(0));
            measured.route = dispatch.route(ids);
            dispatch.forward(measured.route, x, ids, combine, weights, 0, y);
            long size = (long) ranks * y.size();
            double loss;
            try (NDArray square = y.square();
                    NDArray sum = square.sum()) {
                loss = sum.getFloat() / (double) size;
            }
            g.muli(0).addi(y).muli(2.0 / size);
            backward(dispatch, measured.route);
            measured.metrics = dispatch.metrics();
            measured.outcome =
                    new Outcome(
                            loss,
                            dx.toFloatArray(),
                            dcombine.toFloatArray(),
                            gradients.get(Weights.GATE_UP.ordinal()).toFloatArray(),
                            gradients.get(Weights.DOWN.ordinal()).toFloatArray());
            return measured;
        }

        private void pass(PipelinedDispatch dispatch) {
            DispatchRoute route = dispatch.route(ids);
            dispatch.forward(route, x, ids, combine, weights, 0, y);
            backward(dispatch, route);
        }

        private void backward(PipelinedDispatch dispatch, DispatchRoute route) {
            dispatch.backward(route, x, ids, combine, weights, 0, g, gradients, dx, dcombine);
        }
    }
}
