package org.djlmoe.reference;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/**
 * Reverse-mode differentiation of single numbers in double precision.
 *
 * <p>A reference written on it states only what is computed; its gradients follow from the
 * derivatives of the few operations below, and share nothing with the ones derived by hand for the
 * kernels.
 */
final class Graph {

    /** A number that remembers which numbers it came from, and its derivative by each. */
    static final class Value {

        final double number;
        double gradient;
        private final Value[] from;
        private final double[] slopes;

        private Value(double number, Value[] from, double[] slopes) {
            this.number = number;
            this.from = from;
            this.slopes = slopes;
        }
    }

    private final List<Value> inOrder = new ArrayList<>();

    private Value node(double number, Value[] from, double... slopes) {
        Value value = new Value(number, from, slopes);
        inOrder.add(value);
        return value;
    }

    /** Numbers that come from nowhere. */
    Value[] leaves(double[] numbers) {
        return Arrays.stream(numbers)
                .mapToObj(x -> new Value(x, new Value[0], new double[0]))
                .toArray(Value[]::new);
    }

    Value dot(Value[] a, Value[] b) {
        int n = a.length;
        Value[] from = new Value[2 * n];
        double[] slopes = new double[2 * n];
        double sum = 0;
        for (int i = 0; i < n; i++) {
            sum += a[i].number * b[i].number;
            from[i] = a[i];
            slopes[i] = b[i].number;
            from[n + i] = b[i];
            slopes[n + i] = a[i].number;
        }
        return node(sum, from, slopes);
    }

    /** The sum of factor_i * a_i. */
    Value sum(double[] factors, Value... a) {
        double sum = 0;
        for (int i = 0; i < a.length; i++) {
            sum += factors[i] * a[i].number;
        }
        return node(sum, a, factors);
    }

    Value add(Value a, Value b) {
        return sum(new double[] {1, 1}, a, b);
    }

    Value times(Value a, Value b) {
        return node(a.number * b.number, new Value[] {a, b}, b.number, a.number);
    }

    Value divide(Value a, Value b) {
        double quotient = a.number / b.number;
        return node(quotient, new Value[] {a, b}, 1 / b.number, -quotient / b.number);
    }

    Value exp(Value a) {
        double e = Math.exp(a.number);
        return node(e, new Value[] {a}, e);
    }

    Value log(Value a) {
        return node(Math.log(a.number), new Value[] {a}, 1 / a.number);
    }

    /** 1 / (1 + e^-a). */
    Value sigmoid(Value a) {
        return divide(ONE, add(ONE, exp(sum(new double[] {-1}, a))));
    }

    /** (a + shift)^-1/2. */
    Value inverseRoot(Value a, double shift) {
        double y = 1 / Math.sqrt(a.number + shift);
        return node(y, new Value[] {a}, -0.5 * y * y * y);
    }

    /** a * sigmoid(a). */
    Value silu(Value a) {
        double s = 1 / (1 + Math.exp(-a.number));
        return node(a.number * s, new Value[] {a}, s * (1 + a.number * (1 - s)));
    }

    /** W x, W given row after row. */
    Value[] multiply(Value[] w, Value[] x) {
        Value[] y = new Value[w.length / x.length];
        for (int i = 0; i < y.length; i++) {
            y[i] = dot(row(w, i, x.length), x);
        }
        return y;
    }

    Value[] add(Value[] a, Value[] b) {
        Value[] y = new Value[a.length];
        Arrays.setAll(y, i -> add(a[i], b[i]));
        return y;
    }

    Value[] softmax(Value[] z) {
        // the same factor above and below, and so no part of the derivative
        double max = Arrays.stream(z).mapToDouble(v -> v.number).max().orElseThrow();
        Value[] e = new Value[z.length];
        Arrays.setAll(e, i -> exp(sum(new double[] {1, -max}, z[i], ONE)));
        return normalize(e);
    }

    Value logSumExp(Value[] z) {
        double max = Arrays.stream(z).mapToDouble(v -> v.number).max().orElseThrow();
        double[] ones = new double[z.length];
        Arrays.fill(ones, 1);
        Value[] e = new Value[z.length];
        Arrays.setAll(e, i -> exp(sum(new double[] {1, -max}, z[i], ONE)));
        return sum(new double[] {1, max}, log(sum(ones, e)), ONE);
    }

    /** Every number divided by the sum of all. */
    Value[] normalize(Value[] a) {
        double[] ones = new double[a.length];
        Arrays.fill(ones, 1);
        Value total = sum(ones, a);
        Value[] y = new Value[a.length];
        Arrays.setAll(y, i -> divide(a[i], total));
        return y;
    }

    /** x / sqrt(mean(x^2) + eps) * gamma, or x if gamma is null. */
    Value[] rmsNorm(Value[] x, Value[] gamma, double eps) {
        if (gamma == null) {
            return x;
        }
        Value meanSquare = sum(new double[] {1.0 / x.length}, dot(x, x));
        Value scale = inverseRoot(meanSquare, eps);
        Value[] y = new Value[x.length];
        Arrays.setAll(y, i -> times(times(x[i], scale), gamma[i]));
        return y;
    }

    private static final Value ONE = new Value(1, new Value[0], new double[0]);

    /** Gradients of sum(seed_i * of_i), added to every number that it came from. */
    void backward(Value[] of, double[] seeds) {
        for (int i = 0; i < of.length; i++) {
            of[i].gradient += seeds[i];
        }
        for (int i = inOrder.size() - 1; i >= 0; i--) {
            Value value = inOrder.get(i);
            for (int j = 0; j < value.from.length; j++) {
                value.from[j].gradient += value.gradient * value.slopes[j];
            }
        }
    }

    /** Row i of a matrix given row after row. */
    static Value[] row(Value[] matrix, int i, int width) {
        return Arrays.copyOfRange(matrix, i * width, (i + 1) * width);
    }

    static double[] numbers(Value[] values) {
        return Arrays.stream(values).mapToDouble(v -> v.number).toArray();
    }

    static double[] gradients(Value[] values) {
        return Arrays.stream(values).mapToDouble(v -> v.gradient).toArray();
    }
}
