package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;
import org.djlmoe.io.TensorInfo;
import org.djlmoe.optimizer.BucketState.Part;
import org.djlmoe.optimizer.StateBuckets.Need;

/**
 * An optimizer's state as a safetensors file: each part of a parameter's state is a tensor of the
 * parameter's shape, each count of updates one of 64-bit integers. What belongs to no parameter is
 * metadata. Values pass through one buffer of 1 MB, so memory does not grow with the state.
 */
final class StateFile {

    /** What was read besides the state itself. */
    record Loaded(StateReport report, int updates, long skipped) {}

    /** What the file has of a parameter. */
    private record Stored(Shape shape, long[] steps, boolean master) {}

    private static final String FORMAT = "djl-moe-adamw";
    private static final String VERSION = "1";
    private static final String STEP = ".step";
    private static final String OPTION = "option.";
    private static final int PIECE = 1 << 18;

    private final AdamWState state;
    private final AdamWKernels kernels;

    StateFile(AdamWState state, AdamWKernels kernels) {
        this.state = state;
        this.kernels = kernels;
    }

    private static String name(String path, Part part) {
        return path + "." + part.name().toLowerCase(Locale.ROOT);
    }

    void save(Path file, int updates, long skipped, Map<String, String> options)
            throws IOException {
        Map<String, String> metadata = new LinkedHashMap<>();
        metadata.put("format", FORMAT);
        metadata.put("version", VERSION);
        metadata.put("updates", Integer.toString(updates));
        metadata.put("skipped", Long.toString(skipped));
        options.forEach((option, value) -> metadata.put(OPTION + option, value));
        SafetensorsWriter.Builder plan = SafetensorsWriter.builder().optMetadata(metadata);
        for (String path : state.paths()) {
            long[] steps = state.steps(path);
            plan.addTensor(
                    path + STEP,
                    DType.I64,
                    steps.length == 1 ? new long[0] : new long[] {steps.length});
            for (Part part : Part.of(state.hasWholeMaster(path))) {
                plan.addTensor(name(path, part), DType.F32, state.shape(path).getShape());
            }
        }
        try (SafetensorsWriter writer = plan.build(file);
                Pieces pieces = new Pieces()) {
            for (String path : state.paths()) {
                writer.writeBytes(path + STEP, bytes(state.steps(path)));
                for (Part part : Part.of(state.hasWholeMaster(path))) {
                    pieces.each(
                            state.shape(path).size(),
                            (start, length) -> {
                                state.transfer(path, start, length, pieces.array, part, true);
                                writer.writeF32(name(path, part), pieces.values(length));
                            });
                }
            }
            writer.commit();
        }
    }

