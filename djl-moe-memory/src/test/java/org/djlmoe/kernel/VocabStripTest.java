package org.djlmoe.kernel;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.Arrays;
import java.util.Random;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The fold of one strip after another, against the whole vocabulary at once. */
class VocabStripTest {

    private static final int N = 3;
    private static final int V = 10;
    private static final double SMOOTHING = 0.1;
    private static final double ZETA = 0.02;

    private final TorchKernels kernels = TorchKernels.load(VocabKernels.class, "vocab.py");
    private final Random random = new Random(5);
    private final long[] labels = {0, 9, 6};
    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private record Folded(float[] losses, float[] lse) {}

    /** Folds columns [cuts[i], cuts[i + 1]) one strip at a time. */
    private Folded fold(float[] logits, int... cuts) {
        NDArray m = manager.full(new Shape(N), Float.NEGATIVE_INFINITY);
        NDArray z = manager.zeros(new Shape(N));
        NDArray y = manager.zeros(new Shape(N));
        NDArray s = manager.zeros(new Shape(N));
        NDArray target = manager.create(labels);
        NDArray all = manager.create(logits, new Shape(N, V));
        for (int i = 0; i + 1 < cuts.length; i++) {
            NDArray strip =
                    cuts[i] == cuts[i + 1]
                            ? manager.create(new Shape(N, 0), DataType.FLOAT32)
                            : all.get(":, " + cuts[i] + ":" + cuts[i + 1]).duplicate();
            kernels.run("strip_fold", strip, target, cuts[i], m, z, y, s, true);
        }
        NDArray losses = manager.create(new Shape(N));
        NDArray lse = manager.create(new Shape(N));
        NDArray ones = manager.ones(new Shape(N));
        kernels.run("state_loss", m, z, y, s, ones, SMOOTHING, ZETA, V, losses, lse);
        return new Folded(losses.toFloatArray(), lse.toFloatArray());
    }

    private float[] logits() {
        float[] logits = new float[N * V];
        for (int i = 0; i < logits.length; i++) {
            logits[i] = (float) (5 * random.nextGaussian());
        }
        return logits;
    }

    private void assertFormula(float[] logits, Folded folded) {
        for (int t = 0; t < N; t++) {
            double z = 0;
            double sum = 0;
            for (int v = 0; v < V; v++) {
                z += Math.exp(logits[t * V + v]);
                sum += logits[t * V + v];
            }
            double lse = Math.log(z);
            double y = logits[t * V + (int) labels[t]];
            double loss =
                    (1 - SMOOTHING) * (lse - y) + SMOOTHING * (lse - sum / V) + ZETA * lse * lse;
            assertEquals(lse, folded.lse[t], 2e-6 * Math.abs(lse));
            assertEquals(loss, folded.losses[t], 2e-6 * loss);
        }
    }

    @Test
    void fold_unevenAndEmptyStrips_asTheWholeVocabulary() {
        float[] logits = logits();
        assertFormula(logits, fold(logits, 0, V));
        assertFormula(logits, fold(logits, 0, 7, V));
        assertFormula(logits, fold(logits, 0, 0, 1, 1, 6, 9, V, V));
    }

    @Test
    void fold_constantLogitsOnTwoStrips_noTermForTheNumberOfStrips() {
        float[] logits = new float[N * V];
        assertArrayEquals(
                new float[] {(float) Math.log(V), (float) Math.log(V), (float) Math.log(V)},
                fold(logits, 0, 5, V).lse,
                1e-6f);
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void fold_stripOfMinusInfinity_changesNothing(boolean first) {
        float[] logits = logits();
        Folded before = fold(logits, 0, V);
        // one more strip, of columns that nobody's label lies in
        NDArray m = manager.full(new Shape(N), Float.NEGATIVE_INFINITY);
        NDArray z = manager.zeros(new Shape(N));
        NDArray y = manager.zeros(new Shape(N));
        NDArray s = manager.zeros(new Shape(N));
        NDArray target = manager.create(labels);
        NDArray masked = manager.full(new Shape(N, 4), Float.NEGATIVE_INFINITY);
        NDArray whole = manager.create(logits, new Shape(N, V));
        for (boolean now : new boolean[] {first, !first}) {
            kernels.run("strip_fold", now ? masked : whole, target, now ? V : 0, m, z, y, s, true);
        }
        NDArray losses = manager.create(new Shape(N));
        NDArray lse = manager.create(new Shape(N));
        NDArray ones = manager.ones(new Shape(N));
        kernels.run("state_loss", m, z, y, s, ones, SMOOTHING, ZETA, V, losses, lse);
        assertArrayEquals(before.losses, losses.toFloatArray());
        assertArrayEquals(before.lse, lse.toFloatArray());
    }

    @Test
    void best_anyStrips_theFirstOfTheHighestLogits() {
        float[] logits = logits();
        // equal ones on both sides of a cut, and a row in which nothing can be predicted
        logits[V + 2] = 99;
        logits[V + 8] = 99;
        Arrays.fill(logits, 2 * V, 3 * V, Float.NEGATIVE_INFINITY);
        long highest = 0;
        for (int v = 1; v < V; v++) {
            highest = logits[v] > logits[(int) highest] ? v : highest;
        }
        NDArray all = manager.create(logits, new Shape(N, V));
        NDArray target = manager.create(labels);
        for (int[] cuts : new int[][] {{0, V}, {0, 7, V}, {0, 0, 1, 1, 6, 9, V, V}}) {
            NDArray m = manager.full(new Shape(N), Float.NEGATIVE_INFINITY);
            NDArray other = manager.zeros(new Shape(N));
            NDArray best = manager.full(new Shape(N), -1, DataType.INT64);
            for (int i = 0; i + 1 < cuts.length; i++) {
                NDArray strip =
                        cuts[i] == cuts[i + 1]
                                ? manager.create(new Shape(N, 0), DataType.FLOAT32)
                                : all.get(":, " + cuts[i] + ":" + cuts[i + 1]).duplicate();
                kernels.run("strip_best", strip, cuts[i], m, best);
                kernels.run("strip_fold", strip, target, cuts[i], m, other, other, other, false);
            }
            assertArrayEquals(new long[] {highest, 2, -1}, best.toLongArray());
        }
    }

    @Test
    void gradient_byStrips_columnsOfTheWholeGradient() {
        float[] p = logits();
        NDArray target = manager.create(labels);
        NDArray factor = manager.create(new float[] {1, -2, .5f});
        NDArray multiplier = manager.create(new float[] {3, 1, 2});
        NDArray none = manager.create(new Shape(0), DataType.FLOAT32);
        NDArray whole = manager.create(p, new Shape(N, V));
        NDArray left = whole.get(":, :7").duplicate();
        NDArray right = whole.get(":, 7:").duplicate();
        for (NDArray part : Arrays.asList(whole, left, right)) {
            int start = part == right ? 7 : 0;
            kernels.run(
                    "strip_gradient",
                    part,
                    none,
                    target,
                    start,
                    multiplier,
                    factor,
                    SMOOTHING,
                    V,
                    0.0);
        }
        assertArrayEquals(whole.toFloatArray(), left.concat(right, 1).toFloatArray());
        assertEquals(3 * p[0] - (1 - SMOOTHING) - SMOOTHING / V, whole.getFloat(0, 0), 1e-5);
        assertEquals(p[V + 2] + 2 * SMOOTHING / V, whole.getFloat(1, 2), 1e-5);
    }
}
