package org.djlmoe.checkpoint;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashSet;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.NavigableSet;
import java.util.Set;
import java.util.TreeSet;
import org.djlmoe.checkpoint.Layout.Part;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsFolder;
import org.djlmoe.io.ShardedSafetensorsWriter;
import org.djlmoe.io.TensorInfo;
import org.djlmoe.kernel.HalfArrays;
import org.djlmoe.model.MoeConfig;

/**
 * Moves weights between a Hugging Face checkpoint folder and named parameters.
 *
 * <p>Parameters are keyed by Hugging Face tensor names with the experts stacked, see {@link
 * #parameterShapes}. Their arrays are F32, or BF16 where {@code HalfArrays} made them so, on the
 * CPU or on a device. Loading accepts every {@link Layout}, single files and shards, and the
 * element types F32, F16, BF16 and F64; saving writes what {@link SaveOptions} say. Values stream
 * in pieces of at most 4 MB: beside the parameters memory does not grow with the model.
 *
 * <p>Everything is checked before the first value is written: names, shapes and types of all
 * tensors. After an error from these checks the parameters are as before. Only a failing disk can
 * leave them half-filled; the error then says so.
 *
 * <p>Balancing biases and shared experts are there if the configuration has them. Biases are
 * written in F32 whatever the element type of the rest.
 *
 * <p>With tied embeddings the parameters have no {@code lm_head.weight} (or the same object under
 * both names) and neither has the file; a file that has one anyway must hold the embedding's
 * values.
 */
public final class HfCheckpoint {

    /** The file that describes the model in a checkpoint folder. */
    public static final String CONFIG_FILE = "config.json";

    static final String EMBEDDING = "model.embed_tokens.weight";
    static final String HEAD = "lm_head.weight";

    private static final String BALANCE_BIAS = "mlp.gate.e_score_correction_bias";

    private static final int COMPARE_ELEMENTS = 1 << 16;

    private HfCheckpoint() {}

    /**
     * Lists the parameters of a decoder in the order in which they are saved.
     *
     * @param config the model's sizes
     * @return name in the stacked layout to shape; without {@code lm_head.weight} if tied
     */
    public static Map<String, Shape> parameterShapes(MoeConfig config) {
        long hidden = config.hiddenSize();
        long inner = config.intermediateSize();
        long experts = config.numExperts();
        long queries = (long) config.numHeads() * config.headDim();
        long keys = (long) config.numKeyValueHeads() * config.headDim();
        Map<String, Shape> shapes = new LinkedHashMap<>();
        shapes.put(EMBEDDING, new Shape(config.vocabSize(), hidden));
        for (int layer = 0; layer < config.numLayers(); layer++) {
            String prefix = "model.layers." + layer + ".";
            shapes.put(prefix + "input_layernorm.weight", new Shape(hidden));
            shapes.put(prefix + "self_attn.q_proj.weight", new Shape(queries, hidden));
            shapes.put(prefix + "self_attn.k_proj.weight", new Shape(keys, hidden));
            shapes.put(prefix + "self_attn.v_proj.weight", new Shape(keys, hidden));
            shapes.put(prefix + "self_attn.o_proj.weight", new Shape(hidden, queries));
            shapes.put(prefix + "post_attention_layernorm.weight", new Shape(hidden));
            shapes.put(prefix + "mlp.gate.weight", new Shape(experts, hidden));
            shapes.put(prefix + "mlp.experts.gate_up_proj", new Shape(experts, 2 * inner, hidden));
            shapes.put(prefix + "mlp.experts.down_proj", new Shape(experts, hidden, inner));
            if (config.useRoutingBias()) {
                shapes.put(prefix + BALANCE_BIAS, new Shape(experts));
            }
            long shared = config.sharedExpertIntermediateSize();
            if (shared > 0) {
                shapes.put(
                        prefix + "mlp.shared_expert.gate_up_proj",
                        new Shape(1, 2 * shared, hidden));
                shapes.put(prefix + "mlp.shared_expert.down_proj", new Shape(1, hidden, shared));
            }
            if (config.sharedExpertGated()) {
                shapes.put(prefix + "mlp.shared_expert_gate.weight", new Shape(1, hidden));
            }
        }
        shapes.put("model.norm.weight", new Shape(hidden));
        if (!config.tieWordEmbeddings()) {
            shapes.put(HEAD, new Shape(config.vocabSize(), hidden));
        }
        return shapes;
    }

