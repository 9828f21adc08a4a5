package org.djlmoe.maskcoft;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.SplittableRandom;
import java.util.stream.LongStream;
import org.djlmoe.routing.ExpertMask;

/**
 * A Mixture-of-Experts layer of eight linear experts, top-2 with renormalised weights, in plain
 * Java. Its task is to do under a mask of six experts what it does with all: most experts resemble
 * each other and replace one another at little loss, experts 3 and 5 do not. Those two start just
 * below the cut.
 *
 * <p>The main method prints in how many of 100 runs each estimator admits both:
 *
 * <pre>
 * mvn -q -o -pl djl-moe-memory test-compile
 * java -cp djl-moe-memory/target/test-classes:djl-moe-memory/target/classes:GSON_JAR org.djlmoe.maskcoft.ToyMoe
 * </pre>
 */
final class ToyMoe {

    static final int EXPERTS = 8;
    static final int KEPT = 6;
    static final int TOP_K = 2;
    static final List<Integer> USEFUL = List.of(3, 5);
    private static final int WIDTH = 8;
    private static final int TOKENS = 24;
    private static final int STEPS = 80;
    private static final int SAMPLES = 6;

    private final double[][] router;
    private final double[][][] experts;
    private final SplittableRandom text;

    private ToyMoe(long seed) {
        SplittableRandom random = new SplittableRandom(seed);
        router = gaussian(random, EXPERTS, 1);
        for (double[] row : router) {
            // Of one length, so that every expert is asked for about equally often.
            double length = Math.sqrt(inner(row, row));
            Arrays.setAll(row, i -> 3 * row[i] / length);
        }
        double[][] common = gaussian(random, WIDTH, 1);
        experts = new double[EXPERTS][][];
        for (int e = 0; e < EXPERTS; e++) {
            experts[e] = gaussian(random, WIDTH, USEFUL.contains(e) ? 1 : 0.2);
            for (int i = 0; i < WIDTH && !USEFUL.contains(e); i++) {
                for (int j = 0; j < WIDTH; j++) {
                    experts[e][i][j] += common[i][j];
                }
            }
        }
        text = random.split();
    }

    private static double[][] gaussian(SplittableRandom random, int rows, double deviation) {
        double[][] w = new double[rows][WIDTH];
        for (double[] row : w) {
            Arrays.setAll(row, i -> deviation * random.nextGaussian());
        }
        return w;
    }

    private static double[] times(double[][] w, double[] x) {
        double[] y = new double[w.length];
        for (int i = 0; i < y.length; i++) {
            y[i] = inner(w[i], x);
        }
        return y;
    }

    private static double inner(double[] a, double[] b) {
        double sum = 0;
        for (int i = 0; i < a.length; i++) {
            sum += a[i] * b[i];
        }
        return sum;
    }

    /**
     * What does not depend on the mask: the exponentials of a token's logits, each expert's output,
     * the target.
     */
    private record Token(double[] weights, double[][] outputs, double[] target) {}

    private List<Token> batch() {
        List<Token> batch = new ArrayList<>();
        boolean[] all = new boolean[EXPERTS];
        Arrays.fill(all, true);
        for (double[] x : gaussian(text, TOKENS, 1)) {
            double[] z = Arrays.stream(times(router, x)).map(Math::exp).toArray();
            double[][] outputs = new double[EXPERTS][];
            for (int e = 0; e < EXPERTS; e++) {
                outputs[e] = times(experts[e], x);
            }
            batch.add(new Token(z, outputs, mix(outputs, z, best(z, all, true, TOP_K))));
        }
        return batch;
    }

    /** Loss on a batch and the gradients of the factors. */
    private static MaskOutcome run(List<Token> batch, boolean[] kept, int excluded) {
        double loss = 0;
        double[] factors = new double[EXPERTS];
        double[] g = new double[WIDTH];
        for (Token token : batch) {
            int[] chosen = best(token.weights, kept, true, TOP_K);
            double[] y = mix(token.outputs, token.weights, chosen);
            for (int i = 0; i < WIDTH; i++) {
                g[i] = (y[i] - token.target[i]) / batch.size();
                loss += 0.5 * (y[i] - token.target[i]) * g[i];
            }
            double mean = inner(g, y);
            double total = total(token.weights, chosen);
            for (int[] ran : new int[][] {chosen, best(token.weights, kept, false, excluded)}) {
                for (int e : ran) {
                    factors[e] += token.weights[e] / total * (inner(g, token.outputs[e]) - mean);
                }
            }
        }
        return new MaskOutcome(loss, new double[][] {factors});
    }

