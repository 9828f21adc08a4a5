package org.djlmoe.maskcoft;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;
import org.djlmoe.io.TensorInfo;

/**
 * The state of a {@link MaskLearning} as a safetensors file, in double precision as it is held:
 * {@code theta}, {@code exp_avg} and {@code exp_avg_sq} [layers, experts], {@code losses}
 * [updates]. Counts and settings are metadata.
 */
final class MaskLearningFile {

    private static final String FORMAT = "djl-moe-mask-learning-1";
    private static final String LOSSES = "losses";
    private static final String SETTINGS = "settings";
    private static final String DROPPED = "dropped";

    private MaskLearningFile() {}

    /** Writes matrices of one shape, by tensor name. */
    static void write(
            Path file,
            String settings,
            long dropped,
            Map<String, double[][]> matrices,
            double[] losses)
            throws IOException {
        SafetensorsWriter.Builder plan =
                SafetensorsWriter.builder()
                        .optMetadata(
                                Map.of(
                                        "format",
                                        FORMAT,
                                        SETTINGS,
                                        settings,
                                        DROPPED,
                                        Long.toString(dropped)));
        matrices.forEach((name, m) -> plan.addTensor(name, DType.F64, m.length, m[0].length));
        plan.addTensor(LOSSES, DType.F64, losses.length);
        try (SafetensorsWriter writer = plan.build(file)) {
            for (Map.Entry<String, double[][]> entry : matrices.entrySet()) {
                for (double[] row : entry.getValue()) {
                    writer.writeBytes(entry.getKey(), bytes(row));
                }
            }
            writer.writeBytes(LOSSES, bytes(losses));
            writer.commit();
        }
    }

    /** What is read. */
    record Contents(long dropped, Map<String, double[][]> matrices, double[] losses) {}

    /** Reads what a learner of these settings has written; changes nothing. */
    static Contents read(Path file, String settings, Map<String, double[][]> like)
            throws IOException {
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            if (!FORMAT.equals(reader.metadata().get("format"))) {
                throw new SafetensorsException(
                        file, "holds no learner of masks: it is not marked as " + FORMAT);
            }
            String before = reader.metadata().get(SETTINGS);
            if (!settings.equals(before)) {
                throw new SafetensorsException(
                        file,
                        "is of a learner with other settings ("
                                + before
                                + "), not "
                                + settings
                                + ": build it with those");
            }
            Map<String, double[][]> matrices = new LinkedHashMap<>();
            for (Map.Entry<String, double[][]> entry : like.entrySet()) {
                int rows = entry.getValue().length;
                int columns = entry.getValue()[0].length;
                double[] flat = tensor(reader, entry.getKey(), rows, columns);
                double[][] matrix = new double[rows][];
                for (int l = 0; l < rows; l++) {
                    matrix[l] = Arrays.copyOfRange(flat, l * columns, (l + 1) * columns);
                }
                matrices.put(entry.getKey(), matrix);
            }
            return new Contents(dropped(reader), matrices, tensor(reader, LOSSES));
        }
    }

    private static long dropped(SafetensorsReader reader) throws IOException {
        String text = reader.metadata().get(DROPPED);
        try {
            return Long.parseLong(String.valueOf(text));
        } catch (NumberFormatException e) {
            throw new SafetensorsException(
                    reader.file(), "the metadata '" + DROPPED + "' is no count: " + text, e);
        }
    }

    /** Without a shape any vector will do. */
    private static double[] tensor(SafetensorsReader reader, String name, long... shape)
            throws IOException {
        if (!reader.names().contains(name)) {
            throw new SafetensorsException(reader.file(), "lacks the tensor '" + name + "'");
        }
        TensorInfo info = reader.info(name);
        boolean fits =
                shape.length == 0 ? info.shape().length == 1 : Arrays.equals(shape, info.shape());
        if (info.dtype() != DType.F64 || !fits) {
            throw new SafetensorsException(
                    reader.file(),
                    "tensor '"
                            + name
                            + "' is "
                            + info.dtype()
                            + Arrays.toString(info.shape())
                            + ", not F64"
                            + (shape.length == 0 ? " of one axis" : Arrays.toString(shape)));
        }
        ByteBuffer bytes =
                ByteBuffer.allocate(Math.toIntExact(info.byteSize()))
                        .order(ByteOrder.LITTLE_ENDIAN);
        reader.readBytes(name, 0, bytes);
        double[] values = new double[Math.toIntExact(info.elements())];
        bytes.flip().asDoubleBuffer().get(values);
        return values;
    }

    private static ByteBuffer bytes(double[] values) {
        ByteBuffer bytes =
                ByteBuffer.allocate(values.length * Double.BYTES).order(ByteOrder.LITTLE_ENDIAN);
        bytes.asDoubleBuffer().put(values);
        return bytes;
    }
}
