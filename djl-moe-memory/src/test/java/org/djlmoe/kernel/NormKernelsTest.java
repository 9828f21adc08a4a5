package org.djlmoe.kernel;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.dirtyMemory;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;

import ai.djl.Device;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.GradientCollector;
import java.util.Random;
import org.djlmoe.reference.NaiveNorm;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class NormKernelsTest {

    private static final double BOUND = 1e-5;

    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    @ParameterizedTest
    @CsvSource({"0, 4, 1", "1, 2, 1", "1, 7, 1", "5, 8, 1", "33, 17, 100", "5, 8, 1e-4"})
    void rmsNorm_forwardAndBackward_equalTheReference(int tokens, int hidden, double scale) {
        Random random = new Random(tokens + hidden);
        double[] x = random(random, tokens * hidden, scale);
        double[] gamma = random(random, hidden, 1);
        double[] g = random(random, tokens * hidden, 1);
        NaiveNorm.Result expected = NaiveNorm.run(gamma, 1e-5, x, g);

        NDArray input = array(manager, x, tokens, hidden);
        NDArray weight = array(manager, gamma, hidden);
        NDArray upstream = array(manager, g, tokens, hidden);
        NDArray dgamma = manager.zeros(new Shape(hidden));
        dirtyMemory(manager);
        NDArray y = manager.full(input.getShape(), Float.NaN);
        NDArray dx = manager.full(input.getShape(), Float.NaN);
        NormKernels.rmsNorm(input, weight, 1e-5, y);
        NormKernels.rmsNormBackward(input, weight, 1e-5, upstream, dx, dgamma);
        assertClose(expected.y(), y, BOUND, "y");
        assertClose(expected.dx(), dx, BOUND, "dx");
        assertClose(expected.dgamma(), dgamma, BOUND, "dgamma");

        NDArray again = manager.full(input.getShape(), Float.NaN);
        NormKernels.rmsNormBackward(input, weight, 1e-5, upstream, again, TorchKernels.nothing());
        assertClose(expected.dx(), again, BOUND, "dx with a frozen weight");

        input.setRequiresGradient(true);
        weight.setRequiresGradient(true);
        try (GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            NDArray plain = NormKernels.rmsNormPlain(input, weight, 1e-5);
            assertClose(expected.y(), plain, BOUND, "plain y");
            collector.backward(plain.mul(upstream).sum());
        }
        assertClose(expected.dx(), input.getGradient(), BOUND, "plain dx");
        assertClose(expected.dgamma(), weight.getGradient(), BOUND, "plain dgamma");
    }

    /** More rows than a block, whose last one is not full, and rows that are a block each. */
    @ParameterizedTest
    @CsvSource({"701, 1024", "2, 300000"})
    void rmsNorm_severalBlocks_equalOneThroughAutograd(int tokens, int hidden) {
        manager.getEngine().setRandomSeed(tokens);
        NDArray x = manager.randomNormal(new Shape(tokens, hidden));
        NDArray gamma = manager.randomNormal(new Shape(hidden));
        NDArray g = manager.randomNormal(x.getShape());
        NDArray y = manager.full(x.getShape(), Float.NaN);
        NDArray dx = manager.full(x.getShape(), Float.NaN);
        NDArray dgamma = manager.zeros(new Shape(hidden));
        NormKernels.rmsNorm(x, gamma, 1e-5, y);
        NormKernels.rmsNormBackward(x, gamma, 1e-5, g, dx, dgamma);
        x.setRequiresGradient(true);
        gamma.setRequiresGradient(true);
        NDArray plain;
        try (GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            plain = NormKernels.rmsNormPlain(x, gamma, 1e-5);
            collector.backward(plain.mul(g).sum());
        }
        assertArrayEquals(plain.toFloatArray(), y.toFloatArray());
        assertArrayEquals(x.getGradient().toFloatArray(), dx.toFloatArray(), 1e-5f);
        assertArrayEquals(gamma.getGradient().toFloatArray(), dgamma.toFloatArray(), 1e-3f);
    }

    @Test
    void rmsNorm_rowOfZeros_zeroAndFiniteGradient() {
        NDArray x = manager.zeros(new Shape(1, 4));
        NDArray gamma = manager.ones(new Shape(4));
        NDArray y = manager.full(x.getShape(), Float.NaN);
        NDArray dx = manager.full(x.getShape(), Float.NaN);
        NormKernels.rmsNorm(x, gamma, 1e-4, y);
        NormKernels.rmsNormBackward(
                x, gamma, 1e-4, manager.ones(x.getShape()), dx, TorchKernels.nothing());
        assertArrayEquals(new float[4], y.toFloatArray());
        assertArrayEquals(new float[] {100, 100, 100, 100}, dx.toFloatArray(), 1e-3f);
    }

    @Test
    void embed_repeatedIds_gradientsAddUpAndOtherRowsStayZero() {
        NDArray table = manager.arange(12f).reshape(4, 3);
        NDArray ids = manager.create(new long[] {2, 0, 2, 2}, new Shape(2, 2));
        NDArray y = manager.full(new Shape(4, 3), Float.NaN);
        NormKernels.embed(ids, table, y);
        assertArrayEquals(new float[] {6, 7, 8, 0, 1, 2, 6, 7, 8, 6, 7, 8}, y.toFloatArray());

        NDArray g = manager.arange(1f, 13f, 1f).reshape(4, 3);
        NDArray gradient = manager.zeros(new Shape(4, 3));
        NormKernels.embedBackward(ids, g, gradient);
        float[] expected = {4, 5, 6, 0, 0, 0, 1 + 7 + 10, 2 + 8 + 11, 3 + 9 + 12, 0, 0, 0};
        assertArrayEquals(expected, gradient.toFloatArray());

        table.setRequiresGradient(true);
        try (GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            collector.backward(NormKernels.embedPlain(ids, table).mul(g).sum());
        }
        assertArrayEquals(expected, table.getGradient().toFloatArray());
    }
}
