package org.djlmoe.examples.bench;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.index.NDIndex;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.nio.file.Path;
import java.util.Map;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class TensorFileTest {

    @TempDir private Path folder;
    private NDManager manager;

    @BeforeEach
    void open() {
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    }

    @AfterEach
    void close() {
        manager.close();
    }

    private double error(NDArray actual, NDArray expected) throws IOException {
        TensorFile.write(Map.of("x", actual), folder.resolve("a"));
        TensorFile.write(Map.of("x", expected), folder.resolve("b"));
        return TensorFile.errors(folder.resolve("a"), folder.resolve("b")).get("x");
    }

    @Test
    void errors_singleAgainstDouble_isTheRelativeDistance() throws IOException {
        NDArray expected = manager.create(new double[] {3, 4});
        assertEquals(0.2, error(manager.create(new float[] {3, 5}), expected), 1e-12);
        assertEquals(0, error(manager.create(new float[] {3, 4}), expected));
    }

    @Test
    void errors_beyondOnePiece_countsTheLastNumber() throws IOException {
        Shape shape = new Shape(2, 70_001);
        NDArray expected = manager.zeros(shape, DataType.FLOAT64);
        expected.set(new NDIndex(0, 0), 1);
        NDArray actual = expected.toType(DataType.FLOAT32, true);
        actual.set(new NDIndex(1, 70_000), 0.5f);
        assertEquals(0.5, error(actual, expected), 1e-12);
    }

    @Test
    void errors_nanOrNothingToCompareWith_doNotLookFine() throws IOException {
        NDArray zeros = manager.zeros(new Shape(2));
        assertEquals(0, error(zeros, zeros));
        assertEquals(Double.POSITIVE_INFINITY, error(zeros.add(1), zeros));
        assertEquals(Double.NaN, error(manager.create(new float[] {Float.NaN, 1}), zeros.add(1)));
    }

    @Test
    void errors_otherTensors_areRefused() throws IOException {
        TensorFile.write(Map.of("x", manager.ones(new Shape(2))), folder.resolve("a"));
        TensorFile.write(Map.of("y", manager.ones(new Shape(2))), folder.resolve("b"));
        TensorFile.write(Map.of("x", manager.ones(new Shape(3))), folder.resolve("c"));
        for (String other : new String[] {"b", "c"}) {
            String message =
                    assertThrows(
                                    IllegalArgumentException.class,
                                    () ->
                                            TensorFile.errors(
                                                    folder.resolve("a"), folder.resolve(other)))
                            .getMessage();
            assertTrue(message.contains("x"), message);
        }
    }
}
