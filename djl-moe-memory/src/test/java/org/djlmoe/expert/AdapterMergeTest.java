package org.djlmoe.expert;

import static org.djlmoe.reference.Numbers.assertClose;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import java.io.ByteArrayOutputStream;
import java.io.DataOutputStream;
import java.util.Arrays;
import java.util.Random;
import org.djlmoe.io.HalfFloats;
import org.djlmoe.kernel.HalfArrays;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** Merging adapters into F32 and BF16 weights; the number of experts is not the rank. */
class AdapterMergeTest {

    private static final int EXPERTS = 5;
    private static final int HIDDEN = 8;
    private static final int INNER = 4;
    private static final int RANK = 3;
    private static final double ALPHA = 5;

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private Experts experts(boolean half) {
        Experts experts = new Experts(EXPERTS, HIDDEN, INNER, 0.3);
        experts.initialize(manager, DataType.FLOAT32, new Shape(-1, HIDDEN));
        fill(experts.gateUp(), 1, 0.3);
        fill(experts.down(), 2, 0.3);
        if (half) {
            experts.narrowWeights(manager);
        }
        return experts;
    }

    private LoraExperts attach(Experts experts, double deviationOfB) {
        LoraExperts lora = experts.attachAdapters(RANK, ALPHA);
        lora.initialize(manager, DataType.FLOAT32, new Shape(1));
        for (int i = 0; i < 4; i++) {
            fill(lora.weights().get(i), 10 + i, i % 2 == 0 ? 0.5 : deviationOfB);
        }
        return lora;
    }

    private void fill(Parameter parameter, int seed, double deviation) {
        Random random = new Random(seed);
        float[] values = new float[(int) parameter.getShape().size()];
        for (int i = 0; i < values.length; i++) {
            values[i] = (float) (deviation * random.nextGaussian());
        }
        HalfArrays.copy(parameter.getArray(), manager.create(values, parameter.getShape()));
    }

    private float[] wide(Parameter parameter) {
        NDArray array = parameter.getArray();
        return (HalfArrays.isHalf(array) ? HalfArrays.widen(manager, array) : array).toFloatArray();
    }

    private float[] output(Experts experts) {
        float[] rows = new float[6 * HIDDEN];
        Random random = new Random(7);
        for (int i = 0; i < rows.length; i++) {
            rows[i] = (float) random.nextGaussian();
        }
        long[] ids = {0, 3, 4, 1, 2, 0, 3, 4, 1, 2, 0, 1};
        float[] weights = new float[ids.length];
        Arrays.fill(weights, 0.5f);
        return experts.forward(
                        new ParameterStore(manager, false),
                        new NDList(
                                manager.create(rows, new Shape(6, HIDDEN)),
                                manager.create(ids, new Shape(6, 2)),
                                manager.create(weights, new Shape(6, 2))),
                        false)
                .singletonOrThrow()
                .toFloatArray();
    }

    /** W + (alpha / r) B A in double precision. */
    private double[] sum(float[] w, Parameter a, Parameter b) {
        float[] av = a.getArray().toFloatArray();
        float[] bv = b.getArray().toFloatArray();
        int in = (int) a.getShape().get(2);
        int out = (int) b.getShape().get(1);
        double[] sum = new double[w.length];
        for (int e = 0; e < EXPERTS; e++) {
            for (int o = 0; o < out; o++) {
                for (int i = 0; i < in; i++) {
                    double product = 0;
                    for (int j = 0; j < RANK; j++) {
                        product +=
                                (double) bv[(e * out + o) * RANK + j] * av[(e * RANK + j) * in + i];
                    }
                    int at = (e * out + o) * in + i;
                    sum[at] = w[at] + ALPHA / RANK * product;
                }
            }
        }
        return sum;
    }

    @Test
    void mergeAdapters_f32_isTheSumAndTheUnmergedOutput() {
        Experts experts = experts(false);
        LoraExperts lora = attach(experts, 0.4);
        double[] gateUp = sum(wide(experts.gateUp()), lora.weights().get(0), lora.weights().get(1));
        double[] down = sum(wide(experts.down()), lora.weights().get(2), lora.weights().get(3));
        float[] base = wide(experts.gateUp());
        float[] unmerged = output(experts);
        assertEquals(gateUp.length + down.length, experts.mergeAdapters());
        assertNull(experts.adapters());
        assertFalse(Arrays.equals(base, wide(experts.gateUp())));
        assertClose(gateUp, wide(experts.gateUp()), 1e-6, "gate_up");
        assertClose(down, wide(experts.down()), 1e-6, "down");
        double[] expected = new double[unmerged.length];
        Arrays.setAll(expected, i -> unmerged[i]);
        assertClose(expected, output(experts), 1e-5, "output");
    }

