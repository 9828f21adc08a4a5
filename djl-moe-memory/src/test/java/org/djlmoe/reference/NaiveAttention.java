package org.djlmoe.reference;

import java.util.ArrayList;
import java.util.List;
import org.djlmoe.reference.Graph.Value;

/**
 * The attention half of a decoder layer, score by score, in double precision: {@code y = x +
 * attention(norm(x)) o'}, causal, with rotary positions, grouped KV heads and an optional window.
 */
public final class NaiveAttention {

    /** Shape and constants; window 0 sees all earlier tokens, w the token and the w - 1 before. */
    public record Settings(
            int hidden,
            int sequence,
            int heads,
            int kvHeads,
            int headDim,
            int window,
            double theta,
            double eps) {}

    /** Output, and the gradients of sum(dy * y); those of weights in the order of the weights. */
    public record Result(double[] y, double[] dx, List<double[]> gradients) {}

    private final Graph graph = new Graph();
    private final Settings settings;

    private NaiveAttention(Settings settings) {
        this.settings = settings;
    }

    /**
     * Runs the layer forward and backward.
     *
     * @param settings shape and constants
     * @param weights norm [H], q [heads d, H], k and v [kvHeads d, H], o [H, heads d]
     * @param x [B S, H], sequence after sequence
     * @param dy gradient of y [B S, H]
     */
    public static Result run(Settings settings, List<double[]> weights, double[] x, double[] dy) {
        return new NaiveAttention(settings).run(weights, x, dy);
    }

    private Result run(List<double[]> numbers, double[] xs, double[] dy) {
        List<Value[]> weights = new ArrayList<>();
        numbers.forEach(w -> weights.add(graph.leaves(w)));
        int width = settings.sequence * settings.hidden;
        Value[] x = graph.leaves(xs);
        Value[] y = new Value[x.length];
        for (int b = 0; b < x.length / width; b++) {
            Value[] out = sequence(Graph.row(x, b, width), weights);
            System.arraycopy(out, 0, y, b * width, width);
        }
        graph.backward(y, dy);
        List<double[]> gradients = new ArrayList<>();
        weights.forEach(w -> gradients.add(Graph.gradients(w)));
        return new Result(Graph.numbers(y), Graph.gradients(x), gradients);
    }

    private Value[] sequence(Value[] x, List<Value[]> weights) {
        int s = settings.sequence;
        int d = settings.headDim;
        Value[][] q = new Value[s][];
        Value[][] k = new Value[s][];
        Value[][] v = new Value[s][];
        Value[] y = new Value[x.length];
        for (int t = 0; t < s; t++) {
            Value[] row = Graph.row(x, t, settings.hidden);
            Value[] h = graph.rmsNorm(row, weights.get(0), settings.eps);
            q[t] = rotated(graph.multiply(weights.get(1), h), t);
            k[t] = rotated(graph.multiply(weights.get(2), h), t);
            v[t] = graph.multiply(weights.get(3), h);

            Value[] attended = new Value[settings.heads * d];
            int first = settings.window == 0 ? 0 : Math.max(0, t - settings.window + 1);
            for (int head = 0; head < settings.heads; head++) {
                int group = head / (settings.heads / settings.kvHeads);
                Value[] query = Graph.row(q[t], head, d);
                Value[] scores = new Value[t - first + 1];
                for (int j = 0; j < scores.length; j++) {
                    Value product = graph.dot(query, Graph.row(k[first + j], group, d));
                    scores[j] = graph.sum(new double[] {1 / Math.sqrt(d)}, product);
                }
                Value[] p = graph.softmax(scores);
                for (int i = 0; i < d; i++) {
                    Value[] column = new Value[p.length];
                    int at = group * d + i;
                    for (int j = 0; j < p.length; j++) {
                        column[j] = v[first + j][at];
                    }
                    attended[head * d + i] = graph.dot(p, column);
                }
            }
            Value[] out = graph.add(row, graph.multiply(weights.get(4), attended));
            System.arraycopy(out, 0, y, t * settings.hidden, settings.hidden);
        }
        return y;
    }

    /** Turns the pair (i, i + d/2) of every head by the angle t / theta^(2 i / d). */
    private Value[] rotated(Value[] a, int t) {
        int d = settings.headDim;
        Value[] y = a.clone();
        for (int head = 0; head < a.length / d; head++) {
            for (int i = 0; i < d / 2; i++) {
                double angle = t / Math.pow(settings.theta, 2.0 * i / d);
                double cos = Math.cos(angle);
                double sin = Math.sin(angle);
                Value left = a[head * d + i];
                Value right = a[head * d + d / 2 + i];
                y[head * d + i] = graph.sum(new double[] {cos, -sin}, left, right);
                y[head * d + d / 2 + i] = graph.sum(new double[] {sin, cos}, left, right);
            }
        }
        return y;
    }

    /** Numbers of elements of the five weights. */
    public static int[] sizes(Settings s) {
        int queries = s.heads * s.headDim;
        int keys = s.kvHeads * s.headDim;
        return new int[] {
            s.hidden, queries * s.hidden, keys * s.hidden, keys * s.hidden, s.hidden * queries
        };
    }
}
