package org.djlmoe.checkpoint;

import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.TensorInfo;
import org.djlmoe.model.MoeConfig;

/**
 * Reads one adapter file: sorts its tensors into low-rank pieces of stacked parameters, whatever
 * the layout, then builds adapters of one rank and one scale from them.
 */
final class PeftReading {

    private static final Pattern STACKED =
            Pattern.compile(
                    "model\\.layers\\.(\\d{1,9})\\.mlp\\.experts\\.(base_layer\\.)?lora_([AB])\\.weight");
    private static final Pattern SINGLE =
            Pattern.compile(
                    "(model\\.layers\\.(\\d{1,9})\\.(?:block_sparse_moe|mlp)\\.experts\\.(\\d{1,9})"
                            + "\\.(w1|w2|w3|gate_proj|up_proj|down_proj))\\.lora_([AB])\\.weight");
    private static final Pattern WHOLE_ROUTER =
            Pattern.compile(
                    "model\\.layers\\.(\\d{1,9})\\.(?:block_sparse_moe|mlp)\\.gate\\.weight");

    /** A and B of some rows of one expert's matrix. */
    private record Factors(
            float[] a,
            float[] b,
            int rank,
            int in,
            int out,
            int firstRow,
            int expert,
            double scale) {}

    private final Path folder;
    private final MoeConfig config;
    private final PeftConfig peft;
    private final SafetensorsReader reader;
    private final Map<String, List<Factors>> pieces = new TreeMap<>();
    private final Map<String, float[]> routers = new TreeMap<>();

    PeftReading(Path folder, MoeConfig config, PeftConfig peft, SafetensorsReader reader) {
        this.folder = folder;
        this.config = config;
        this.peft = peft;
        this.reader = reader;
    }

    PeftAdapter run() throws IOException {
        boolean stacked = false;
        boolean single = false;
        for (String tensor : reader.names()) {
            String name =
                    tensor.startsWith(PeftAdapter.PREFIX)
                            ? tensor.substring(PeftAdapter.PREFIX.length())
                            : "";
            Matcher ofStack = STACKED.matcher(name);
            Matcher ofExpert = SINGLE.matcher(name);
            Matcher router = WHOLE_ROUTER.matcher(name);
            if (ofStack.matches()) {
                stacked = true;
            } else if (ofExpert.matches()) {
                single = true;
                if (ofExpert.group(5).equals("A")) {
                    single(tensor, ofExpert);
                } else if (!reader.names().contains(partner(tensor, "B", "A"))) {
                    throw missing(partner(tensor, "B", "A"));
                }
            } else if (router.matches()) {
                long[] shape = {config.numExperts(), config.hiddenSize()};
                String path =
                        "model.layers." + layer(tensor, router.group(1)) + "." + PeftAdapter.ROUTER;
                routers.put(path, read(tensor, shape));
            } else {
                throw wrong(
                        tensor,
                        "changes something other than experts and whole routers, which this model"
                                + " has no place for");
            }
        }
        if (stacked && single) {
            throw new CheckpointException(
                    reader.file() + ": mixes adapters of stacked and of single experts");
        }
        if (stacked) {
            stacked();
        }
        if (pieces.isEmpty()) {
            throw new CheckpointException(reader.file() + ": holds no adapter of experts");
        }
        if (!routers.isEmpty()) {
            for (String path : PeftAdapter.routerShapes(config).keySet()) {
                if (!routers.containsKey(path)) {
                    throw missing(PeftAdapter.PREFIX + path);
                }
            }
        }
        return build();
    }

    private void stacked() throws IOException {
        boolean named = false;
        for (int layer = 0; layer < config.numLayers(); layer++) {
            String prefix = "model.layers." + layer + ".";
            boolean gateUp = peft.targets(prefix + PeftAdapter.GATE_UP);
            boolean down = peft.targets(prefix + PeftAdapter.DOWN);
            named |= gateUp || down;
            String at = PeftAdapter.PREFIX + prefix + "mlp.experts.";
            if (gateUp) {
                stack(prefix + PeftAdapter.GATE_UP, at + (down ? "base_layer." : ""));
            }
            if (down) {
                stack(prefix + PeftAdapter.DOWN, at);
            }
        }
        if (!named) {
            throw new CheckpointException(
                    peft.file()
                            + ": target_parameters does not name the parameters of the experts."
                            + " Shapes do not tell which one a tensor belongs to: add \""
                            + PeftAdapter.GATE_UP
                            + "\" and \""
                            + PeftAdapter.DOWN
                            + "\", or the one that has an adapter");
        }
        for (String tensor : reader.names()) {
            Matcher name = STACKED.matcher(tensor.substring(PeftAdapter.PREFIX.length()));
            if (name.matches()) {
                String prefix = "model.layers." + layer(tensor, name.group(1)) + ".";
                boolean gateUp = peft.targets(prefix + PeftAdapter.GATE_UP);
                boolean both = gateUp && peft.targets(prefix + PeftAdapter.DOWN);
                if (name.group(2) != null && !both) {
                    throw wrong(
                            tensor,
                            "belongs to a second parameter of the experts, but target_parameters"
                                    + " names one");
                }
            }
        }
    }