    /**
     * Reads a file; checks everything before anything changes.
     *
     * @param parameters the model's by path, in the block's order
     * @param options what holds now
     */
    Loaded load(Path file, Map<String, Parameter> parameters, Map<String, String> options)
            throws IOException {
        parameters.forEach(StateFile::checkInitialized);
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            Map<String, String> metadata = metadata(reader);
            int updates = (int) number(reader, "updates", Integer.MAX_VALUE);
            long skipped = number(reader, "skipped", Long.MAX_VALUE);
            Map<String, Stored> stored = stored(reader);
            stored.forEach((path, found) -> checkHeld(path, found.shape));
            Match match = match(file, stored, parameters);
            fill(reader, stored, parameters, match);
            return new Loaded(
                    new StateReport(
                            file,
                            updates,
                            List.copyOf(match.inUse.keySet()),
                            List.copyOf(match.frozen.keySet()),
                            match.started,
                            match.removed,
                            match.converted,
                            changes(metadata, options)),
                    updates,
                    skipped);
        }
    }

    /** Which parameters of the model and of the file belong together, and what they need. */
    private static final class Match {

        final Map<String, Need> inUse = new LinkedHashMap<>();
        final Map<String, Need> frozen = new LinkedHashMap<>();
        final List<String> started = new ArrayList<>();
        final List<String> removed = new ArrayList<>();
        final List<String> converted = new ArrayList<>();
    }

    private Match match(Path file, Map<String, Stored> stored, Map<String, Parameter> parameters)
            throws IOException {
        Match match = new Match();
        for (Map.Entry<String, Parameter> entry : parameters.entrySet()) {
            String path = entry.getKey();
            NDArray weight = entry.getValue().getArray();
            boolean trained = entry.getValue().requiresGradient();
            boolean half = kernels.isHalf(weight);
            Stored found = stored.get(path);
            if (found != null) {
                checkShape(file, path, found, weight.getShape());
                if (found.master != half) {
                    match.converted.add(path);
                }
                (trained ? match.inUse : match.frozen).put(path, new Need(found.shape, half));
            } else if (trained) {
                match.started.add(path);
            }
        }
        match.removed.addAll(stored.keySet());
        match.removed.removeAll(parameters.keySet());
        return match;
    }

    private void fill(
            SafetensorsReader reader,
            Map<String, Stored> stored,
            Map<String, Parameter> parameters,
            Match match)
            throws IOException {
        // State of frozen parameters stays out of the buckets that each step goes through.
        List<Map<String, Need>> groups = List.of(match.inUse, match.frozen);
        state.reserve(groups);
        try (Pieces pieces = new Pieces()) {
            clearOthers(stored, parameters, pieces);
            for (Map<String, Need> needs : groups) {
                for (Map.Entry<String, Need> need : needs.entrySet()) {
                    String path = need.getKey();
                    boolean master = need.getValue().master();
                    read(reader, path, stored.get(path), master, pieces);
                    if (master && !stored.get(path).master) {
                        state.fillMaster(path, parameters.get(path).getArray());
                    }
                }
            }
        } catch (IOException e) {
            throw new IOException(
                    "Reading "
                            + reader.file()
                            + " failed; the optimizer's state is half-filled and must not be"
                            + " used",
                    e);
        }
    }

    private static Map<String, String> metadata(SafetensorsReader reader) throws IOException {
        Map<String, String> metadata = reader.metadata();
        if (!FORMAT.equals(metadata.get("format"))) {
            throw new SafetensorsException(
                    reader.file(), "holds no optimizer state: it is not marked as " + FORMAT);
        }
        if (!VERSION.equals(metadata.get("version"))) {
            throw new SafetensorsException(
                    reader.file(),
                    "holds optimizer state of version "
                            + metadata.get("version")
                            + ", but this library reads version "
                            + VERSION);
        }
        return metadata;
    }

    private static long number(SafetensorsReader reader, String key, long highest)
            throws IOException {
        String text = reader.metadata().get(key);
        try {
            long value = Long.parseLong(String.valueOf(text));
            if (value >= 0 && value <= highest) {
                return value;
            }
        } catch (NumberFormatException e) {
            // Reported below, as a number out of range is.
        }
        throw new SafetensorsException(
                reader.file(), "the metadata '" + key + "' is no count: " + text);
    }

    private static Map<String, Stored> stored(SafetensorsReader reader) throws IOException {
        Map<String, Stored> stored = new LinkedHashMap<>();
        int known = 0;
        for (String tensor : reader.names()) {
            if (tensor.endsWith(STEP)) {
                String path = tensor.substring(0, tensor.length() - STEP.length());
                Stored found = stored(reader, path);
                stored.put(path, found);
                known += 1 + Part.of(found.master).size();
            }
        }
        if (known != reader.names().size()) {
            throw new SafetensorsException(
                    reader.file(),
                    "holds "
                            + reader.names().size()
                            + " tensors, but the state of its "
                            + stored.size()
                            + " parameters is "
                            + known);
        }
        return stored;
    }

    private static Stored stored(SafetensorsReader reader, String path) throws IOException {
        boolean master = reader.names().contains(name(path, Part.MASTER));
        long[] shape = null;
        for (Part part : Part.of(master)) {
            String tensor = name(path, part);
            if (!reader.names().contains(tensor)) {
                throw new SafetensorsException(reader.file(), "lacks the tensor '" + tensor + "'");
            }
            TensorInfo info = reader.info(tensor);
            if (info.dtype() != DType.F32) {
                throw new SafetensorsException(
                        reader.file(), "tensor '" + tensor + "' is " + info.dtype() + ", not F32");
            }
            if (shape != null && !Arrays.equals(shape, info.shape())) {
                throw new SafetensorsException(
                        reader.file(),
                        "tensor '"
                                + tensor
                                + "' has the shape "
                                + Arrays.toString(info.shape())
                                + ", but '"
                                + name(path, Part.EXP_AVG)
                                + "' "
                                + Arrays.toString(shape));
            }
            shape = info.shape();
        }
        return new Stored(new Shape(shape), steps(reader, path, shape), master);
    }

    private static long[] steps(SafetensorsReader reader, String path, long[] shape)
            throws IOException {
        TensorInfo info = reader.info(path + STEP);
        boolean fits =
                info.shape().length == 0
                        || info.shape().length == 1
                                && shape.length > 0
                                && info.shape()[0] == shape[0];
        if (info.dtype() != DType.I64 || !fits) {
            throw new SafetensorsException(
                    reader.file(),
                    "tensor '"
                            + info.name()
                            + "' is "
                            + info.dtype()
                            + Arrays.toString(info.shape())
                            + "; it must be one I64, or one for each expert");
        }
        ByteBuffer bytes =
                ByteBuffer.allocate(Math.toIntExact(info.byteSize()))
                        .order(ByteOrder.LITTLE_ENDIAN);
        reader.readBytes(info.name(), 0, bytes);
        long[] steps = new long[bytes.flip().remaining() / Long.BYTES];
        bytes.asLongBuffer().get(steps);
        for (long step : steps) {
            if (step < 0) {
                throw new SafetensorsException(
                        reader.file(), "tensor '" + info.name() + "' holds the count " + step);
            }
        }
        return steps;
    }

    private static ByteBuffer bytes(long[] steps) {
        ByteBuffer bytes =
                ByteBuffer.allocate(steps.length * Long.BYTES).order(ByteOrder.LITTLE_ENDIAN);
        bytes.asLongBuffer().put(steps);
        return bytes;
    }

    private static void checkInitialized(String path, Parameter parameter) {
        if (!parameter.isInitialized()) {
            throw new IllegalArgumentException(
                    path + " has no values yet: initialize the model first");
        }
    }

    private static void checkShape(Path file, String path, Stored found, Shape shape)
            throws IOException {
        if (!found.shape.equals(shape)) {
            throw new SafetensorsException(
                    file,
                    "the state of parameter '"
                            + path
                            + "' has the shape "
                            + found.shape
                            + ", but the model's parameter has "
                            + shape);
        }
    }

    private void checkHeld(String path, Shape shape) {
        if (state.paths().contains(path) && !state.shape(path).equals(shape)) {
            throw new IllegalStateException(
                    path
                            + ": this optimizer holds state of the shape "
                            + state.shape(path)
                            + ", the file has "
                            + shape
                            + "; load into a new optimizer");
        }
    }

    /** What is held of parameters that the file lacks starts again as well. */
    private void clearOthers(
            Map<String, Stored> stored, Map<String, Parameter> parameters, Pieces pieces)
            throws IOException {
        for (String path : state.paths()) {
            if (stored.containsKey(path)) {
                continue;
            }
            for (Part part : Part.of(false)) {
                pieces.each(
                        state.shape(path).size(),
                        (start, length) -> {
                            pieces.clear(length);
                            state.transfer(path, start, length, pieces.array, part, false);
                        });
            }
            if (state.hasMaster(path) && parameters.containsKey(path)) {
                state.fillMaster(path, parameters.get(path).getArray());
            }
            state.define(path, state.shape(path), new long[] {0}, state.hasMaster(path));
        }
    }

    private void read(
            SafetensorsReader reader, String path, Stored found, boolean master, Pieces pieces)
            throws IOException {
        for (Part part : Part.of(master && found.master)) {
            pieces.each(
                    found.shape.size(),
                    (start, length) -> {
                        reader.readF32(name(path, part), start, pieces.values(length));
                        state.transfer(path, start, length, pieces.array, part, false);
                    });
        }
        state.define(path, found.shape, found.steps, master);
    }

    private static List<String> changes(Map<String, String> metadata, Map<String, String> options) {
        List<String> changes = new ArrayList<>();
        options.forEach(
                (option, value) -> {
                    String before = metadata.get(OPTION + option);
                    if (!value.equals(before)) {
                        changes.add(option + " " + before + " -> " + value);
                    }
                });
        return changes;
    }

    /** One buffer, seen as an array and as floats. */
    private static final class Pieces implements AutoCloseable {

        interface Action {
            void accept(long start, int length) throws IOException;
        }

        private final NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        final NDArray array = manager.zeros(new Shape(PIECE));
        private final FloatBuffer floats =
                array.toByteBuffer(true).order(ByteOrder.nativeOrder()).asFloatBuffer();

        void each(long elements, Action action) throws IOException {
            for (long start = 0; start < elements; start += PIECE) {
                action.accept(start, (int) Math.min(PIECE, elements - start));
            }
        }

        FloatBuffer values(int length) {
            return floats.slice(0, length);
        }

        void clear(int length) {
            for (int i = 0; i < length; i++) {
                floats.put(i, 0);
            }
        }

        @Override
        public void close() {
            manager.close();
        }
    }
}