    /** A sum in BF16 would round the product, then the sum. */
    @Test
    void mergeAdapters_bf16_roundsTheF32SumOnce() {
        Experts experts = experts(true);
        LoraExperts lora = attach(experts, 0.4);
        double[] exact = sum(wide(experts.gateUp()), lora.weights().get(0), lora.weights().get(1));
        experts.mergeAdapters();
        assertTrue(experts.hasHalfWeights());
        float[] merged = wide(experts.gateUp());
        for (int i = 0; i < exact.length; i++) {
            float once = HalfFloats.bf16ToFloat(HalfFloats.floatToBf16((float) exact[i]));
            // F32's own rounding may fall on the other side of a tie.
            double slack = 1e-6 * Math.abs(exact[i]);
            boolean onTheEdge =
                    HalfFloats.floatToBf16((float) (exact[i] - slack))
                            != HalfFloats.floatToBf16((float) (exact[i] + slack));
            assertTrue(once == merged[i] || onTheEdge, i + ": " + once + " " + merged[i]);
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void mergeForNow_undoneAndMergedAgain_theSameBits(boolean half) {
        Experts experts = experts(half);
        LoraExperts lora = attach(experts, 0.4);
        float[] gateUp = wide(experts.gateUp());
        float[] down = wide(experts.down());
        float[] unmerged = output(experts);
        float[] merged;
        MergedAdapters first = experts.mergeAdaptersForNow();
        assertNull(experts.adapters());
        assertTrue(first.changed() > 0);
        merged = output(experts);
        assertFalse(Arrays.equals(gateUp, wide(experts.gateUp())));
        first.close();
        first.close();
        assertSame(lora, experts.adapters());
        assertEquals(half, experts.hasHalfWeights());
        assertArrayEquals(gateUp, wide(experts.gateUp()));
        assertArrayEquals(down, wide(experts.down()));
        assertArrayEquals(unmerged, output(experts));
        try (MergedAdapters second = experts.mergeAdaptersForNow()) {
            assertEquals(first.changed(), second.changed());
            assertArrayEquals(merged, output(experts));
        }
        experts.mergeAdapters();
        assertArrayEquals(merged, output(experts));
    }

    @Test
    void mergeForNow_otherAdaptersOrOtherTypeInBetween_errorThatSaysSo() {
        Experts experts = experts(false);
        attach(experts, 0.4);
        MergedAdapters merged = experts.mergeAdaptersForNow();
        experts.attachAdapters(1, 1);
        assertThrows(IllegalStateException.class, merged::close);
        experts.detachAdapters();
        experts.narrowWeights(manager);
        IllegalStateException e = assertThrows(IllegalStateException.class, merged::close);
        assertTrue(e.getMessage().contains("type"), e.getMessage());
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void adapters_bIsZero_outputsBitEqualAndMergeChangesNothing(boolean half) {
        Experts experts = experts(half);
        float[] plain = output(experts);
        attach(experts, 0);
        assertArrayEquals(plain, output(experts));
        assertEquals(0, experts.mergeAdapters());
        assertArrayEquals(plain, output(experts));
    }

    @Test
    void merge_adapterWithNan_errorNamesItAndNothingChanges() {
        Experts experts = experts(false);
        LoraExperts lora = attach(experts, 0.4);
        float[] gateUp = wide(experts.gateUp());
        float[] values = wide(lora.weights().get(3));
        values[5] = Float.NaN;
        HalfArrays.copy(
                lora.weights().get(3).getArray(),
                manager.create(values, lora.weights().get(3).getShape()));
        for (int way = 0; way < 2; way++) {
            IllegalStateException e =
                    assertThrows(
                            IllegalStateException.class,
                            way == 0 ? experts::mergeAdapters : experts::mergeAdaptersForNow);
            assertTrue(e.getMessage().contains("down_proj.lora_B"), e.getMessage());
            assertSame(lora, experts.adapters());
            assertArrayEquals(gateUp, wide(experts.gateUp()));
        }
    }

    @Test
    void merge_sumOverflows_errorNamesTheWeightAndForNowIsUndone() {
        Experts experts = experts(false);
        LoraExperts lora = attach(experts, 0.4);
        fill(lora.weights().get(0), 3, 1e25);
        fill(lora.weights().get(1), 3, 1e25);
        float[] gateUp = wide(experts.gateUp());
        assertThrows(IllegalStateException.class, experts::mergeAdaptersForNow);
        assertSame(lora, experts.adapters());
        assertArrayEquals(gateUp, wide(experts.gateUp()));
        IllegalStateException e = assertThrows(IllegalStateException.class, experts::mergeAdapters);
        assertTrue(e.getMessage().contains("experts.gate_up_proj"), e.getMessage());
    }

    @Test
    void narrowAndWiden_weightsOfBf16_areTheSameAndFrozen() throws Exception {
        Experts experts = experts(true);
        float[] rounded = wide(experts.gateUp());
        experts.narrowWeights(manager);
        experts.widenWeights(manager);
        assertFalse(experts.hasHalfWeights());
        assertFalse(experts.gateUp().requiresGradient());
        assertArrayEquals(rounded, wide(experts.gateUp()));
        experts.saveParameters(new DataOutputStream(new ByteArrayOutputStream()));
        experts.narrowWeights(manager);
        assertThrows(
                IllegalStateException.class,
                () -> experts.saveParameters(new DataOutputStream(new ByteArrayOutputStream())));
    }
}
