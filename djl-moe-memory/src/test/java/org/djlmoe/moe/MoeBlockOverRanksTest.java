package org.djlmoe.moe;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.function.UnaryOperator;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.Tape;
import org.djlmoe.parallel.InProcessGroup;
import org.djlmoe.parallel.ProcessGroup;
import org.djlmoe.parallel.ProcessGroupException;
import org.djlmoe.parallel.Ranks;
import org.djlmoe.parallel.SoloGroup;
import org.djlmoe.routing.MaskLogits;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** The layer over ranks beside the same layer in one process. A hang is a failure. */
@Timeout(120)
class MoeBlockOverRanksTest {

    private static final int HIDDEN = 6;
    private static final int INNER = 5;
    private static final int EXPERTS = 8;
    private static final double BOUND = 1e-5;

    private static MoeBlock.Builder builder() {
        return MoeBlock.builder()
                .setHiddenSize(HIDDEN)
                .setIntermediateSize(INNER)
                .setNumExperts(EXPERTS)
                .setTopK(2)
                .optInitializerRange(0.5)
                .optChunkTokens(4);
    }

    private static MoeBlock.Builder everything(MoeBlock.Builder builder) {
        return builder.optNorm(1e-5)
                .optResidual(true)
                .optSharedExperts(7, true)
                .optBalanceCoefficient(0.3)
                .optZCoefficient(0.2);
    }

    private static List<Parameter> parameters(MoeBlock block) {
        return List.copyOf(MoeLayers.parameters(block).values());
    }

    private static boolean isOfExperts(Parameter parameter) {
        return parameter.getName().startsWith("experts.");
    }

    /** Output, gradient of the input, and those of the parameters. */
    private record Pass(float[] y, float[] dx, List<float[]> gradients) {}

    private static Pass run(MoeBlock block, double[] x, double[] dy) {
        long tokens = x.length / HIDDEN;
        try (NDManager manager = NDManager.newBaseManager();
                Tape tape = new Tape(manager, 1, () -> {})) {
            parameters(block).forEach(p -> Gradients.zero(p.getArray()));
            NDArray in = array(manager, x, 1, tokens, HIDDEN);
            in.setRequiresGradient(true);
            NDArray y =
                    block.forward(new ParameterStore(manager, false), new NDList(in), true).head();
            tape.backward(y.mul(array(manager, dy, 1, tokens, HIDDEN)).sum());
            List<float[]> gradients = new ArrayList<>();
            for (Parameter p : parameters(block)) {
                gradients.add(values(Gradients.of(p)));
            }
            return new Pass(y.toFloatArray(), values(Gradients.of(in)), gradients);
        }
    }

    private static float[] values(NDArray array) {
        try (array) {
            return array.toFloatArray();
        }
    }

    /** A rank's block with the rank's part of the weights. */
    private static MoeBlock part(MoeBlock whole, MoeBlock.Builder builder, NDManager manager) {
        MoeBlock block = builder.build();
        block.initialize(manager, DataType.FLOAT32, new Shape(1, 2, HIDDEN));
        List<Parameter> from = parameters(whole);
        List<Parameter> to = parameters(block);
        try (GradMode off = GradMode.off()) {
            for (int i = 0; i < from.size(); i++) {
                float[] all = from.get(i).getArray().toFloatArray();
                NDArray target = to.get(i).getArray();
                if (isOfExperts(from.get(i))) {
                    int one = all.length / EXPERTS;
                    int first = block.dispatch().firstExpert() * one;
                    all = Arrays.copyOfRange(all, first, first + (int) target.size());
                }
                try (NDArray values = manager.create(all, target.getShape())) {
                    target.subi(target).addi(values);
                }
            }
        }
        return block;
    }

