package org.djlmoe.checkpoint;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;
import org.djlmoe.model.MoeConfig;

/**
 * Low-rank adapters of experts in the format of Hugging Face PEFT: a folder of {@code
 * adapter_config.json} and {@code adapter_model.safetensors}, without any weight of the base model
 * but the routers, if those have trained.
 *
 * <p>Written, and read, are adapters of stacked parameters, as PEFT has them for {@code
 * target_parameters}. For E experts and rank r, under {@code
 * base_model.model.model.layers.L.mlp.experts.}:
 *
 * <ul>
 *   <li>{@code base_layer.lora_A.weight} [E r, H] and {@code base_layer.lora_B.weight} [2 I, r E]
 *       of {@code gate_up_proj}
 *   <li>{@code lora_A.weight} [E r, I] and {@code lora_B.weight} [H, r E] of {@code down_proj}
 * </ul>
 *
 * <p>Row e r + j of A and column j E + e of B belong to row j of expert e: the expert is the outer
 * axis of A and the inner one of B. Which parameter a tensor belongs to follows from {@code
 * target_parameters} and the name alone, never from a shape: with H = 2 I the shapes of the two are
 * alike. Routers are whole, as PEFT's {@code modules_to_save}: {@code
 * base_model.model.model.layers.L.mlp.gate.weight} [E, H].
 *
 * <p>Read are also adapters of single experts, {@code
 * …layers.L.block_sparse_moe.experts.M.w1.lora_A.weight} and alike, or {@code
 * mlp.experts.M.gate_proj}. Gate and up projection then have an A each, which become one of twice
 * the rank. Different ranks in one file are filled up with zeros to the largest, different scales
 * go into B. Experts that the file lacks get zeros: they act unchanged, and do not train.
 *
 * <p>An adapter is as large as its file; it is held in memory while it is read or written.
 */
public final class PeftAdapter {

    /** The file that says what the adapter is. */
    public static final String CONFIG_FILE = "adapter_config.json";

    /** The file of the tensors. */
    public static final String WEIGHTS_FILE = "adapter_model.safetensors";

    static final String GATE_UP = "mlp.experts.gate_up_proj";
    static final String DOWN = "mlp.experts.down_proj";
    static final String ROUTER = "mlp.gate.weight";
    static final String PREFIX = "base_model.model.";
    static final String LORA_A = ".lora_A";
    static final String LORA_B = ".lora_B";

    private final Path folder;
    private final int rank;
    private final double alpha;
    private final Map<String, float[]> adapters;
    private final Map<String, float[]> routers;

    PeftAdapter(
            Path folder,
            int rank,
            double alpha,
            Map<String, float[]> adapters,
            Map<String, float[]> routers) {
        this.folder = folder;
        this.rank = rank;
        this.alpha = alpha;
        this.adapters = adapters;
        this.routers = routers;
    }

    /**
     * Writes an adapter. One that is in the folder already is replaced.
     *
     * @param folder created if missing
     * @param config the model's sizes
     * @param alpha the scaling numerator of the adapters
     * @param baseModel name or path of the model that the adapter belongs to, or null
     * @param adapters the decoder's {@code adapterParameters()}, those of all layers
     * @param routers routers to save along, {@code model.layers.L.mlp.gate.weight} of all layers,
     *     or none
     * @throws IllegalArgumentException if there is not an adapter, or a router, for every layer
     * @throws IOException if writing fails
     */
    public static void save(
            Path folder,
            MoeConfig config,
            double alpha,
            String baseModel,
            Map<String, Parameter> adapters,
            Map<String, Parameter> routers)
            throws IOException {
        int rank = rank(adapters);
        Map<String, long[]> expected = shapes(config, rank);
        requireAll(expected.keySet(), adapters.keySet());
        if (!routers.isEmpty()) {
            requireAll(routerShapes(config).keySet(), routers.keySet());
        }
        Files.createDirectories(folder);
        SafetensorsWriter.Builder plan =
                SafetensorsWriter.builder().optMetadata(Map.of("format", "pt"));
        for (Map.Entry<String, long[]> entry : expected.entrySet()) {
            plan.addTensor(
                    stackedName(entry.getKey()),
                    DType.F32,
                    stackedShape(entry.getKey(), entry.getValue()));
        }
        for (String router : routers.keySet()) {
            plan.addTensor(PREFIX + router, DType.F32, config.numExperts(), config.hiddenSize());
        }
        try (SafetensorsWriter writer = plan.build(folder.resolve(WEIGHTS_FILE))) {
            for (Map.Entry<String, long[]> entry : expected.entrySet()) {
                String name = entry.getKey();
                float[] values = floats(name, adapters.get(name), entry.getValue());
                if (name.endsWith(LORA_B)) {
                    values = expertsInnermost(values, entry.getValue());
                }
                writer.writeF32(stackedName(name), FloatBuffer.wrap(values));
            }
            for (Map.Entry<String, Parameter> entry : routers.entrySet()) {
                long[] shape = {config.numExperts(), config.hiddenSize()};
                writer.writeF32(
                        PREFIX + entry.getKey(),
                        FloatBuffer.wrap(floats(entry.getKey(), entry.getValue(), shape)));
            }
            writer.commit();
        }
        String[] whole = routers.isEmpty() ? new String[0] : new String[] {"gate"};
        PeftConfig.write(folder.resolve(CONFIG_FILE), rank, alpha, baseModel, whole);
    }

