package org.djlmoe.reference;

import java.util.Arrays;
import java.util.EnumMap;
import java.util.Map;
import java.util.function.Function;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.reference.Graph.Value;

/**
 * A Mixture-of-Experts layer, token by token, in double precision.
 *
 * <pre>
 * h = norm(x)      p = softmax(router h)      chosen = select(router h)
 * c = p[chosen], divided by its sum if the model does so
 * y = x (if residual) + sum over chosen of c * down (silu(gate h) * up h)
 * </pre>
 *
 * <p>An adapter is what its definition says, W + scale * B A, formed in full.
 */
public final class NaiveMoe {

    /** Shape [H, I, E, k, r] and constants of a layer. */
    public record Settings(
            int hidden,
            int inner,
            int experts,
            int topK,
            int rank,
            double eps,
            double scale,
            boolean residual,
            boolean renormalize) {

        /** The number of elements of a weight. */
        public int size(Weights weight) {
            int size = 1;
            for (long axis : shape(weight)) {
                size *= (int) axis;
            }
            return size;
        }

        /** The shape of a weight. */
        public long[] shape(Weights weight) {
            switch (weight) {
                case NORM:
                    return new long[] {hidden};
                case ROUTER:
                    return new long[] {experts, hidden};
                case GATE_UP:
                    return new long[] {experts, 2L * inner, hidden};
                case DOWN:
                    return new long[] {experts, hidden, inner};
                case GATE_UP_A:
                    return new long[] {experts, rank, hidden};
                case GATE_UP_B:
                    return new long[] {experts, 2L * inner, rank};
                case DOWN_A:
                    return new long[] {experts, rank, inner};
                default:
                    return new long[] {experts, hidden, rank};
            }
        }
    }

    /** Output and routing, and the gradients of sum(dy * y). */
    public record Result(
            double[] y,
            int[][] ids,
            double[][] combine,
            double[] dx,
            Map<Weights, double[]> gradients) {}

    private final Graph graph = new Graph();
    private final Settings settings;
    private final Map<Weights, Value[]> weights = new EnumMap<>(Weights.class);
    private final Value[][] gateUp;
    private final Value[][] down;
    private Mask mask;
    private Value[] factors;

    private NaiveMoe(Settings settings, Map<Weights, double[]> numbers) {
        this.settings = settings;
        numbers.forEach((name, w) -> weights.put(name, graph.leaves(w)));
        gateUp = new Value[settings.experts][];
        down = new Value[settings.experts][];
        for (int e = 0; e < settings.experts; e++) {
            gateUp[e] = adapted(e, Weights.GATE_UP, Weights.GATE_UP_A, Weights.GATE_UP_B);
            down[e] = adapted(e, Weights.DOWN, Weights.DOWN_A, Weights.DOWN_B);
        }
    }

    /**
     * Runs the layer forward and backward.
     *
     * @param settings shape and constants
     * @param weights the weights that the layer has
     * @param select from a token's router logits to the ids of its experts
     * @param x [N, H]
     * @param dy gradient of y [N, H]
     */
    public static Result run(
            Settings settings,
            Map<Weights, double[]> weights,
            Function<double[], int[]> select,
            double[] x,
            double[] dy) {
        return run(settings, weights, select, 0, x, dy);
    }

    /**
     * As above, with the balance loss {@code coefficient * E * sum over e of f_e P_e} added to
     * sum(dy * y): f_e is the number of routes to e a token, P_e its mean probability.
     */
    public static Result run(
            Settings settings,
            Map<Weights, double[]> weights,
            Function<double[], int[]> select,
            double balanceCoefficient,
            double[] x,
            double[] dy) {
        return new NaiveMoe(settings, weights).run(select, balanceCoefficient, x, dy);
    }

    /**
     * A mask on the layer: the combine weight of expert e carries the factor m_e, 1 where it is
     * kept and 0 where not, before the weights of a token are divided by their sum.
     *
     * @param kept whether an expert is kept
     * @param excluded how many dropped experts a token run along with factor 0, the best by logit
     * @param keptOnly whether weights come from the softmax over the kept experts alone
     */
    public record Mask(boolean[] kept, int excluded, boolean keptOnly) {}

    /** The result under a mask, and the gradients of the factors. */
    public record Masked(Result result, double[] factorGradients) {}

    /** Runs the layer under a mask; ids and combine weights have the excluded experts last. */
    public static Masked run(
            Settings settings, Map<Weights, double[]> weights, Mask mask, double[] x, double[] dy) {
        NaiveMoe layer = new NaiveMoe(settings, weights);
        double[] factors = new double[settings.experts];
        Arrays.setAll(factors, e -> mask.kept[e] ? 1 : 0);
        layer.mask = mask;
        layer.factors = layer.graph.leaves(factors);
        Function<double[], int[]> select =
                logits -> {
                    int[] chosen = best(logits, mask.kept, true, settings.topK);
                    int[] extra = best(logits, mask.kept, false, mask.excluded);
                    int[] both = Arrays.copyOf(chosen, chosen.length + extra.length);
                    System.arraycopy(extra, 0, both, chosen.length, extra.length);
                    return both;
                };
        Result result = layer.run(select, 0, x, dy);
        return new Masked(result, Graph.gradients(layer.factors));
    }

