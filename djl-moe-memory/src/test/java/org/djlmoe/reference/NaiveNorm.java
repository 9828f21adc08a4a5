package org.djlmoe.reference;

import org.djlmoe.reference.Graph.Value;

/** Root mean square norm of rows, in double precision. */
public final class NaiveNorm {

    /** Output, and the gradients of sum(dy * y). */
    public record Result(double[] y, double[] dx, double[] dgamma) {}

    private NaiveNorm() {}

    /**
     * Norms rows, forward and backward.
     *
     * @param gamma weight [H]
     * @param eps added to the mean square
     * @param xs rows [N, H]
     * @param dy gradient of the output [N, H]
     */
    public static Result run(double[] gamma, double eps, double[] xs, double[] dy) {
        Graph graph = new Graph();
        Value[] x = graph.leaves(xs);
        Value[] weight = graph.leaves(gamma);
        Value[] y = new Value[x.length];
        for (int t = 0; t < x.length / gamma.length; t++) {
            Value[] row = graph.rmsNorm(Graph.row(x, t, gamma.length), weight, eps);
            System.arraycopy(row, 0, y, t * gamma.length, gamma.length);
        }
        graph.backward(y, dy);
        return new Result(Graph.numbers(y), Graph.gradients(x), Graph.gradients(weight));
    }
}