    @ParameterizedTest
    @CsvSource({"2, false", "4, false", "2, true", "4, true", "8, true"})
    void forwardAndBackward_overRanks_asInOneProcess(int ranks, boolean withEverything) {
        UnaryOperator<MoeBlock.Builder> settings =
                withEverything ? MoeBlockOverRanksTest::everything : b -> b;
        Random random = new Random(ranks);
        double[][] x = new double[ranks][];
        double[][] dy = new double[ranks][];
        for (int r = 0; r < ranks; r++) {
            int tokens = 9 + 3 * r;
            x[r] = random(random, tokens * HIDDEN, 1);
            dy[r] = random(random, tokens * HIDDEN, 1);
        }
        try (NDManager manager = NDManager.newBaseManager()) {
            manager.getEngine().setRandomSeed(5);
            MoeBlock whole = settings.apply(builder()).build();
            whole.initialize(manager, DataType.FLOAT32, new Shape(1, 2, HIDDEN));
            List<Pass> expected = new ArrayList<>();
            for (int r = 0; r < ranks; r++) {
                expected.add(run(whole, x[r], dy[r]));
            }
            List<Pass> got =
                    InProcessGroup.run(
                            ranks,
                            group -> {
                                try (NDManager own = NDManager.newBaseManager()) {
                                    MoeBlock block =
                                            part(
                                                    whole,
                                                    settings.apply(builder())
                                                            .optGroup(group, d -> d.optLambda(1)),
                                                    own);
                                    // The second step finds what the first one left.
                                    run(block, x[group.rank()], dy[group.rank()]);
                                    Pass pass = run(block, x[group.rank()], dy[group.rank()]);
                                    assertTrue(block.dispatch().metrics().peakBufferBytes() > 0);
                                    return pass;
                                }
                            });
            for (int r = 0; r < ranks; r++) {
                assertClose(doubles(expected.get(r).y()), got.get(r).y(), BOUND, "y");
                assertClose(doubles(expected.get(r).dx()), got.get(r).dx(), BOUND, "dx");
            }
            List<Parameter> parameters = parameters(whole);
            for (int i = 0; i < parameters.size(); i++) {
                assertGradients(parameters.get(i), i, expected, got);
            }
        }
    }

    /** Of experts, the sum over the ranks' tokens, on the rank that has them; else each its own. */
    private static void assertGradients(
            Parameter parameter, int index, List<Pass> expected, List<Pass> got) {
        if (!isOfExperts(parameter)) {
            for (int r = 0; r < got.size(); r++) {
                assertClose(
                        doubles(expected.get(r).gradients().get(index)),
                        got.get(r).gradients().get(index),
                        BOUND,
                        parameter.getName());
            }
            return;
        }
        double[] sum = new double[(int) parameter.getArray().size()];
        for (Pass pass : expected) {
            float[] gradient = pass.gradients().get(index);
            Arrays.setAll(sum, i -> sum[i] + gradient[i]);
        }
        float[] all = new float[sum.length];
        int at = 0;
        for (Pass pass : got) {
            float[] gradient = pass.gradients().get(index);
            System.arraycopy(gradient, 0, all, at, gradient.length);
            at += gradient.length;
        }
        assertEquals(all.length, at);
        assertClose(sum, all, BOUND, parameter.getName());
    }

    private static double[] doubles(float[] values) {
        double[] wide = new double[values.length];
        Arrays.setAll(wide, i -> values[i]);
        return wide;
    }

