package org.djlmoe.dispatch;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.junit.jupiter.api.Assertions.assertFalse;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Random;
import java.util.function.BiFunction;
import java.util.function.Function;
import java.util.stream.IntStream;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.parallel.InProcessGroup;
import org.djlmoe.parallel.ProcessGroup;
import org.djlmoe.reference.NaiveExperts;
import org.djlmoe.reference.Numbers;

/** A layer whose tokens and experts lie on the ranks of a group, and its reference as one. */
final class DispatchedLayer {

    static final double BOUND = 1e-5;

    final int ranks;
    final int[] tokens;
    final int topK;
    final int experts;
    final int hidden;
    final int inner;
    final int[][] ids;
    final double[][] combine;
    final double[][] x;
    final double[][] dy;
    double[] gateUp;
    double[] down;

    /** What a rank ends up with. */
    record Outcome(
            float[] y,
            float[] dx,
            float[] dcombine,
            float[] dgateUp,
            float[] ddown,
            DispatchRoute route,
            DispatchMetrics metrics) {}

    DispatchedLayer(int[][] ids, int topK, int experts, int hidden, int inner, long seed) {
        this.ranks = ids.length;
        this.ids = ids;
        this.topK = topK;
        this.experts = experts;
        this.hidden = hidden;
        this.inner = inner;
        tokens = Arrays.stream(ids).mapToInt(i -> i.length / topK).toArray();
        Random random = new Random(seed);
        combine = new double[ranks][];
        x = new double[ranks][];
        dy = new double[ranks][];
        for (int r = 0; r < ranks; r++) {
            combine[r] = Numbers.random(random, ids[r].length, 0.5);
            x[r] = Numbers.random(random, tokens[r] * hidden, 1);
            dy[r] = Numbers.random(random, tokens[r] * hidden, 1);
        }
        gateUp = Numbers.random(random, experts * 2 * inner * hidden, 0.5);
        down = Numbers.random(random, experts * hidden * inner, 0.5);
    }

    /** The same routing on ranks with the given numbers of tokens. */
    static DispatchedLayer of(
            DispatchWorkload workload, int topK, int experts, int chunks, int... tokens) {
        int[][] ids =
                Arrays.stream(tokens)
                        .mapToObj(n -> workload.experts(n, topK, experts, tokens.length, chunks))
                        .toArray(int[][]::new);
        return new DispatchedLayer(ids, topK, experts, 6, 5, 17L * topK + tokens.length);
    }

    NaiveExperts.Result reference() {
        return NaiveExperts.run(
                experts,
                hidden,
                gateUp,
                down,
                Arrays.stream(ids).flatMapToInt(Arrays::stream).toArray(),
                joined(combine),
                joined(x),
                joined(dy));
    }

    private static double[] joined(double[][] parts) {
        return Arrays.stream(parts).flatMapToDouble(Arrays::stream).toArray();
    }

    static float[] joined(List<Outcome> outcomes, Function<Outcome, float[]> part) {
        int size = outcomes.stream().mapToInt(o -> part.apply(o).length).sum();
        float[] all = new float[size];
        int at = 0;
        for (Outcome outcome : outcomes) {
            float[] values = part.apply(outcome);
            System.arraycopy(values, 0, all, at, values.length);
            at += values.length;
        }
        return all;
    }

    int first(int rank) {
        return DispatchPlan.firstExpert(rank, ranks, experts);
    }

    List<NDArray> weights(NDManager manager, int rank) {
        List<NDArray> list =
                new ArrayList<>(
                        Collections.nCopies(Weights.values().length, TorchKernels.nothing()));
        int from = first(rank);
        int to = first(rank + 1);
        int one = 2 * inner * hidden;
        list.set(
                Weights.GATE_UP.ordinal(),
                array(
                        manager,
                        Arrays.copyOfRange(gateUp, from * one, to * one),
                        to - from,
                        2 * inner,
                        hidden));
        one = hidden * inner;
        list.set(
                Weights.DOWN.ordinal(),
                array(
                        manager,
                        Arrays.copyOfRange(down, from * one, to * one),
                        to - from,
                        hidden,
                        inner));
        return list;
    }

