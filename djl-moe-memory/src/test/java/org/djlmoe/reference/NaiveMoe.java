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
 *   + sigmoid(g h) * shared down (silu(shared gate h) * shared up h), if there are shared experts
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
            boolean renormalize,
            int shared) {

        /** A layer without shared experts. */
        public Settings(
                int hidden,
                int inner,
                int experts,
                int topK,
                int rank,
                double eps,
                double scale,
                boolean residual,
                boolean renormalize) {
            this(hidden, inner, experts, topK, rank, eps, scale, residual, renormalize, 0);
        }

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
                case SHARED_GATE_UP:
                    return new long[] {1, 2L * shared, hidden};
                case SHARED_DOWN:
                    return new long[] {1, hidden, shared};
                case SHARED_GATE:
                    return new long[] {1, hidden};
                default:
                    return new long[] {experts, hidden, rank};
            }
        }
    }

    /**
     * The router's losses as part of what is differentiated.
     *
     * @param balance factor of the balance loss
     * @param z factor of the z-loss
     * @param counted which tokens count in them, null for all
     */
    public record Losses(double balance, double z, boolean[] counted) {

        /** Not at all. */
        public static final Losses NONE = new Losses(0, 0, null);
    }

    /** Output and routing, and the gradients of sum(dy * y) and the losses. */
    public record Result(
            double[] y,
            int[][] ids,
            double[][] combine,
            double balanceLoss,
            double zLoss,
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
        return run(settings, weights, select, Losses.NONE, x, dy);
    }

    /**
     * As above, with the balance loss {@code E * sum over e of f_e P_e} and the z-loss added to
     * sum(dy * y): f_e is the number of routes to e a token, P_e its mean probability, and the
     * z-loss the mean squared log-sum-exp of the logits.
     */
    public static Result run(
            Settings settings,
            Map<Weights, double[]> weights,
            Function<double[], int[]> select,
            Losses losses,
            double[] x,
            double[] dy) {
        return new NaiveMoe(settings, weights).run(select, losses, x, dy);
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
        Result result = layer.run(select, Losses.NONE, x, dy);
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

    private Result run(Function<double[], int[]> select, Losses losses, double[] xs, double[] dy) {
        int tokens = xs.length / settings.hidden;
        Value[] x = graph.leaves(xs);
        Value[] y = new Value[x.length];
        int[][] ids = new int[tokens][];
        double[][] combine = new double[tokens][];
        Value[][] probabilities = new Value[tokens][];
        Value[] squares = new Value[tokens];
        for (int t = 0; t < tokens; t++) {
            Value[] row = Graph.row(x, t, settings.hidden);
            Value[] h = graph.rmsNorm(row, weights.get(Weights.NORM), settings.eps);
            Value[] logits = graph.multiply(weights.get(Weights.ROUTER), h);
            ids[t] = select.apply(Graph.numbers(logits));
            Value[] p = graph.softmax(logits);
            probabilities[t] = p;
            Value lse = graph.logSumExp(logits);
            squares[t] = graph.times(lse, lse);
            Value[] c =
                    mask == null
                            ? Arrays.stream(ids[t]).mapToObj(e -> p[e]).toArray(Value[]::new)
                            : masked(p, ids[t]);
            c = settings.renormalize ? graph.normalize(c) : c;
            combine[t] = Graph.numbers(c);
            Value[] out = settings.residual ? row : graph.leaves(new double[settings.hidden]);
            for (int slot = 0; slot < c.length; slot++) {
                Value[] expert = swiGlu(gateUp[ids[t][slot]], down[ids[t][slot]], h);
                out = graph.add(out, scaled(c[slot], expert));
            }
            if (settings.shared > 0) {
                out = graph.add(out, shared(h));
            }
            System.arraycopy(out, 0, y, t * settings.hidden, settings.hidden);
        }
        int[] counted =
                java.util.stream.IntStream.range(0, tokens)
                        .filter(t -> losses.counted == null || losses.counted[t])
                        .toArray();
        Value[] outputs = Arrays.copyOf(y, y.length + 2);
        double[] seeds = Arrays.copyOf(dy, y.length + 2);
        outputs[y.length] = balanceLoss(counted, ids, probabilities);
        seeds[y.length] = losses.balance;
        double[] shares = new double[counted.length];
        Arrays.fill(shares, 1.0 / counted.length);
        outputs[y.length + 1] =
                graph.sum(
                        shares,
                        Arrays.stream(counted).mapToObj(t -> squares[t]).toArray(Value[]::new));
        seeds[y.length + 1] = losses.z;
        graph.backward(outputs, seeds);
        Map<Weights, double[]> gradients = new EnumMap<>(Weights.class);
        weights.forEach((name, w) -> gradients.put(name, Graph.gradients(w)));
        return new Result(
                Graph.numbers(y),
                ids,
                combine,
                outputs[y.length].number,
                outputs[y.length + 1].number,
                Graph.gradients(x),
                gradients);
    }

    private Value balanceLoss(int[] counted, int[][] ids, Value[][] p) {
        int tokens = counted.length;
        double[] routes = new double[settings.experts];
        for (int t : counted) {
            Arrays.stream(ids[t]).forEach(e -> routes[e]++);
        }
        double[] factors = new double[tokens * settings.experts];
        Value[] all = new Value[tokens * settings.experts];
        for (int i = 0; i < tokens; i++) {
            for (int e = 0; e < settings.experts; e++) {
                int at = i * settings.experts + e;
                factors[at] = settings.experts * (routes[e] / tokens) / tokens;
                all[at] = p[counted[i]][e];
            }
        }
        return graph.sum(factors, all);
    }

    private Value[] swiGlu(Value[] gateUp, Value[] down, Value[] h) {
        Value[] both = graph.multiply(gateUp, h);
        int inner = both.length / 2;
        Value[] activation = new Value[inner];
        Arrays.setAll(activation, i -> graph.times(graph.silu(both[i]), both[inner + i]));
        return graph.multiply(down, activation);
    }

    private Value[] shared(Value[] h) {
        Value[] out =
                swiGlu(weights.get(Weights.SHARED_GATE_UP), weights.get(Weights.SHARED_DOWN), h);
        Value[] gate = weights.get(Weights.SHARED_GATE);
        return gate == null ? out : scaled(graph.sigmoid(graph.dot(gate, h)), out);
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
