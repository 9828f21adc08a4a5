package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.io.PrintWriter;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.djlmoe.dispatch.DispatchRoute;
import org.djlmoe.dispatch.DispatchWorkload;
import org.djlmoe.dispatch.PipelinedDispatch;
import org.djlmoe.examples.bench.BenchReport.Result;
import org.djlmoe.examples.bench.Benchmark.Progress;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.parallel.InProcessGroup;
import org.djlmoe.parallel.ProcessGroup;

/**
 * Whether exchanges are hidden behind the experts: the transport is delayed to 0.8 of what a chunk
 * takes to compute, and a pass with overlap is compared with one that waits for every exchange.
 *
 * <p>Two ranks of one process, each with one thread of its own to compute: on fewer than two idle
 * cores the figures mean nothing. The passes run in turn.
 */
public final class OverlapBenchmark {

    private static final int RANKS = 2;
    private static final int CHUNKS = 10;
    private static final int TOP_K = 2;
    private static final int EXPERTS = 8;
    private static final int HIDDEN = 128;
    private static final int INNER = 256;
    private static final float SPREAD = 0.05f;
    private static final double DELAY = 0.8;

    private final Map<String, Object> settings = new LinkedHashMap<>();
    private final int tokens;
    private final int seed;
    private final int runs;

    /**
     * Creates the benchmark.
     *
     * @param tokens of each rank
     * @param seed decides the numbers computed with
     * @param runs timed runs of each pass
     */
    public OverlapBenchmark(int tokens, int seed, int runs) {
        this.tokens = tokens;
        this.seed = seed;
        this.runs = runs;
        settings.put("ranks", RANKS);
        settings.put("tokens", tokens);
        settings.put("hidden", HIDDEN);
        settings.put("inner", INNER);
        settings.put("experts", EXPERTS);
        settings.put("top-k", TOP_K);
        settings.put("chunks", CHUNKS);
        settings.put("delay", DELAY);
        settings.put("seed", seed);
        settings.put("runs", runs);
    }

    /**
     * Returns the number of steps that {@link #run} reports.
     *
     * @return their number
     */
    public int steps() {
        return 2 * runs;
    }

    /**
     * The times of a direction.
     *
     * @param name forward or backward
     * @param undelayed seconds without delay
     * @param pipelined seconds with the delay, with overlap
     * @param serial seconds with the delay, every exchange waited for
     */
    public record Times(String name, double undelayed, double pipelined, double serial) {}

    /**
     * The figures.
     *
     * @param settings the shape of the problem
     * @param times of forward and of backward
     */
    public record Report(Map<String, Object> settings, List<Times> times) {

        /**
         * Returns the figures in the form of the JSON.
         *
         * @return maps and lists
         */
        public Map<String, Object> json() {
            List<Result> cases = new ArrayList<>();
            Map<String, Object> ratios = new LinkedHashMap<>();
            for (Times t : times) {
                cases.add(result(t.name() + " undelayed", t.undelayed()));
                cases.add(result(t.name() + " pipelined", t.pipelined()));
                cases.add(result(t.name() + " serial", t.serial()));
                ratios.put(t.name() + "_pipelined", t.pipelined() / t.undelayed());
                ratios.put(t.name() + "_serial", t.serial() / t.undelayed());
            }
            Map<String, Object> json = new BenchReport("dispatch", settings, cases).json();
            json.put("ratios", ratios);
            return json;
        }

        private static Result result(String name, double seconds) {
            return new Result(name, List.of(seconds), Double.NaN, Double.NaN, Double.NaN, Map.of());
        }

        /**
         * Prints a line for each direction.
         *
         * @param out where to
         */
        public void print(PrintWriter out) {
            out.println("dispatch " + settings);
            for (Times t : times) {
                out.printf(
                        Locale.ROOT,
                        "%-8s undelayed %.3f s; transport delayed to %.1f of a chunk's compute:"
                                + " pipelined %.2fx, serial %.2fx%n",
                        t.name(),
                        t.undelayed(),
                        DELAY,
                        t.pipelined() / t.undelayed(),
                        t.serial() / t.undelayed());
            }
        }
    }

