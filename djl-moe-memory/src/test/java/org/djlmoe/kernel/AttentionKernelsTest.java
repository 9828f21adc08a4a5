package org.djlmoe.kernel;

import static org.djlmoe.reference.Numbers.array;
import static org.djlmoe.reference.Numbers.assertClose;
import static org.djlmoe.reference.Numbers.dirtyMemory;
import static org.djlmoe.reference.Numbers.inner;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.training.GradientCollector;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import org.djlmoe.reference.NaiveAttention;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class AttentionKernelsTest {

    private static final double BOUND = 1e-5;
    private static final String[] NAMES = {"norm", "q", "k", "v", "o"};

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
    @CsvSource({
        // batch, sequence, heads, kvHeads, headDim, window
        "1, 1, 2, 2, 4, 0",
        "3, 1, 4, 2, 4, 0",
        "1, 7, 2, 2, 4, 0",
        "2, 7, 4, 2, 4, 0",
        "2, 5, 4, 1, 2, 0",
        "2, 5, 4, 4, 2, 0",
        "2, 5, 4, 2, 2, 3",
        "1, 5, 1, 1, 2, 0",
        "3, 13, 2, 1, 6, 0",
        "2, 5, 4, 2, 4, 8", // window wider than the sequence
        "2, 8, 4, 2, 4, 8", // and as wide
        "2, 8, 4, 2, 4, 4", // two windows
        "2, 11, 4, 2, 4, 4", // the last one is not full
        "1, 9, 4, 4, 4, 8", // the last one has one token
        "2, 6, 2, 1, 4, 1", // sees itself alone
        "1, 40, 2, 1, 8, 3"
    })
    void forwardAndBackward_shapes_equalTheReference(
            int batch, int sequence, int heads, int kvHeads, int headDim, int window) {
        NaiveAttention.Settings naive =
                new NaiveAttention.Settings(6, sequence, heads, kvHeads, headDim, window, 50, 1e-5);
        AttentionKernels.Settings settings =
                new AttentionKernels.Settings(heads, kvHeads, headDim, window, 50, 1e-5);
        Random random = new Random(31L * sequence + window);
        List<double[]> numbers = new ArrayList<>();
        for (int size : NaiveAttention.sizes(naive)) {
            numbers.add(random(random, size, 0.6));
        }
        int rows = batch * sequence;
        double[] input = random(random, rows * 6, 1);
        double[] upstream = random(random, rows * 6, 1);
        NaiveAttention.Result expected = NaiveAttention.run(naive, numbers, input, upstream);

        NDArray x = array(manager, input, rows, 6);
        NDArray g = array(manager, upstream, rows, 6);
        List<NDArray> weights = weights(numbers, naive);
        dirtyMemory(manager);
        NDArray y = manager.full(x.getShape(), Float.NaN);
        AttentionKernels.forward(x, sequence, weights, settings, y);
        assertClose(expected.y(), y, BOUND, "y");

        dirtyMemory(manager);
        List<NDArray> gradients = zeros(weights);
        NDArray dx = manager.full(x.getShape(), Float.NaN);
        AttentionKernels.backward(x, sequence, g, weights, gradients, settings, dx);
        assertGradients(expected, dx, gradients);

        List<NDArray> generic = zeros(weights);
        NDArray genericDx = manager.full(x.getShape(), Float.NaN);
        AttentionKernels.backwardGeneric(x, sequence, g, weights, generic, settings, genericDx);
        assertGradients(expected, genericDx, generic);

        List<NDArray> frozen =
                List.of(
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        TorchKernels.nothing());
        NDArray frozenDx = manager.full(x.getShape(), Float.NaN);
        AttentionKernels.backward(x, sequence, g, weights, frozen, settings, frozenDx);
        assertClose(expected.dx(), frozenDx, BOUND, "dx with frozen weights");

        x.setRequiresGradient(true);
        weights.forEach(w -> w.setRequiresGradient(true));
        try (GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            NDArray plain = AttentionKernels.plain(x, sequence, weights, settings);
            assertClose(expected.y(), plain, BOUND, "plain y");
            collector.backward(plain.mul(g).sum());
        }
        List<NDArray> recorded = new ArrayList<>();
        weights.forEach(w -> recorded.add(w.getGradient()));
        assertGradients(expected, x.getGradient(), recorded);
    }

    @ParameterizedTest
    @ValueSource(booleans = {false, true})
    void backward_gradientsThatHoldSomething_addedTo(boolean generic) {
        NaiveAttention.Settings naive = new NaiveAttention.Settings(6, 5, 2, 1, 4, 3, 50, 1e-5);
        AttentionKernels.Settings settings = new AttentionKernels.Settings(2, 1, 4, 3, 50, 1e-5);
        Random random = new Random(4);
        List<double[]> numbers = new ArrayList<>();
        for (int size : NaiveAttention.sizes(naive)) {
            numbers.add(random(random, size, 0.6));
        }
        double[] input = random(random, 30, 1);
        double[] upstream = random(random, 30, 1);
        NDArray x = array(manager, input, 5, 6);
        NDArray g = array(manager, upstream, 5, 6);
        List<NDArray> weights = weights(numbers, naive);
        List<NDArray> gradients = zeros(weights);
        NDArray dx = manager.full(x.getShape(), Float.NaN);
        for (int i = 0; i < 2; i++) {
            if (generic) {
                AttentionKernels.backwardGeneric(x, 5, g, weights, gradients, settings, dx);
            } else {
                AttentionKernels.backward(x, 5, g, weights, gradients, settings, dx);
            }
        }
        gradients.forEach(gradient -> gradient.divi(2));
        assertGradients(NaiveAttention.run(naive, numbers, input, upstream), dx, gradients);
    }

    private List<NDArray> weights(List<double[]> numbers, NaiveAttention.Settings settings) {
        int queries = settings.heads() * settings.headDim();
        List<NDArray> weights = new ArrayList<>();
        for (int i = 0; i < numbers.size(); i++) {
            double[] w = numbers.get(i);
            long[] shape =
                    i == 0
                            ? new long[] {w.length}
                            : i == 4
                                    ? new long[] {settings.hidden(), queries}
                                    : new long[] {w.length / settings.hidden(), settings.hidden()};
            weights.add(array(manager, w, shape));
        }
        return weights;
    }

    private List<NDArray> zeros(List<NDArray> weights) {
        List<NDArray> zeros = new ArrayList<>();
        weights.forEach(w -> zeros.add(manager.zeros(w.getShape())));
        return zeros;
    }

    private static void assertGradients(
            NaiveAttention.Result expected, NDArray dx, List<NDArray> gradients) {
        assertClose(expected.dx(), dx, BOUND, "dx");
        for (int i = 0; i < gradients.size(); i++) {
            // Where a token sees itself alone, scores have no influence: zero but for rounding.
            double norm = inner(expected.gradients().get(i), expected.gradients().get(i));
            if (norm > 1e-20) {
                assertClose(expected.gradients().get(i), gradients.get(i), BOUND, NAMES[i]);
            } else {
                float largest = gradients.get(i).abs().max().getFloat();
                assertTrue(largest < 1e-5, NAMES[i] + largest);
            }
        }
    }
}
