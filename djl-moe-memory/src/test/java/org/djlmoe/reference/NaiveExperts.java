package org.djlmoe.reference;

import java.util.Arrays;
import org.djlmoe.reference.Graph.Value;

/**
 * The experts of a layer for a given routing, token by token, in double precision: y = sum over j
 * of combine[j] * down[e] (silu(gate[e] x) * up[e] x) with e = ids[j].
 */
public final class NaiveExperts {

    /** Output, and the gradients of sum(dy * y). */
    public record Result(
            double[] y, double[] dx, double[] dcombine, double[] dgateUp, double[] ddown) {}

    private NaiveExperts() {}

    /**
     * Runs the experts forward and backward.
     *
     * @param experts E
     * @param hidden H
     * @param gateUp [E, 2 I, H]
     * @param down [E, H, I]
     * @param ids [N, k]
     * @param combine [N, k]
     * @param x [N, H]
     * @param dy [N, H]
     */
    public static Result run(
            int experts,
            int hidden,
            double[] gateUp,
            double[] down,
            int[] ids,
            double[] combine,
            double[] x,
            double[] dy) {
        Graph graph = new Graph();
        Value[] w1 = graph.leaves(gateUp);
        Value[] w2 = graph.leaves(down);
        Value[] c = graph.leaves(combine);
        Value[] in = graph.leaves(x);
        Value[] y = new Value[x.length];
        int tokens = x.length / hidden;
        int topK = tokens == 0 ? 0 : ids.length / tokens;
        int inner = down.length / experts / hidden;
        for (int t = 0; t < tokens; t++) {
            Value[] row = Graph.row(in, t, hidden);
            Value[] out = graph.leaves(new double[hidden]);
            for (int i = t * topK; i < (t + 1) * topK; i++) {
                Value[] both = graph.multiply(Graph.row(w1, ids[i], 2 * inner * hidden), row);
                Value[] activation = new Value[inner];
                Arrays.setAll(activation, n -> graph.times(graph.silu(both[n]), both[inner + n]));
                Value[] o = graph.multiply(Graph.row(w2, ids[i], hidden * inner), activation);
                Value weight = c[i];
                out =
                        graph.add(
                                out,
                                Arrays.stream(o)
                                        .map(v -> graph.times(weight, v))
                                        .toArray(Value[]::new));
            }
            System.arraycopy(out, 0, y, t * hidden, hidden);
        }
        graph.backward(y, dy);
        return new Result(
                Graph.numbers(y),
                Graph.gradients(in),
                Graph.gradients(c),
                Graph.gradients(w1),
                Graph.gradients(w2));
    }
}
