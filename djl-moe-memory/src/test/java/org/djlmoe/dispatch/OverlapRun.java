package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import org.djlmoe.parallel.InProcessGroup;
import org.djlmoe.parallel.ProcessGroup;

/**
 * Whether exchanges are hidden behind the experts, measured: the transport is delayed to 0.8 of a
 * chunk's compute, and a pass with overlap is compared with one that waits for every exchange.
 *
 * <p>Run as a program with the test class path, one thread a rank: {@code OMP_NUM_THREADS=1 java
 * org.djlmoe.dispatch.OverlapRun}. Prints times relative to the undelayed pass. With the argument
 * {@code sleep} few tokens are computed and a chunk sleeps instead: what the order of the exchanges
 * alone gives, on a machine that is busy otherwise.
 */
final class OverlapRun {

    private static final int RANKS = 2;
    private static final int CHUNKS = 10;
    private static final int ROUNDS = 7;

    private OverlapRun() {}

    public static void main(String[] args) {
        AtomicLong delay = new AtomicLong();
        int[][] ids = new int[RANKS][];
        boolean sleeps = Arrays.asList(args).contains("sleep");
        int tokens = sleeps ? 10 * CHUNKS : 8 * 1024;
        Arrays.fill(ids, DispatchWorkload.BALANCED.experts(tokens, 2, 8, RANKS, CHUNKS));
        DispatchedLayer layer = new DispatchedLayer(ids, 2, 8, 128, 256, 1);
        InProcessGroup.run(
                RANKS,
                bytes -> delay.get(),
                group -> {
                    try (NDManager manager = NDManager.newBaseManager()) {
                        Passes passes = new Passes(layer, group, manager, sleeps);
                        report("forward", group, passes::forward, delay, 2);
                        report("backward", group, passes::backward, delay, 3);
                    }
                    return null;
                });
    }

    private interface Pass {
        void run(boolean overlap);
    }

    private static void report(
            String name, ProcessGroup group, Pass pass, AtomicLong delay, int exchanges) {
        List<Long> free = new ArrayList<>();
        List<Long> hidden = new ArrayList<>();
        List<Long> waited = new ArrayList<>();
        time(group, pass, true);
        time(group, pass, false);
        for (int i = 0; i < ROUNDS; i++) {
            delay.set(0);
            free.add(time(group, pass, true));
            // The same on both ranks, between barriers.
            long slower = 0;
            for (long[] rank : group.allGather(new long[] {free.get(i)})) {
                slower = Math.max(slower, rank[0]);
            }
            delay.set((long) (0.8 * slower / CHUNKS / exchanges));
            hidden.add(time(group, pass, true));
            waited.add(time(group, pass, false));
            delay.set(0);
        }
        group.barrier();
        if (group.rank() == 0) {
            System.out.printf(
                    "%s: undelayed %.1f ms, delayed with overlap %.2fx, without %.2fx%n",
                    name,
                    median(free) / 1e6,
                    (double) median(hidden) / median(free),
                    (double) median(waited) / median(free));
        }
    }

    private static long time(ProcessGroup group, Pass pass, boolean overlap) {
        group.barrier();
        long start = System.nanoTime();
        pass.run(overlap);
        long time = System.nanoTime() - start;
        group.barrier();
        return time;
    }

    private static long median(List<Long> times) {
        return times.stream().sorted().skip(times.size() / 2).findFirst().orElseThrow();
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
        private final List<NDArray> gradients;

        Passes(DispatchedLayer layer, ProcessGroup group, NDManager manager, boolean sleeps) {
            int r = group.rank();
            overlapping = dispatch(group, layer, true, sleeps);
            waiting = dispatch(group, layer, false, sleeps);
            Shape shape = new Shape(layer.tokens[r], layer.hidden);
            x = manager.ones(shape);
            out = manager.zeros(shape);
            ids = layer.idArray(manager, r);
            combine = manager.full(new Shape(layer.tokens[r], layer.topK), 0.5f);
            dcombine = manager.zeros(combine.getShape());
            weights = layer.weights(manager, r);
            gradients = layer.zeros(manager, weights);
            route = overlapping.route(ids);
        }

        private static PipelinedDispatch dispatch(
                ProcessGroup group, DispatchedLayer layer, boolean overlap, boolean sleeps) {
            return PipelinedDispatch.builder()
                    .setGroup(group)
                    .setExperts(layer.experts)
                    .optChunkTokens((layer.tokens[0] + CHUNKS - 1) / CHUNKS)
                    .optOverlap(overlap)
                    .optObserver(chunk -> sleep(sleeps ? 50 : 0))
                    .build();
        }

        private static void sleep(long millis) {
            try {
                Thread.sleep(millis);
            } catch (InterruptedException e) {
                throw new IllegalStateException(e);
            }
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