    /**
     * Compares the sizes of a configuration with the tensors of a checkpoint folder, without
     * reading or allocating any: a size that is wrong by a digit would fill memory before {@link
     * #load} could say so.
     *
     * @param folder holds {@code config.json} and the weights
     * @param config what {@code config.json} says
     * @throws CheckpointException if they differ; the message names the key of {@code config.json}
     * @throws IOException if a file breaks its format or cannot be read
     */
    public static void check(Path folder, MoeConfig config) throws IOException {
        try (SafetensorsFolder source = SafetensorsFolder.open(folder)) {
            new SizeCheck(source, config).run();
        }
    }

    /**
     * Fills parameters from a checkpoint folder.
     *
     * @param folder holds {@code model.safetensors} or {@code model.safetensors.index.json}
     * @param parameters initialized F32 or BF16 parameters by name in the stacked layout
     * @throws CheckpointException if a tensor is missing, surplus, of the wrong shape or not
     *     floating point; the message names tensor and file
     * @throws IOException if a file breaks its format or cannot be read
     * @throws IllegalArgumentException if a parameter is not initialized, or neither F32 nor BF16
     */
    public static void load(Path folder, Map<String, Parameter> parameters) throws IOException {
        load(folder, parameters, Map.of());
    }

    /**
     * Fills some of a checkpoint's parameters.
     *
     * @param folder holds {@code model.safetensors} or {@code model.safetensors.index.json}
     * @param parameters initialized F32 or BF16 parameters by name in the stacked layout
     * @param others names and shapes of the parameters that the folder has beside these: looked for
     *     and checked like them, but not read
     * @throws CheckpointException if a tensor is missing, surplus, of the wrong shape or not
     *     floating point; the message names tensor and file
     * @throws IOException if a file breaks its format or cannot be read
     * @throws IllegalArgumentException if a parameter is not initialized, or neither F32 nor BF16
     */
    public static void load(
            Path folder, Map<String, Parameter> parameters, Map<String, Shape> others)
            throws IOException {
        Map<String, Parameter> targets = distinct(parameters);
        try (SafetensorsFolder source = SafetensorsFolder.open(folder)) {
            Map<String, List<Part>> plan = planLoad(source, targets, others);
            for (Map.Entry<String, List<Part>> entry : plan.entrySet()) {
                NDArray array = targets.get(entry.getKey()).getArray();
                try (ParameterIo io = new ParameterIo(array)) {
                    io.requireWritable(array, entry.getKey());
                }
            }
            for (Map.Entry<String, List<Part>> entry : plan.entrySet()) {
                try (ParameterIo io = new ParameterIo(targets.get(entry.getKey()).getArray())) {
                    for (Part part : entry.getValue()) {
                        io.write(
                                part.offset(),
                                part.elements(),
                                (done, piece) -> source.readF32(part.tensor(), done, piece));
                    }
                } catch (IOException e) {
                    throw new IOException(
                            "Reading failed at '"
                                    + entry.getKey()
                                    + "'; the parameters are half-filled and must not be used",
                            e);
                }
            }
        }
    }

    /**
     * Writes parameters and {@code config.json} into a folder.
     *
     * <p>Older weights in the folder are replaced once the new ones are complete on disk.
     *
     * @param folder created if missing
     * @param config the model's configuration
     * @param parameters its F32 or BF16 parameters by name in the stacked layout, all of them
     * @param options layout, element type and size of files
     * @throws IllegalArgumentException if the parameters are not those of {@code config}
     * @throws IOException if writing fails; then older files are untouched
     */
    public static void save(
            Path folder, MoeConfig config, Map<String, Parameter> parameters, SaveOptions options)
            throws IOException {
        Map<String, Shape> shapes = parameterShapes(config);
        checkAgainst(config, shapes, parameters);
        Files.createDirectories(folder);
        ShardedSafetensorsWriter.Builder builder =
                ShardedSafetensorsWriter.builder()
                        .setFolder(folder)
                        .optMaxShardBytes(options.maxShardBytes())
                        // transformers 4 refuses files without this entry.
                        .optMetadata(Map.of("format", "pt"));
        Map<String, List<Part>> plan = new LinkedHashMap<>();
        for (Map.Entry<String, Shape> entry : shapes.entrySet()) {
            List<Part> parts = options.layout().parts(entry.getKey(), entry.getValue().getShape());
            plan.put(entry.getKey(), parts);
            for (Part part : parts) {
                builder.addTensor(part.tensor(), dtype(entry.getKey(), options), part.shape());
            }
        }
        try (ShardedSafetensorsWriter writer = builder.build()) {
            for (Map.Entry<String, List<Part>> entry : plan.entrySet()) {
                try (ParameterIo io = new ParameterIo(parameters.get(entry.getKey()).getArray())) {
                    for (Part part : entry.getValue()) {
                        io.read(
                                part.offset(),
                                part.elements(),
                                (done, piece) -> writer.writeF32(part.tensor(), piece));
                    }
                }
            }
            writer.commit();
        }
        config.toJson(folder.resolve(CONFIG_FILE), options.torchDtype());
    }