    /**
     * Measures.
     *
     * @param progress told about every round of passes
     * @return the figures
     */
    public Report run(Progress progress) {
        AtomicLong delay = new AtomicLong();
        List<List<Times>> byRank =
                InProcessGroup.run(
                        RANKS,
                        bytes -> delay.get(),
                        group -> {
                            try (NDManager manager = NDManager.newBaseManager()) {
                                Progress told = group.rank() == 0 ? progress : what -> {};
                                Passes passes = new Passes(group, manager, tokens, seed);
                                return List.of(
                                        time("forward", group, passes::forward, delay, 2, told),
                                        time("backward", group, passes::backward, delay, 3, told));
                            }
                        });
        return new Report(settings, byRank.get(0));
    }

    private interface Pass {
        void run(boolean overlap);
    }

    private Times time(
            String name,
            ProcessGroup group,
            Pass pass,
            AtomicLong delay,
            int exchanges,
            Progress progress) {
        List<Double> free = new ArrayList<>();
        List<Double> hidden = new ArrayList<>();
        List<Double> waited = new ArrayList<>();
        nanos(group, pass, true);
        nanos(group, pass, false);
        for (int i = 0; i < runs; i++) {
            long nanos = nanos(group, pass, true);
            free.add(nanos / 1e9);
            // The same on both ranks, between barriers.
            for (long[] rank : group.allGather(new long[] {nanos})) {
                nanos = Math.max(nanos, rank[0]);
            }
            delay.set((long) (DELAY * nanos / CHUNKS / exchanges));
            hidden.add(nanos(group, pass, true) / 1e9);
            waited.add(nanos(group, pass, false) / 1e9);
            delay.set(0);
            progress.step(name);
        }
        group.barrier();
        return new Times(
                name,
                BenchReport.median(free),
                BenchReport.median(hidden),
                BenchReport.median(waited));
    }

    private static long nanos(ProcessGroup group, Pass pass, boolean overlap) {
        group.barrier();
        long start = System.nanoTime();
        pass.run(overlap);
        long time = System.nanoTime() - start;
        group.barrier();
        return time;
    }

    /** The two passes of a layer on one rank. */
    private static final class Passes {

        private final PipelinedDispatch overlapping;
        private final PipelinedDispatch waiting;
        private final DispatchRoute route;
        private final NDArray x;
        private final NDArray ids;
        private final NDArray combine;
        private final NDArray out;
        private final NDArray dcombine;
        private final List<NDArray> weights;
        private final List<NDArray> gradients = new ArrayList<>();

        Passes(ProcessGroup group, NDManager manager, int tokens, int seed) {
            overlapping = dispatch(group, tokens, true);
            waiting = dispatch(group, tokens, false);
            Shape rows = new Shape(tokens, HIDDEN);
            Shape routes = new Shape(tokens, TOP_K);
            manager.getEngine().setRandomSeed(seed);
            x = manager.randomNormal(rows);
            out = manager.zeros(rows);
            int[] routing =
                    DispatchWorkload.BALANCED.experts(tokens, TOP_K, EXPERTS, RANKS, CHUNKS);
            ids =
                    manager.create(Arrays.stream(routing).asLongStream().toArray(), routes)
                            .duplicate();
            combine = manager.full(routes, 1f / TOP_K);
            dcombine = manager.zeros(routes);
            weights =
                    new ArrayList<>(
                            Collections.nCopies(Weights.values().length, TorchKernels.nothing()));
            int own = overlapping.ownExperts();
            weights.set(
                    Weights.GATE_UP.ordinal(), normal(manager, new Shape(own, 2 * INNER, HIDDEN)));
            weights.set(Weights.DOWN.ordinal(), normal(manager, new Shape(own, HIDDEN, INNER)));
            for (NDArray w : weights) {
                gradients.add(w.size() == 0 ? w : manager.zeros(w.getShape()));
            }
            route = overlapping.route(ids);
        }

        private static NDArray normal(NDManager manager, Shape shape) {
            return manager.randomNormal(0, SPREAD, shape, DataType.FLOAT32);
        }

        private static PipelinedDispatch dispatch(ProcessGroup group, int tokens, boolean overlap) {
            return PipelinedDispatch.builder()
                    .setGroup(group)
                    .setExperts(EXPERTS)
                    .optChunkTokens((tokens + CHUNKS - 1) / CHUNKS)
                    .optOverlap(overlap)
                    .build();
        }

        private PipelinedDispatch dispatch(boolean overlap) {
            return overlap ? overlapping : waiting;
        }

        void forward(boolean overlap) {
            dispatch(overlap).forward(route, x, ids, combine, weights, 0, out);
        }

        void backward(boolean overlap) {
            dispatch(overlap)
                    .backward(route, x, ids, combine, weights, 0, x, gradients, out, dcombine);
        }
    }
}
