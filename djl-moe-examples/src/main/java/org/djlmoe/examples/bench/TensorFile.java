package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.DataType;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;

/** Results of a case in a file, and their comparison piece by piece. */
final class TensorFile {

    private static final int PIECE = 1 << 16;

    private TensorFile() {}

    static void write(Map<String, NDArray> arrays, Path file) throws IOException {
        SafetensorsWriter.Builder plan = SafetensorsWriter.builder();
        arrays.forEach(
                (name, array) ->
                        plan.addTensor(
                                name,
                                array.getDataType() == DataType.FLOAT64 ? DType.F64 : DType.F32,
                                array.getShape().getShape()));
        try (SafetensorsWriter writer = plan.build(file)) {
            for (Map.Entry<String, NDArray> entry : arrays.entrySet()) {
                writer.writeBytes(entry.getKey(), entry.getValue().toByteBuffer());
            }
            writer.commit();
        }
    }

    /**
     * Computes relative errors, {@code ||a - b||2 / ||b||2}.
     *
     * @param actual the file with a
     * @param expected the file with b
     * @return an error for each tensor
     * @throws IllegalArgumentException if the files hold tensors of different names or sizes
     */
    static Map<String, Double> errors(Path actual, Path expected) throws IOException {
        try (SafetensorsReader a = SafetensorsReader.open(actual);
                SafetensorsReader b = SafetensorsReader.open(expected)) {
            if (!a.names().equals(b.names())) {
                throw new IllegalArgumentException(
                        "The case has " + a.names() + ", the reference " + b.names());
            }
            Map<String, Double> errors = new LinkedHashMap<>();
            for (String name : b.names()) {
                errors.put(name, error(a, b, name));
            }
            return errors;
        }
    }

    private static double error(SafetensorsReader a, SafetensorsReader b, String name)
            throws IOException {
        long elements = b.info(name).elements();
        if (a.info(name).elements() != elements) {
            throw new IllegalArgumentException(
                    name + " has " + a.info(name).elements() + " numbers, not " + elements);
        }
        double difference = 0;
        double norm = 0;
        for (long at = 0; at < elements; at += PIECE) {
            int count = (int) Math.min(PIECE, elements - at);
            double[] x = read(a, name, at, count);
            double[] y = read(b, name, at, count);
            for (int i = 0; i < count; i++) {
                difference += (x[i] - y[i]) * (x[i] - y[i]);
                norm += y[i] * y[i];
            }
        }
        return difference == 0 ? 0 : Math.sqrt(difference / norm);
    }

    private static double[] read(SafetensorsReader file, String name, long at, int count)
            throws IOException {
        DType type = file.info(name).dtype();
        ByteBuffer bytes = ByteBuffer.allocate(count * type.bytes()).order(ByteOrder.LITTLE_ENDIAN);
        file.readBytes(name, at * type.bytes(), bytes);
        bytes.flip();
        double[] values = new double[count];
        for (int i = 0; i < count; i++) {
            values[i] = type == DType.F64 ? bytes.getDouble() : bytes.getFloat();
        }
        return values;
    }
}
