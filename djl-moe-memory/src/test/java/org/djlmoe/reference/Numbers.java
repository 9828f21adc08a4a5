package org.djlmoe.reference;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.util.Arrays;
import java.util.Random;

/** Between double precision references and F32 arrays. */
public final class Numbers {

    private Numbers() {}

    /** Normal numbers that F32 holds exactly, so that no error comes from the inputs. */
    public static double[] random(Random random, int n, double deviation) {
        double[] numbers = new double[n];
        Arrays.setAll(numbers, i -> (float) (random.nextGaussian() * deviation));
        return numbers;
    }

    /** An F32 array. */
    public static NDArray array(NDManager manager, double[] numbers, long... shape) {
        return manager.create(floats(numbers), new Shape(shape));
    }

    /** The numbers in F32. */
    public static float[] floats(double[] numbers) {
        float[] floats = new float[numbers.length];
        for (int i = 0; i < floats.length; i++) {
            floats[i] = (float) numbers[i];
        }
        return floats;
    }

    /** The sum of a * b. */
    public static double inner(double[] a, double[] b) {
        double sum = 0;
        for (int i = 0; i < a.length; i++) {
            sum += a[i] * b[i];
        }
        return sum;
    }

    /** ||a - b|| / ||b|| at most bound; where b is zero, a is exactly zero. */
    public static void assertClose(double[] b, NDArray a, double bound, String name) {
        assertClose(b, a.toFloatArray(), bound, name);
    }

    /** ||a - b|| / ||b|| at most bound; where b is zero, a is exactly zero. */
    public static void assertClose(double[] b, float[] a, double bound, String name) {
        assertEquals(b.length, a.length, name);
        double difference = 0;
        double norm = 0;
        for (int i = 0; i < a.length; i++) {
            difference += (a[i] - b[i]) * (a[i] - b[i]);
            norm += b[i] * b[i];
        }
        if (norm == 0) {
            assertTrue(difference == 0, name + " should be exactly zero, has norm " + difference);
        } else {
            double error = Math.sqrt(difference / norm);
            assertTrue(error <= bound, name + ": relative error " + error + " > " + bound);
        }
    }

    /** As above, for two arrays. */
    public static void assertClose(float[] b, float[] a, double bound, String name) {
        double[] expected = new double[b.length];
        Arrays.setAll(expected, i -> b[i]);
        assertClose(expected, a, bound, name);
    }

    /**
     * Leaves NaN in memory that the next allocations get: a kernel that reads what it has not
     * written is right on fresh, zeroed memory and wrong from the second step on.
     */
    public static void dirtyMemory(NDManager manager) {
        try (NDManager scratch = manager.newSubManager()) {
            for (int size = 1; size <= 4096; size *= 2) {
                for (int copies = 0; copies < 24; copies++) {
                    scratch.full(new Shape(size), Float.NaN);
                }
            }
        }
    }
}