    /** The n best of the kept experts, or of the others. */
    private static int[] best(double[] z, boolean[] kept, boolean of, int n) {
        int[] best = new int[EXPERTS];
        int size = 0;
        for (int e = 0; e < EXPERTS; e++) {
            if (kept[e] == of) {
                int at = size++;
                while (at > 0 && z[e] > z[best[at - 1]]) {
                    best[at] = best[--at];
                }
                best[at] = e;
            }
        }
        return Arrays.copyOf(best, Math.min(n, size));
    }

    private static double total(double[] z, int[] ids) {
        double total = 0;
        for (int e : ids) {
            total += z[e];
        }
        return total;
    }

    private static double[] mix(double[][] outputs, double[] z, int[] ids) {
        double total = total(z, ids);
        double[] y = new double[WIDTH];
        for (int e : ids) {
            double w = z[e] / total;
            for (int i = 0; i < WIDTH; i++) {
                y[i] += w * outputs[e][i];
            }
        }
        return y;
    }

    /** Whether the best of the 28 masks, on other text, is the one that drops no useful expert. */
    static boolean bestMaskKeepsBoth(long seed) {
        ToyMoe toy = new ToyMoe(seed);
        List<Token> much = new ArrayList<>();
        for (int i = 0; i < 20; i++) {
            much.addAll(toy.batch());
        }
        double least = Double.POSITIVE_INFINITY;
        boolean both = false;
        for (int a = 0; a < EXPERTS; a++) {
            for (int b = 0; b < a; b++) {
                boolean[] kept = new boolean[EXPERTS];
                Arrays.fill(kept, true);
                kept[a] = false;
                kept[b] = false;
                double loss = run(much, kept, 0).loss();
                if (loss < least) {
                    least = loss;
                    both = !USEFUL.contains(a) && !USEFUL.contains(b);
                }
            }
        }
        return both;
    }

    /** Whether both useful experts are kept at the end. */
    static boolean admits(MaskEstimator estimator, long seed) {
        ToyMoe toy = new ToyMoe(seed);
        double[] theta = new double[EXPERTS];
        Arrays.setAll(theta, e -> USEFUL.contains(e) ? 0 : 0.1);
        MaskLearning learning =
                MaskLearning.builder()
                        .setNumLayers(1)
                        .setNumExperts(EXPERTS)
                        .setKept(KEPT)
                        .setTopK(TOP_K)
                        .optEstimator(estimator)
                        .optTheta(new double[][] {theta})
                        .optSamples(SAMPLES)
                        .optSeed(seed)
                        .build();
        for (int step = 0; step < STEPS; step++) {
            List<Token> batch = toy.batch();
            List<MaskSample> samples = learning.propose(step);
            List<MaskOutcome> outcomes = new ArrayList<>();
            for (MaskSample sample : samples) {
                outcomes.add(run(batch, sample.mask().kept(0), estimator.excludedExperts()));
            }
            learning.update(samples, outcomes);
        }
        ExpertMask mask = learning.mask();
        return USEFUL.stream().allMatch(e -> mask.isKept(0, e));
    }

    /** In how many of 100 seeded runs each estimator admits both useful experts. */
    static Map<String, Integer> shares() {
        Map<String, Integer> shares = new LinkedHashMap<>();
        for (MaskEstimator estimator :
                List.of(
                        MaskEstimator.plackettLuce(),
                        MaskEstimator.gumbel(),
                        MaskEstimator.dense(1),
                        MaskEstimator.dense(2),
                        new StraightThrough(false, 0))) {
            int admitted = 0;
            for (long seed = 0; seed < 100; seed++) {
                admitted += admits(estimator, seed) ? 1 : 0;
            }
            shares.put(estimator.toString(), admitted);
        }
        return shares;
    }

    /** Prints the shares. */
    public static void main(String[] args) {
        long useful = LongStream.range(0, 100).filter(ToyMoe::bestMaskKeepsBoth).count();
        System.out.println("the best mask keeps both: " + useful + " of 100");
        shares().forEach((name, n) -> System.out.println(name + ": " + n + " of 100"));
    }
}