    /**
     * Reads an adapter.
     *
     * @param folder holds the two files
     * @param config the sizes of the model that it is for
     * @return the adapter
     * @throws CheckpointException if it is no adapter of this model's experts and routers, or
     *     something of it is missing; the message names file and tensor
     * @throws IOException if a file is missing or broken
     */
    public static PeftAdapter open(Path folder, MoeConfig config) throws IOException {
        PeftConfig peft = PeftConfig.read(folder.resolve(CONFIG_FILE));
        Path weights = folder.resolve(WEIGHTS_FILE);
        if (!Files.isRegularFile(weights)) {
            throw new NoSuchFileException(
                    weights.toString(),
                    null,
                    "an adapter's tensors; those in adapter_model.bin have to be saved again with"
                            + " safe_serialization=True");
        }
        try (SafetensorsReader reader = SafetensorsReader.open(weights)) {
            return new PeftReading(folder, config, peft, reader).run();
        }
    }

    /**
     * Returns the rank that the model's adapters need.
     *
     * @return r, the largest in the file
     */
    public int rank() {
        return rank;
    }

    /**
     * Returns the scaling numerator for {@link #rank}.
     *
     * @return alpha
     */
    public double alpha() {
        return alpha;
    }

    /**
     * Returns whether the adapter brings routers of its own.
     *
     * @return true if it does
     */
    public boolean hasRouters() {
        return !routers.isEmpty();
    }

    /**
     * Fills adapters, and overwrites routers if the file has some.
     *
     * @param parameters initialized F32 parameters by name: adapters of rank {@link #rank} in all
     *     layers, and routers
     * @throws IllegalArgumentException if one is missing or has another shape; then none has
     *     changed
     */
    public void load(Map<String, Parameter> parameters) {
        Map<String, float[]> all = new LinkedHashMap<>(adapters);
        all.putAll(routers);
        requireAll(all.keySet(), parameters.keySet());
        all.forEach(
                (name, values) -> {
                    Shape shape = parameters.get(name).getArray().getShape();
                    if (shape.size() != values.length) {
                        throw new IllegalArgumentException(
                                "Parameter '"
                                        + name
                                        + "' has the shape "
                                        + shape
                                        + ", but the adapter in "
                                        + folder
                                        + " has "
                                        + values.length
                                        + " numbers for it");
                    }
                });
        for (Map.Entry<String, float[]> entry : all.entrySet()) {
            float[] values = entry.getValue();
            try (ParameterIo io = new ParameterIo(parameters.get(entry.getKey()).getArray())) {
                io.write(
                        0,
                        values.length,
                        (done, piece) -> piece.put(values, (int) done, piece.remaining()));
            } catch (IOException e) {
                throw new IllegalStateException("Memory failed to be written", e);
            }
        }
    }

    /** What the adapters of a model are called, and their shapes. */
    static Map<String, long[]> shapes(MoeConfig config, int rank) {
        long experts = config.numExperts();
        long hidden = config.hiddenSize();
        long inner = config.intermediateSize();
        Map<String, long[]> shapes = new LinkedHashMap<>();
        for (int layer = 0; layer < config.numLayers(); layer++) {
            String prefix = "model.layers." + layer + ".";
            shapes.put(prefix + GATE_UP + LORA_A, new long[] {experts, rank, hidden});
            shapes.put(prefix + GATE_UP + LORA_B, new long[] {experts, 2 * inner, rank});
            shapes.put(prefix + DOWN + LORA_A, new long[] {experts, rank, inner});
            shapes.put(prefix + DOWN + LORA_B, new long[] {experts, hidden, rank});
        }
        return shapes;
    }

    static Map<String, long[]> routerShapes(MoeConfig config) {
        Map<String, long[]> shapes = new LinkedHashMap<>();
        for (int layer = 0; layer < config.numLayers(); layer++) {
            shapes.put(
                    "model.layers." + layer + "." + ROUTER,
                    new long[] {config.numExperts(), config.hiddenSize()});
        }
        return shapes;
    }

    private static int rank(Map<String, Parameter> adapters) {
        for (Map.Entry<String, Parameter> entry : adapters.entrySet()) {
            if (entry.getKey().endsWith(LORA_A)) {
                return (int) entry.getValue().getArray().getShape().get(1);
            }
        }
        throw new IllegalArgumentException("There are no adapters to save: attach and train some");
    }

    private static void requireAll(Iterable<String> wanted, Set<String> given) {
        for (String name : wanted) {
            if (!given.contains(name)) {
                throw new IllegalArgumentException(
                        "There is no parameter '" + name + "': every layer needs its own");
            }
        }
    }

    private static float[] floats(String name, Parameter parameter, long[] shape) {
        try (NDArray array = parameter.getArray().stopGradient()) {
            if (!Arrays.equals(array.getShape().getShape(), shape)) {
                throw new IllegalArgumentException(
                        "Parameter '"
                                + name
                                + "' has the shape "
                                + array.getShape()
                                + ", not "
                                + Arrays.toString(shape));
            }
            return array.toFloatArray();
        }
    }

    private static String stackedName(String adapter) {
        // The parameters of a module are wrapped in their order, the last one outermost.
        return PREFIX
                + adapter.replace("." + GATE_UP, ".mlp.experts.base_layer")
                        .replace("." + DOWN, ".mlp.experts")
                + ".weight";
    }

    private static long[] stackedShape(String adapter, long[] shape) {
        return adapter.endsWith(LORA_A)
                ? new long[] {shape[0] * shape[1], shape[2]}
                : new long[] {shape[1], shape[2] * shape[0]};
    }

    /** [E, out, r] to [out, r, E]. */
    private static float[] expertsInnermost(float[] values, long[] shape) {
        int experts = (int) shape[0];
        int rows = (int) (shape[1] * shape[2]);
        float[] result = new float[values.length];
        for (int e = 0; e < experts; e++) {
            for (int i = 0; i < rows; i++) {
                result[i * experts + e] = values[e * rows + i];
            }
        }
        return result;
    }
}
