package org.djlmoe.reference;

import static org.djlmoe.reference.Numbers.inner;
import static org.djlmoe.reference.Numbers.random;
import static org.junit.jupiter.api.Assertions.assertEquals;

import java.util.ArrayList;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.function.DoubleSupplier;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The references themselves, against finite differences. */
class ReferenceTest {

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void naiveMoe_everyInputAndWeight_finiteDifferences(boolean renormalize) {
        NaiveMoe.Settings settings =
                new NaiveMoe.Settings(4, 3, 4, 2, 2, 1e-3, 1.5, true, renormalize);
        Random random = new Random(1);
        Map<Weights, double[]> weights = new EnumMap<>(Weights.class);
        for (Weights w : Weights.values()) {
            weights.put(w, random(random, settings.size(w), 0.7));
        }
        double[] x = random(random, 3 * 4, 1);
        double[] dy = random(random, 3 * 4, 1);
        NaiveMoe.Result at = NaiveMoe.run(settings, weights, NaiveMoe.topK(2), x, dy);

        DoubleSupplier loss =
                () -> inner(NaiveMoe.run(settings, weights, NaiveMoe.topK(2), x, dy).y(), dy);
        assertDerivative(at.dx(), x, loss, "x");
        weights.forEach(
                (name, w) -> assertDerivative(at.gradients().get(name), w, loss, "" + name));
    }

    @ParameterizedTest
    @ValueSource(ints = {0, 2})
    void naiveAttention_everyInputAndWeight_finiteDifferences(int window) {
        NaiveAttention.Settings settings =
                new NaiveAttention.Settings(4, 4, 4, 2, 4, window, 100, 1e-3);
        Random random = new Random(2);
        List<double[]> weights = new ArrayList<>();
        for (int size : NaiveAttention.sizes(settings)) {
            weights.add(random(random, size, 0.7));
        }
        double[] x = random(random, 2 * 4 * 4, 1);
        double[] dy = random(random, 2 * 4 * 4, 1);
        NaiveAttention.Result at = NaiveAttention.run(settings, weights, x, dy);

        DoubleSupplier loss = () -> inner(NaiveAttention.run(settings, weights, x, dy).y(), dy);
        assertDerivative(at.dx(), x, loss, "x");
        for (int i = 0; i < weights.size(); i++) {
            assertDerivative(at.gradients().get(i), weights.get(i), loss, "weight " + i);
        }
    }

    private static void assertDerivative(
            double[] gradient, double[] variable, DoubleSupplier loss, String name) {
        for (int i = 0; i < variable.length; i++) {
            double at = variable[i];
            double step = 1e-5;
            variable[i] = at + step;
            double above = loss.getAsDouble();
            variable[i] = at - step;
            double below = loss.getAsDouble();
            variable[i] = at;
            double slope = (above - below) / (2 * step);
            assertEquals(slope, gradient[i], 1e-7 * Math.max(1, Math.abs(slope)), name + " " + i);
        }
    }
}