    /** Biases that followed a rank's own load would make other routers of them. */
    @Test
    void afterStep_balancing_everyRankMovesByTheLoadOfAll() {
        Random random = new Random(8);
        double[][] x = new double[2][];
        for (int r = 0; r < 2; r++) {
            x[r] = random(random, (5 + 20 * r) * HIDDEN, 1);
        }
        try (NDManager manager = NDManager.newBaseManager()) {
            manager.getEngine().setRandomSeed(6);
            MoeBlock whole = everything(builder().optBiasUpdateRate(0.125)).build();
            whole.initialize(manager, DataType.FLOAT32, new Shape(1, 2, HIDDEN));
            List<float[]> got =
                    InProcessGroup.run(
                            2,
                            group -> {
                                try (NDManager own = NDManager.newBaseManager()) {
                                    MoeBlock block =
                                            part(
                                                    whole,
                                                    everything(builder().optBiasUpdateRate(0.125))
                                                            .optGroup(group),
                                                    own);
                                    double[] mine = x[group.rank()];
                                    for (int step = 0; step < 3; step++) {
                                        run(block, mine, mine);
                                        block.afterStep();
                                    }
                                    return block.router().balanceBias().getArray().toFloatArray();
                                }
                            });
            for (int step = 0; step < 3; step++) {
                run(whole, x[0], x[0]);
                run(whole, x[1], x[1]);
                whole.afterStep();
            }
            float[] expected = whole.router().balanceBias().getArray().toFloatArray();
            assertArrayEquals(expected, got.get(0));
            assertArrayEquals(expected, got.get(1));
            assertFalse(Arrays.equals(new float[EXPERTS], expected), "no bias moved");
        }
    }

    @Test
    void forward_withoutTape_refusedUnlessGradientModeIsOff() {
        ProcessGroupException e =
                Ranks.failure(
                        2,
                        group -> {
                            forward(group, false);
                            forward(group, true);
                            return null;
                        });
        assertTrue(e.getCause().getMessage().contains("BoundedTrainer"), e.getCause()::toString);
    }

    private static void forward(ProcessGroup group, boolean recording) {
        try (NDManager manager = NDManager.newBaseManager()) {
            MoeBlock block = builder().optGroup(group).build();
            block.initialize(manager, DataType.FLOAT32, new Shape(1, 2, HIDDEN));
            NDArray x = manager.ones(new Shape(3, HIDDEN));
            try (GradMode mode = recording ? GradMode.on() : GradMode.off()) {
                NDArray y =
                        block.forward(new ParameterStore(manager, false), new NDList(x), false)
                                .head();
                assertEquals(x.getShape(), y.getShape());
            }
        }
    }

    /** Every rank refuses, before it exchanges anything: none waits for another. */
    @Test
    void forward_maskThatTrains_refusedUnlessDetached() {
        Random random = new Random(6);
        double[] x = random(random, 3 * HIDDEN, 1);
        double[] dy = random(random, 3 * HIDDEN, 1);
        List<String> refusals =
                InProcessGroup.run(
                        2,
                        group -> {
                            try (NDManager manager = NDManager.newBaseManager()) {
                                MoeBlock block = builder().optGroup(group).build();
                                MaskLogits mask = block.router().attachMask();
                                block.initialize(
                                        manager, DataType.FLOAT32, new Shape(1, 2, HIDDEN));
                                mask.setSlopes(new double[EXPERTS], 0);
                                IllegalStateException e =
                                        assertThrows(
                                                IllegalStateException.class,
                                                () -> run(block, x, dy));
                                block.router().detachMask();
                                assertEquals(x.length, run(block, x, dy).dx().length);
                                return e.getMessage();
                            }
                        });
        for (String message : refusals) {
            assertTrue(message.contains("Mask logits train in one process only"), message);
        }
    }

    @Test
    void optGroup_oneProcess_hasAllExpertsAndExchangesNothing() {
        try (SoloGroup solo = new SoloGroup();
                NDManager manager = NDManager.newBaseManager()) {
            MoeBlock block = builder().optGroup(solo).build();
            block.initialize(manager, DataType.FLOAT32, new Shape(1, 2, HIDDEN));
            assertNull(block.dispatch());
            assertEquals(EXPERTS, block.experts().gateUp().getArray().getShape().get(0));
        }
    }

    @Test
    void optGroup_severalRanks_ownsItsPart() {
        InProcessGroup.run(
                3,
                group -> {
                    MoeBlock block = builder().optGroup(group).build();
                    assertNotNull(block.dispatch());
                    assertEquals(EXPERTS, block.router().experts());
                    assertEquals(group.rank() < 2 ? 3 : 2, block.dispatch().ownExperts());
                    return null;
                });
    }
}