    private static int[] best(double[] logits, boolean[] kept, boolean of, int n) {
        return java.util.stream.IntStream.range(0, logits.length)
                .filter(e -> kept[e] == of)
                .boxed()
                .sorted((a, b) -> Double.compare(logits[b], logits[a]))
                .limit(n)
                .mapToInt(e -> e)
                .toArray();
    }

    /** The combine weights of a token before they are divided by their sum. */
    private Value[] masked(Value[] p, int[] ids) {
        Value[] c = new Value[ids.length];
        double[] ones = new double[p.length];
        Arrays.setAll(ones, e -> mask.kept[e] ? 1 : 0);
        Value ofKept = graph.sum(ones, p);
        Arrays.setAll(
                c,
                i -> {
                    Value own = mask.keptOnly ? graph.divide(p[ids[i]], ofKept) : p[ids[i]];
                    return graph.times(own, factors[ids[i]]);
                });
        return c;
    }

    /** The k largest logits, of equal ones the lower index. */
    public static Function<double[], int[]> topK(int k) {
        return logits ->
                java.util.stream.IntStream.range(0, logits.length)
                        .boxed()
                        .sorted((a, b) -> Double.compare(logits[b], logits[a]))
                        .limit(k)
                        .mapToInt(e -> e)
                        .toArray();
    }

    private Result run(Function<double[], int[]> select, double balance, double[] xs, double[] dy) {
        int tokens = xs.length / settings.hidden;
        Value[] x = graph.leaves(xs);
        Value[] y = new Value[x.length];
        int[][] ids = new int[tokens][];
        double[][] combine = new double[tokens][];
        Value[][] probabilities = new Value[tokens][];
        for (int t = 0; t < tokens; t++) {
            Value[] row = Graph.row(x, t, settings.hidden);
            Value[] h = graph.rmsNorm(row, weights.get(Weights.NORM), settings.eps);
            Value[] logits = graph.multiply(weights.get(Weights.ROUTER), h);
            ids[t] = select.apply(Graph.numbers(logits));
            Value[] p = graph.softmax(logits);
            probabilities[t] = p;
            Value[] c =
                    mask == null
                            ? Arrays.stream(ids[t]).mapToObj(e -> p[e]).toArray(Value[]::new)
                            : masked(p, ids[t]);
            c = settings.renormalize ? graph.normalize(c) : c;
            combine[t] = Graph.numbers(c);
            Value[] out = settings.residual ? row : graph.leaves(new double[settings.hidden]);
            for (int slot = 0; slot < c.length; slot++) {
                out = graph.add(out, scaled(c[slot], expert(ids[t][slot], h)));
            }
            System.arraycopy(out, 0, y, t * settings.hidden, settings.hidden);
        }
        Value[] outputs = Arrays.copyOf(y, y.length + 1);
        double[] seeds = Arrays.copyOf(dy, y.length + 1);
        outputs[y.length] = balanceLoss(ids, probabilities);
        seeds[y.length] = balance;
        graph.backward(outputs, seeds);
        Map<Weights, double[]> gradients = new EnumMap<>(Weights.class);
        weights.forEach((name, w) -> gradients.put(name, Graph.gradients(w)));
        return new Result(Graph.numbers(y), ids, combine, Graph.gradients(x), gradients);
    }

    private Value balanceLoss(int[][] ids, Value[][] p) {
        int tokens = ids.length;
        double[] factors = new double[tokens * settings.experts];
        Value[] all = new Value[tokens * settings.experts];
        for (int t = 0; t < tokens; t++) {
            for (int e = 0; e < settings.experts; e++) {
                int expert = e;
                double routes =
                        Arrays.stream(ids)
                                .flatMapToInt(Arrays::stream)
                                .filter(i -> i == expert)
                                .count();
                int at = t * settings.experts + e;
                factors[at] = settings.experts * (routes / tokens) / tokens;
                all[at] = p[t][e];
            }
        }
        return graph.sum(factors, all);
    }

    private Value[] expert(int e, Value[] h) {
        Value[] both = graph.multiply(gateUp[e], h);
        Value[] activation = new Value[settings.inner];
        Arrays.setAll(activation, i -> graph.times(graph.silu(both[i]), both[settings.inner + i]));
        return graph.multiply(down[e], activation);
    }

    private Value[] scaled(Value c, Value[] a) {
        return Arrays.stream(a).map(v -> graph.times(c, v)).toArray(Value[]::new);
    }

    /** Expert e's weight, W + scale * B A if there are adapters. */
    private Value[] adapted(int e, Weights base, Weights lower, Weights upper) {
        Value[] w = expertPart(weights.get(base), e);
        if (!weights.containsKey(lower)) {
            return w;
        }
        Value[] a = expertPart(weights.get(lower), e);
        Value[] b = expertPart(weights.get(upper), e);
        int columns = a.length / settings.rank;
        Value[] sum = new Value[w.length];
        for (int i = 0; i < w.length; i++) {
            int column = i % columns;
            Value[] ofA = new Value[settings.rank];
            Arrays.setAll(ofA, r -> a[r * columns + column]);
            Value product = graph.dot(Graph.row(b, i / columns, settings.rank), ofA);
            sum[i] = graph.sum(new double[] {1, settings.scale}, w[i], product);
        }
        return sum;
    }

    private Value[] expertPart(Value[] stacked, int e) {
        return Graph.row(stacked, e, stacked.length / settings.experts);
    }
}