    /** Balancing biases are sums of steps that half precision would round away. */
    private static DType dtype(String parameter, SaveOptions options) {
        return parameter.endsWith(BALANCE_BIAS) ? DType.F32 : options.dtype();
    }

    /**
     * Tells sets of parameters apart by names, types, shapes and values.
     *
     * @param parameters initialized F32 or BF16 parameters by name
     * @return SHA-256 in hexadecimal
     */
    public static String digest(Map<String, Parameter> parameters) {
        MessageDigest digest;
        try {
            digest = MessageDigest.getInstance("SHA-256");
        } catch (NoSuchAlgorithmException e) {
            throw new IllegalStateException("Every Java platform has SHA-256", e);
        }
        ByteBuffer bytes = ByteBuffer.allocate(1 << 16).order(ByteOrder.LITTLE_ENDIAN);
        for (Map.Entry<String, Parameter> entry : distinct(parameters).entrySet()) {
            NDArray array = entry.getValue().getArray();
            String type = HalfArrays.isHalf(array) ? " BF16 " : " F32 ";
            String header = entry.getKey() + type + Arrays.toString(array.getShape().getShape());
            digest.update(header.getBytes(StandardCharsets.UTF_8));
            try (ParameterIo io = new ParameterIo(array)) {
                io.read(
                        0,
                        array.size(),
                        (done, piece) -> {
                            while (piece.hasRemaining()) {
                                int count = Math.min(piece.remaining(), bytes.capacity() / 4);
                                FloatBuffer next = piece.slice(piece.position(), count);
                                bytes.clear().limit(4 * count);
                                bytes.asFloatBuffer().put(next);
                                piece.position(piece.position() + count);
                                digest.update(bytes);
                            }
                        });
            } catch (IOException e) {
                throw new IllegalStateException("Memory failed to be read", e);
            }
        }
        return HexFormat.of().formatHex(digest.digest());
    }

    /** Drops the output projection where it is the embedding itself. */
    private static Map<String, Parameter> distinct(Map<String, Parameter> parameters) {
        Map<String, Parameter> result = new LinkedHashMap<>(parameters);
        if (result.containsKey(HEAD) && result.get(HEAD) == result.get(EMBEDDING)) {
            result.remove(HEAD);
        }
        return result;
    }

    /** Decides which tensors fill which parameter, or refuses. Touches no parameter's values. */
    private static Map<String, List<Part>> planLoad(
            SafetensorsFolder source, Map<String, Parameter> targets, Map<String, Shape> others)
            throws IOException {
        Map<String, Shape> shapes = new LinkedHashMap<>(others);
        targets.forEach((name, parameter) -> shapes.put(name, floatShape(name, parameter)));
        Map<String, List<Part>> plan = new LinkedHashMap<>();
        Set<String> used = new HashSet<>();
        List<String> missing = new ArrayList<>();
        for (Map.Entry<String, Shape> entry : shapes.entrySet()) {
            String name = entry.getKey();
            List<Part> parts = findParts(source, name, entry.getValue().getShape());
            if (targets.containsKey(name)) {
                plan.put(name, parts);
            }
            for (Part part : parts) {
                if (source.names().contains(part.tensor())) {
                    used.add(part.tensor());
                    checkTensor(source, part, name);
                } else {
                    missing.add(part.tensor());
                }
            }
        }
        if (!missing.isEmpty()) {
            String hint =
                    missing.contains(HEAD)
                            ? "; a checkpoint without it has tied embeddings: set tieWordEmbeddings"
                            : "";
            throw new CheckpointException(source.folder() + ": lacks " + list(missing) + hint);
        }
        checkSurplus(source, targets, used);
        return plan;
    }

    /** The layout is whichever has at least one of its tensors there. */
    static List<Part> findParts(SafetensorsFolder source, String name, long[] shape) {
        for (Layout layout : Layout.values()) {
            List<Part> parts = layout.parts(name, shape);
            for (Part part : parts) {
                if (source.names().contains(part.tensor())) {
                    return parts;
                }
            }
        }
        return Layout.FUSED.parts(name, shape);
    }

