package org.djlmoe.moe;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.dirtyMemory;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import java.util.Arrays;
import java.util.HashSet;
import java.util.Random;
import java.util.Set;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.reference.NaiveMoe;
import org.djlmoe.routing.MaskLogits;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.SelectionPrior;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

/** Gradients of masks that are learnt straight through, against double precision. */
class MaskGradientTest {

    private static final int HIDDEN = 6;
    private static final int TOKENS = 10;
    private static final int EXPERTS = 7;
    private static final double BOUND = 1e-5;
    private static final boolean[] KEPT = {true, false, true, true, false, true, true};

    private Model model;

    @BeforeEach
    void open() {
        model = Model.newInstance("moe", "PyTorch");
    }

    @AfterEach
    void close() {
        model.close();
    }

    /** One layer, its run and what a reference makes of it. */
    private final class Case implements AutoCloseable {

        final MoeBlock block;
        final Trainer trainer;
        final int tokens;
        final double[] x;
        final double[] dy;
        final boolean renormalize;
        final int topK;
        final NDArray input;

        Case(int topK, boolean renormalize, int chunkTokens, boolean bounded) {
            this(model, TOKENS, topK, renormalize, chunkTokens, bounded);
        }

        Case(
                Model model,
                int tokens,
                int topK,
                boolean renormalize,
                int chunkTokens,
                boolean bounded) {
            this.tokens = tokens;
            this.topK = topK;
            x = random(new Random(3), tokens * HIDDEN, 1);
            dy = random(new Random(4), tokens * HIDDEN, 1);
            for (int t = 0; t < tokens; t++) {
                x[t * HIDDEN] = 1 + t % 3;
            }
            this.renormalize = renormalize;
            block =
                    MoeBlock.builder()
                            .setHiddenSize(HIDDEN)
                            .setIntermediateSize(5)
                            .setNumExperts(EXPERTS)
                            .setTopK(topK)
                            .optNorm(1e-5)
                            .optResidual(true)
                            .optRenormalize(renormalize)
                            .optInitializerRange(0.6)
                            .optChunkTokens(chunkTokens)
                            .build();
            block.router().attachMask();
            trainer = MoeLayers.trainer(model, block, bounded, new Shape(tokens, HIDDEN));
            input = array(trainer.getManager(), x, tokens, HIDDEN);
            input.setRequiresGradient(true);
        }

        MaskLogits mask() {
            return block.router().mask();
        }

        float[] differentiate() {
            NDManager manager = trainer.getManager();
            NDArray upstream = array(manager, dy, tokens, HIDDEN);
            dirtyMemory(manager);
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDArray y = trainer.forward(new NDList(input)).singletonOrThrow();
                collector.backward(y.mul(upstream).sum());
                return y.toFloatArray();
            }
        }

        float[] maskGradient() {
            try (NDArray gradient = Gradients.of(mask().logits())) {
                return gradient == null ? null : gradient.toFloatArray();
            }
        }

        NaiveMoe.Masked reference(int excluded, boolean keptOnly) {
            NaiveMoe.Settings settings =
                    new NaiveMoe.Settings(HIDDEN, 5, EXPERTS, topK, 0, 1e-5, 0, true, renormalize);
            return NaiveMoe.run(
                    settings,
                    MoeLayers.numbers(block),
                    new NaiveMoe.Mask(KEPT, excluded, keptOnly),
                    x,
                    dy);
        }