    private void stack(String parameter, String at) throws IOException {
        int experts = config.numExperts();
        boolean isDown = parameter.endsWith(PeftAdapter.DOWN);
        int in = isDown ? config.intermediateSize() : config.hiddenSize();
        int out = isDown ? config.hiddenSize() : 2 * config.intermediateSize();
        int r = peft.rankOf(parameter);
        if (r < 1) {
            throw new CheckpointException(
                    peft.file()
                            + ": the rank of "
                            + parameter
                            + " is "
                            + r
                            + ": it must be 1 or more");
        }
        float[] a = read(at + "lora_A.weight", new long[] {(long) experts * r, in});
        float[] b = read(at + "lora_B.weight", new long[] {out, (long) r * experts});
        double scale = peft.scaleOf(parameter, r);
        for (int e = 0; e < experts; e++) {
            float[] ownA = Arrays.copyOfRange(a, e * r * in, (e + 1) * r * in);
            float[] ownB = new float[out * r];
            for (int i = 0; i < ownB.length; i++) {
                ownB[i] = b[i * experts + e];
            }
            add(parameter, new Factors(ownA, ownB, r, in, out, 0, e, scale));
        }
    }

    private void single(String tensorA, Matcher name) throws IOException {
        int layer = layer(tensorA, name.group(2));
        int expert = Integer.parseInt(name.group(3));
        if (expert >= config.numExperts()) {
            throw wrong(tensorA, "is for an expert beyond the model's " + config.numExperts());
        }
        String matrix = name.group(4);
        boolean isDown = matrix.equals("w2") || matrix.equals("down_proj");
        boolean isUp = matrix.equals("w3") || matrix.equals("up_proj");
        int hidden = config.hiddenSize();
        int inner = config.intermediateSize();
        int in = isDown ? inner : hidden;
        int out = isDown ? hidden : inner;
        long[] shape = reader.info(tensorA).shape();
        int r = shape.length == 2 ? (int) shape[0] : 0;
        if (r < 1) {
            throw wrong(tensorA, "has the shape " + Arrays.toString(shape) + ", not [rank, in]");
        }
        float[] a = read(tensorA, new long[] {r, in});
        float[] b = read(partner(tensorA, "A", "B"), new long[] {out, r});
        String parameter =
                "model.layers." + layer + "." + (isDown ? PeftAdapter.DOWN : PeftAdapter.GATE_UP);
        double scale = peft.scaleOf(name.group(1), r);
        add(parameter, new Factors(a, b, r, in, out, isUp ? inner : 0, expert, scale));
    }

    private void add(String parameter, Factors factors) {
        pieces.computeIfAbsent(parameter, key -> new ArrayList<>()).add(factors);
    }

    private PeftAdapter build() {
        double scale = pieces.values().iterator().next().get(0).scale();
        int rank = 0;
        for (List<Factors> list : pieces.values()) {
            int[] ranks = new int[config.numExperts()];
            for (Factors f : list) {
                ranks[f.expert()] += f.rank();
                rank = Math.max(rank, ranks[f.expert()]);
            }
        }
        Map<String, float[]> adapters = new LinkedHashMap<>();
        for (Map.Entry<String, long[]> entry : PeftAdapter.shapes(config, rank).entrySet()) {
            long[] shape = entry.getValue();
            adapters.put(entry.getKey(), new float[(int) (shape[0] * shape[1] * shape[2])]);
        }
        for (Map.Entry<String, List<Factors>> entry : pieces.entrySet()) {
            float[] a = adapters.get(entry.getKey() + PeftAdapter.LORA_A);
            float[] b = adapters.get(entry.getKey() + PeftAdapter.LORA_B);
            int rows = b.length / (config.numExperts() * rank);
            int[] used = new int[config.numExperts()];
            for (Factors f : entry.getValue()) {
                int e = f.expert();
                System.arraycopy(f.a(), 0, a, (e * rank + used[e]) * f.in(), f.rank() * f.in());
                for (int o = 0; o < f.out(); o++) {
                    for (int j = 0; j < f.rank(); j++) {
                        float value = f.b()[o * f.rank() + j];
                        b[(e * rows + f.firstRow() + o) * rank + used[e] + j] =
                                f.scale() == scale ? value : (float) (value * (f.scale() / scale));
                    }
                }
                used[e] += f.rank();
            }
        }
        return new PeftAdapter(folder, rank, scale * rank, adapters, routers);
    }

    private int layer(String tensor, String number) throws CheckpointException {
        int layer = Integer.parseInt(number);
        if (layer >= config.numLayers()) {
            throw wrong(tensor, "is for a layer beyond the model's " + config.numLayers());
        }
        return layer;
    }

    private float[] read(String tensor, long[] shape) throws IOException {
        if (!reader.names().contains(tensor)) {
            throw missing(tensor);
        }
        TensorInfo info = reader.info(tensor);
        if (!Arrays.equals(info.shape(), shape)) {
            throw wrong(
                    tensor,
                    "has the shape "
                            + Arrays.toString(info.shape())
                            + ", but the model and "
                            + PeftAdapter.CONFIG_FILE
                            + " ask for "
                            + Arrays.toString(shape));
        }
        if (!info.dtype().isReadableAsF32()) {
            throw wrong(tensor, "holds " + info.dtype() + ", not floating point");
        }
        FloatBuffer values = FloatBuffer.allocate((int) info.elements());
        reader.readF32(tensor, 0, values);
        return values.array();
    }

    private static String partner(String tensor, String from, String to) {
        return tensor.replace(".lora_" + from + ".", ".lora_" + to + ".");
    }

    private CheckpointException missing(String tensor) {
        return new CheckpointException(reader.file() + ": lacks tensor '" + tensor + "'");
    }

    private CheckpointException wrong(String tensor, String what) {
        return new CheckpointException(reader.file() + ": tensor '" + tensor + "' " + what);
    }
}