    private static void checkTensor(SafetensorsFolder source, Part part, String parameter)
            throws CheckpointException {
        TensorInfo info = source.info(part.tensor());
        Path file = source.reader(part.tensor()).file();
        if (!Arrays.equals(info.shape(), part.shape())) {
            throw new CheckpointException(
                    file
                            + ": tensor '"
                            + part.tensor()
                            + "' has the shape "
                            + Arrays.toString(info.shape())
                            + ", but parameter '"
                            + parameter
                            + "' needs "
                            + Arrays.toString(part.shape()));
        }
        if (!info.dtype().isReadableAsF32()) {
            throw new CheckpointException(
                    file
                            + ": tensor '"
                            + part.tensor()
                            + "' holds "
                            + info.dtype()
                            + "; weights must be F32, F16, BF16 or F64");
        }
    }

    private static void checkSurplus(
            SafetensorsFolder source, Map<String, Parameter> targets, Set<String> used)
            throws IOException {
        NavigableSet<String> surplus = new TreeSet<>(source.names());
        surplus.removeAll(used);
        if (surplus.contains(HEAD) && !targets.containsKey(HEAD) && used.contains(EMBEDDING)) {
            if (!sameValues(source, HEAD, EMBEDDING)) {
                throw new CheckpointException(
                        source.reader(HEAD).file()
                                + ": tensor '"
                                + HEAD
                                + "' differs from the embedding, but the model ties the two:"
                                + " set tieWordEmbeddings to false");
            }
            surplus.remove(HEAD);
        }
        if (!surplus.isEmpty()) {
            throw new CheckpointException(
                    source.reader(surplus.first()).file()
                            + ": holds "
                            + list(surplus)
                            + ", which the model has no parameter for");
        }
    }

    private static boolean sameValues(SafetensorsFolder source, String one, String other)
            throws IOException {
        TensorInfo info = source.info(one);
        if (!Arrays.equals(info.shape(), source.info(other).shape())
                || !info.dtype().isReadableAsF32()) {
            return false;
        }
        FloatBuffer left = FloatBuffer.allocate(COMPARE_ELEMENTS);
        FloatBuffer right = FloatBuffer.allocate(COMPARE_ELEMENTS);
        for (long done = 0; done < info.elements(); done += COMPARE_ELEMENTS) {
            int count = (int) Math.min(COMPARE_ELEMENTS, info.elements() - done);
            source.readF32(one, done, left.clear().limit(count));
            source.readF32(other, done, right.clear().limit(count));
            if (!left.flip().equals(right.flip())) {
                return false;
            }
        }
        return true;
    }

    private static void checkAgainst(
            MoeConfig config, Map<String, Shape> shapes, Map<String, Parameter> parameters) {
        Set<String> missing = new LinkedHashSet<>(shapes.keySet());
        missing.removeAll(parameters.keySet());
        if (!missing.isEmpty()) {
            throw new IllegalArgumentException("The parameters lack " + list(missing));
        }
        Set<String> surplus = new LinkedHashSet<>(parameters.keySet());
        surplus.removeAll(shapes.keySet());
        if (config.tieWordEmbeddings() && parameters.get(HEAD) == parameters.get(EMBEDDING)) {
            surplus.remove(HEAD);
        }
        if (!surplus.isEmpty()) {
            throw new IllegalArgumentException(
                    "The configuration has no place for " + list(surplus));
        }
        for (Map.Entry<String, Shape> entry : shapes.entrySet()) {
            Shape found = floatShape(entry.getKey(), parameters.get(entry.getKey()));
            if (!found.equals(entry.getValue())) {
                throw new IllegalArgumentException(
                        "Parameter '"
                                + entry.getKey()
                                + "' has the shape "
                                + found
                                + ", but the configuration says "
                                + entry.getValue());
            }
        }
    }

    private static Shape floatShape(String name, Parameter parameter) {
        if (!parameter.isInitialized()) {
            throw new IllegalArgumentException(
                    "Parameter '" + name + "' is not initialized: initialize the model first");
        }
        NDArray array = parameter.getArray();
        if (!HalfArrays.isHalf(array) && array.getDataType() != DataType.FLOAT32) {
            throw new IllegalArgumentException(
                    "Parameter '" + name + "' is " + array.getDataType() + ", not FLOAT32");
        }
        return array.getShape();
    }

    /** Names the first few of many tensors. */
    private static String list(Iterable<String> names) {
        List<String> all = new ArrayList<>();
        names.forEach(all::add);
        String shown = "tensor '" + String.join("', '", all.subList(0, Math.min(3, all.size())));
        return shown + "'" + (all.size() > 3 ? " and " + (all.size() - 3) + " more" : "");
    }
}