        @Override
        public void close() {
            trainer.close();
        }
    }

    @ParameterizedTest
    @CsvSource({
        "2, true, 0, ALL, 1, true",
        "2, true, 0, ALL, 4, true",
        "2, false, 0, ALL, 4096, true",
        "2, false, 0, KEPT, 4, true",
        "2, true, 0, KEPT, 4, true",
        "2, true, 1, ALL, 4, true",
        "2, true, 2, ALL, 4096, true",
        "2, false, 1, ALL, 1, true",
        "2, false, 2, KEPT, 3, true",
        "3, true, 9, KEPT, 3, true",
        "1, false, 0, ALL, 4, true",
        "1, false, 1, ALL, 4, true",
        "1, true, 2, ALL, 4, true",
        "2, true, 0, ALL, 4096, false",
        "2, false, 0, ALL, 4096, false",
        "2, false, 0, KEPT, 4096, false",
    })
    void backward_underAMask_everyGradientEqualsTheReference(
            int topK,
            boolean renormalize,
            int excluded,
            MaskedWeights rule,
            int chunkTokens,
            boolean bounded) {
        try (Case c = new Case(topK, renormalize, chunkTokens, bounded)) {
            c.block.router().setPrior(KEPT, SelectionPrior.hardMask(), rule);
            double[] slopes = {0.5, 0.25, -1, 2, 3, 0, 1};
            c.mask().setSlopes(slopes, excluded);
            NaiveMoe.Masked expected = c.reference(excluded, rule == MaskedWeights.KEPT);
            assertClose(expected.result().y(), c.differentiate(), BOUND, "y");
            assertClose(expected.result().dx(), c.input.getGradient(), BOUND, "dx");
            MoeLayers.parameters(c.block)
                    .forEach(
                            (w, p) ->
                                    assertClose(
                                            expected.result().gradients().get(w),
                                            p.getArray().getGradient(),
                                            BOUND,
                                            "" + w));
            double[] theta = expected.factorGradients().clone();
            Arrays.setAll(theta, e -> theta[e] * slopes[e]);
            assertClose(theta, c.maskGradient(), 2 * BOUND, "theta");
            Set<Integer> ran = new HashSet<>();
            for (int[] ids : expected.result().ids()) {
                Arrays.stream(ids).forEach(ran::add);
            }
            for (int e = 0; e < EXPERTS; e++) {
                if (!ran.contains(e)) {
                    assertTrue(c.maskGradient()[e] == 0, "expert " + e);
                }
            }
            assertTrue(excluded == 0 || ran.contains(1) || ran.contains(4));
        }
    }

    /** Both dropped experts get all rows: three blocks of a chunk, or one of each smaller chunk. */
    @Test
    void backward_excludedExpertsInSeveralBlocks_asInOne() {
        double[] slopes = new double[EXPERTS];
        Arrays.fill(slopes, 1);
        double[][] gradients = new double[2][EXPERTS];
        int[] chunkTokens = {200, 4096};
        for (int i = 0; i < 2; i++) {
            model.getNDManager().getEngine().setRandomSeed(9);
            try (Model own = Model.newInstance("moe", "PyTorch");
                    Case c = new Case(own, 1100, 2, true, chunkTokens[i], true)) {
                c.block.router().setPrior(KEPT, SelectionPrior.hardMask());
                c.mask().setSlopes(slopes, 2);
                c.differentiate();
                float[] row = c.maskGradient();
                Arrays.setAll(gradients[i], e -> row[e]);
            }
        }
        assertTrue(gradients[0][1] != 0 && gradients[0][4] != 0);
        for (int e = 0; e < EXPERTS; e++) {
            double bound = BOUND * Math.max(1, Math.abs(gradients[0][e]));
            assertEquals(gradients[0][e], gradients[1][e], bound, "expert " + e);
        }
    }

    /** A factor that cancels: with one expert a token and weights divided by their sum. */
    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void backward_topOneRenormalized_isExactlyZeroForAll(boolean bounded) {
        try (Case c = new Case(1, true, 4, bounded)) {
            c.block.router().setPrior(KEPT, SelectionPrior.hardMask());
            double[] slopes = new double[EXPERTS];
            Arrays.fill(slopes, 100);
            c.mask().setSlopes(slopes, 0);
            c.differentiate();
            assertArrayEquals(new float[EXPERTS], c.maskGradient());
        }
    }

    /** Dropped experts, and kept ones that no token asks for. */
    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void backward_droppedAndUnselected_areExactlyZeroOthersAreNot(boolean renormalize) {
        try (Case c = new Case(2, renormalize, 4, true)) {
            NDArray router = c.block.router().weight().getArray();
            float[] rows = router.toFloatArray();
            c.block.router().setPrior(KEPT, SelectionPrior.hardMask());
            Set<Long> chosen = new HashSet<>();
            c.block
                    .router()
                    .setObserver(ids -> Arrays.stream(ids.toLongArray()).forEach(chosen::add));
            double[] ones = new double[EXPERTS];
            Arrays.fill(ones, 1);
            c.mask().setSlopes(ones, 0);
            // The first coordinate is positive everywhere: expert 6 is kept but never selected.
            rows[6 * HIDDEN] = -50;
            try (NDArray changed = c.trainer.getManager().create(rows, router.getShape())) {
                changed.copyTo(router);
            }
            c.differentiate();
            float[] gradient = c.maskGradient();
            for (int e = 0; e < EXPERTS; e++) {
                assertEquals(chosen.contains((long) e), gradient[e] != 0, "expert " + e);
            }
            assertTrue(chosen.size() > 2 && !chosen.contains(6L), "selected: " + chosen);
        }
    }

    @Test
    void backward_frozenOrWithoutSlopes_noGradientAndSameOutput() {
        try (Case c = new Case(2, true, 4, true)) {
            c.block.router().setPrior(KEPT, SelectionPrior.hardMask());
            float[] before = c.differentiate();
            assertNull(c.maskGradient());
            c.mask().setSlopes(new double[] {1, 1, 1, 1, 1, 1, 1}, 2);
            c.mask().logits().freeze(true);
            assertArrayEquals(before, c.differentiate());
            c.mask().logits().freeze(false);
            assertArrayEquals(before, c.differentiate());
            assertTrue(c.maskGradient()[1] != 0 || c.maskGradient()[4] != 0);
        }
    }

    @Test
    void forward_excludedExpertsWithoutATape_refused() {
        try (Case c = new Case(2, true, 4, false)) {
            c.block.router().setPrior(KEPT, SelectionPrior.hardMask());
            c.mask().setSlopes(new double[EXPERTS], 1);
            try (GradientCollector collector = c.trainer.newGradientCollector()) {
                IllegalStateException e =
                        assertThrows(
                                IllegalStateException.class,
                                () -> c.trainer.forward(new NDList(c.input)));
                assertTrue(e.getMessage().contains("BoundedTrainer"), e.getMessage());
            }
        }
    }

    /** The two rules are one where weights are divided by their sum. */
    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void forward_bothWeightRules_equalOnlyWhereRenormalized(boolean renormalize) {
        try (Case c = new Case(2, renormalize, 4, true)) {
            c.block.router().setPrior(KEPT, SelectionPrior.hardMask(), MaskedWeights.ALL);
            float[] all = c.differentiate();
            c.block.router().setPrior(KEPT, SelectionPrior.hardMask(), MaskedWeights.KEPT);
            float[] kept = c.differentiate();
            assertEquals(renormalize, Arrays.equals(all, kept));
        }
    }

    @Test
    void setPrior_keptWeightsUnderASoftPrior_refused() {
        try (Case c = new Case(2, false, 4, true)) {
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () ->
                                    c.block
                                            .router()
                                            .setPrior(
                                                    KEPT,
                                                    SelectionPrior.additive(2),
                                                    MaskedWeights.KEPT));
            assertTrue(e.getMessage().contains("hard mask"), e.getMessage());
            assertThrows(IllegalStateException.class, () -> c.block.router().attachMask());
            assertThrows(
                    IllegalArgumentException.class, () -> c.mask().setSlopes(new double[3], 0));
            assertThrows(
                    IllegalArgumentException.class,
                    () -> c.mask().setSlopes(new double[EXPERTS], -1));
            assertEquals(DataType.FLOAT32, c.mask().logits().getArray().getDataType());
        }
    }
}