    List<NDArray> zeros(NDManager manager, List<NDArray> weights) {
        List<NDArray> list = new ArrayList<>();
        for (NDArray w : weights) {
            list.add(w.size() == 0 ? w : manager.zeros(w.getShape()));
        }
        return list;
    }

    NDArray idArray(NDManager manager, int rank) {
        long[] wide = Arrays.stream(ids[rank]).asLongStream().toArray();
        return manager.create(wide, new Shape(tokens[rank], topK));
    }

    /** Forward and backward on a rank, as many times as steps; gradients add up over them. */
    Outcome onRank(ProcessGroup group, PipelinedDispatch dispatch, int steps) {
        return onRank(group, dispatch, steps, (manager, w) -> w);
    }

    Outcome onRank(
            ProcessGroup group,
            PipelinedDispatch dispatch,
            int steps,
            BiFunction<NDManager, NDArray, NDArray> converted) {
        int r = group.rank();
        try (NDManager manager = NDManager.newBaseManager()) {
            List<NDArray> weights = weights(manager, r);
            List<NDArray> gradients = zeros(manager, weights);
            for (int i = 0; i < weights.size(); i++) {
                NDArray w = weights.get(i);
                if (w.size() > 0) {
                    // As a parameter's value does, it asks for a gradient.
                    w.setRequiresGradient(true);
                    weights.set(i, converted.apply(manager, w));
                }
            }
            Outcome outcome = null;
            for (int step = 0; step < steps; step++) {
                if (step > 0) {
                    Numbers.dirtyMemory(manager);
                }
                NDArray in = array(manager, x[r], tokens[r], hidden);
                NDArray id = idArray(manager, r);
                NDArray c = array(manager, combine[r], tokens[r], topK);
                NDArray g = array(manager, dy[r], tokens[r], hidden);
                NDArray y = manager.zeros(in.getShape());
                NDArray dx = manager.zeros(in.getShape());
                NDArray dc = manager.full(c.getShape(), Float.NaN);
                DispatchRoute route = dispatch.route(id);
                dispatch.forward(route, in, id, c, weights, 0, y);
                dispatch.backward(route, in, id, c, weights, 0, g, gradients, dx, dc);
                assertFalse(ArrayKernels.requiresGradient(y));
                assertFalse(ArrayKernels.requiresGradient(dx));
                outcome =
                        new Outcome(
                                y.toFloatArray(),
                                dx.toFloatArray(),
                                dc.toFloatArray(),
                                gradients.get(Weights.GATE_UP.ordinal()).toFloatArray(),
                                gradients.get(Weights.DOWN.ordinal()).toFloatArray(),
                                route,
                                dispatch.metrics());
            }
            return outcome;
        }
    }

    List<Outcome> run(Function<PipelinedDispatch.Builder, PipelinedDispatch.Builder> settings) {
        return run(1, settings);
    }

    List<Outcome> run(
            int steps, Function<PipelinedDispatch.Builder, PipelinedDispatch.Builder> settings) {
        return InProcessGroup.run(
                ranks,
                group ->
                        onRank(
                                group,
                                settings.apply(
                                                PipelinedDispatch.builder()
                                                        .setGroup(group)
                                                        .setExperts(experts))
                                        .build(),
                                steps));
    }

    void assertEqual(NaiveExperts.Result expected, List<Outcome> got, int steps, String name) {
        assertClose(expected.y(), joined(got, Outcome::y), BOUND, name + " y");
        assertClose(expected.dx(), joined(got, Outcome::dx), BOUND, name + " dx");
        assertClose(expected.dcombine(), joined(got, Outcome::dcombine), BOUND, name + " dc");
        assertExperts(expected.dgateUp(), joined(got, Outcome::dgateUp), steps, name + " gate_up");
        assertExperts(expected.ddown(), joined(got, Outcome::ddown), steps, name + " down");
    }

    /** Expert by expert: one without tokens gets exactly nothing. */
    private void assertExperts(double[] expected, float[] got, int steps, String name) {
        int one = expected.length / experts;
        for (int e : IntStream.range(0, experts).toArray()) {
            double[] times =
                    Arrays.stream(expected, e * one, (e + 1) * one).map(v -> steps * v).toArray();
            assertClose(
                    times,
                    Arrays.copyOfRange(got, e * one, (e + 1) * one),
                    BOUND,
                    name + " of expert " + e);
        }
    }
}
