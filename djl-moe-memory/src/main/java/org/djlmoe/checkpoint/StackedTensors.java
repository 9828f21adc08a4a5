package org.djlmoe.checkpoint;

import java.io.Closeable;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.checkpoint.Layout.Part;
import org.djlmoe.io.SafetensorsFolder;
import org.djlmoe.io.TensorInfo;

/**
 * A checkpoint folder's values by their names in the stacked layout, read where they lie: for those
 * who want some of a parameter without an array of all of it, such as one expert of many.
 *
 * <p>Used by one thread at a time.
 */
public final class StackedTensors implements Closeable {

    private final SafetensorsFolder source;
    private final Map<String, List<Part>> parts = new HashMap<>();

    private StackedTensors(SafetensorsFolder source) {
        this.source = source;
    }

    /**
     * Opens a folder.
     *
     * @param folder holds {@code model.safetensors} or {@code model.safetensors.index.json}
     * @return its tensors
     * @throws IOException if a file is missing or broken
     */
    public static StackedTensors open(Path folder) throws IOException {
        return new StackedTensors(SafetensorsFolder.open(folder));
    }

    /**
     * Reads a run of a parameter's values as F32.
     *
     * @param parameter its name in the stacked layout, as in {@link HfCheckpoint#parameterShapes}
     * @param shape its shape
     * @param offset the first element, counted through the flattened parameter
     * @param target filled to its limit
     * @throws CheckpointException if a tensor is missing, of the wrong shape or not floating point
     * @throws IOException if reading fails
     */
    public void read(String parameter, long[] shape, long offset, FloatBuffer target)
            throws IOException {
        List<Part> all = parts.get(parameter);
        if (all == null) {
            all = checked(parameter, shape);
            parts.put(parameter, all);
        }
        long at = offset;
        int limit = target.limit();
        for (Part part : all) {
            long inPart = at - part.offset();
            if (inPart >= 0 && inPart < part.elements() && target.hasRemaining()) {
                int count = (int) Math.min(target.remaining(), part.elements() - inPart);
                target.limit(target.position() + count);
                source.readF32(part.tensor(), inPart, target);
                target.limit(limit);
                at += count;
            }
        }
        if (target.hasRemaining()) {
            throw new IllegalArgumentException(
                    "Parameter '" + parameter + "' ends before element " + (at + 1));
        }
    }

    private List<Part> checked(String parameter, long[] shape) throws CheckpointException {
        List<Part> all = HfCheckpoint.findParts(source, parameter, shape);
        for (Part part : all) {
            if (!source.names().contains(part.tensor())) {
                throw new CheckpointException(
                        source.folder() + ": lacks tensor '" + part.tensor() + "'");
            }
            TensorInfo info = source.info(part.tensor());
            if (!Arrays.equals(info.shape(), part.shape()) || !info.dtype().isReadableAsF32()) {
                throw new CheckpointException(
                        source.reader(part.tensor()).file()
                                + ": tensor '"
                                + part.tensor()
                                + "' is "
                                + info.dtype()
                                + Arrays.toString(info.shape())
                                + ", but parameter '"
                                + parameter
                                + "' needs floating-point values of shape "
                                + Arrays.toString(part.shape()));
            }
        }
        return all;
    }

    @Override
    public void close() throws IOException {
        source.close();
    }
}
