package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.stream.Stream;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.MethodSource;

/**
 * Against traces of {@code torch.optim.AdamW}, made by {@code
 * integration-tests/reference/make_adamw_traces.py}.
 */
class TorchTraceTest {

    private static final double TOLERANCE = 1e-6;

    private static JsonObject traces() throws IOException {
        try (InputStream in = TorchTraceTest.class.getResourceAsStream("adamw_traces.json")) {
            return JsonParser.parseReader(new InputStreamReader(in, StandardCharsets.UTF_8))
                    .getAsJsonObject();
        }
    }

    static Stream<Arguments> cases() throws IOException {
        List<Arguments> all = new ArrayList<>();
        for (JsonElement trace : traces().getAsJsonArray("cases")) {
            String name = trace.getAsJsonObject().get("name").getAsString();
            for (boolean fused : new boolean[] {true, false}) {
                for (long bucket : new long[] {5, 1 << 22}) {
                    all.add(Arguments.of(name, fused, bucket));
                }
            }
        }
        return all.stream();
    }

    @ParameterizedTest(name = "{0}, fused {1}, buckets of {2}")
    @MethodSource("cases")
    void step_asRecorded_weightsAndStateEqualTorch(String name, boolean fused, long bucket)
            throws IOException {
        JsonObject trace = null;
        for (JsonElement element : traces().getAsJsonArray("cases")) {
            if (element.getAsJsonObject().get("name").getAsString().equals(name)) {
                trace = element.getAsJsonObject();
            }
        }
        Map<String, Shape> shapes = new LinkedHashMap<>();
        traces().getAsJsonObject("shapes")
                .entrySet()
                .forEach(e -> shapes.put(e.getKey(), new Shape(longs(e.getValue()))));

        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = optimizer(trace, fused, bucket)) {
            Map<String, NDArray> weights = new LinkedHashMap<>();
            shapes.forEach(
                    (path, shape) ->
                            weights.put(path, values(manager, 0, weights.size(), shape, 2, 1)));
            double scale = number(trace, "scale", 1);
            int late = (int) number(trace, "late", 1);
            int step = 0;
            for (JsonElement element : trace.getAsJsonArray("steps")) {
                JsonObject expected = element.getAsJsonObject();
                while (step < expected.get("step").getAsInt()) {
                    step++;
                    List<Slot> slots = new ArrayList<>();
                    int index = 0;
                    for (String path : shapes.keySet()) {
                        if (!path.startsWith("late.") || step >= late) {
                            NDArray gradient =
                                    values(manager, step, index, shapes.get(path), 0, scale);
                            slots.add(new Slot(path, path, weights.get(path), gradient));
                        }
                        index++;
                    }
                    optimizer.step(slots);
                    slots.forEach(slot -> slot.gradient().close());
                }
                compare(manager, optimizer, weights, expected);
            }
        }
    }

    private static void compare(
            NDManager manager,
            OffloadStreamAdamW optimizer,
            Map<String, NDArray> weights,
            JsonObject expected) {
        String at = "step " + expected.get("step").getAsInt() + " ";
        if (expected.has("norm")) {
            double norm = expected.get("norm").getAsDouble();
            assertEquals(norm, optimizer.globalNorm(), TOLERANCE * norm, at + "norm");
        }
        AdamWState state = optimizer.state();
        for (Map.Entry<String, NDArray> weight : weights.entrySet()) {
            String path = weight.getKey();
            JsonArray w = expected.getAsJsonObject("weights").getAsJsonArray(path);
            float[] actual = weight.getValue().toFloatArray();
            for (int i = 0; i < actual.length; i++) {
                double e = w.get(i).getAsDouble();
                assertEquals(e, actual[i], TOLERANCE * Math.abs(e), at + path);
            }
            if (expected.getAsJsonObject("count").has(path)) {
                assertEquals(
                        expected.getAsJsonObject("count").get(path).getAsLong(), state.step(path));
                sameScale(
                        expected.getAsJsonObject("exp_avg").getAsJsonArray(path),
                        state.expAvg(manager, path).toFloatArray(),
                        at + path);
                sameScale(
                        expected.getAsJsonObject("exp_avg_sq").getAsJsonArray(path),
                        state.expAvgSq(manager, path).toFloatArray(),
                        at + path);
            } else {
                assertTrue(!state.paths().contains(path), path);
            }
        }
    }

    /** A running mean may come close to zero, so the tensor's largest element sets the scale. */
    private static void sameScale(JsonArray expected, float[] actual, String message) {
        double largest = 0;
        for (JsonElement e : expected) {
            largest = Math.max(largest, Math.abs(e.getAsDouble()));
        }
        for (int i = 0; i < actual.length; i++) {
            assertEquals(expected.get(i).getAsDouble(), actual[i], TOLERANCE * largest, message);
        }
    }

    private static OffloadStreamAdamW optimizer(JsonObject trace, boolean fused, long bucket) {
        OffloadStreamAdamW.Builder builder =
                OffloadStreamAdamW.builder()
                        .setLearningRateTracker(Tracker.fixed((float) number(trace, "lr", 0)))
                        .optWeightDecay(number(trace, "decay", 0))
                        .optEpsilon(number(trace, "epsilon", 1e-8))
                        .optBeta1(number(trace, "beta1", 0.9))
                        .optBeta2(number(trace, "beta2", 0.999))
                        .optBucketElements(bucket);
        if (trace.has("clip_norm")) {
            builder.optClipNorm(number(trace, "clip_norm", 0));
        }
        if (trace.has("clip_value")) {
            builder.optClipValue(number(trace, "clip_value", 0));
        }
        if (trace.has("group")) {
            String prefix = trace.get("group").getAsString();
            builder.optGroup(
                    path -> path.startsWith(prefix),
                    number(trace, "multiplier", 1),
                    number(trace, "group_decay", 0));
        }
        return builder.build(fused ? AdamWKernels.fused() : AdamWKernels.plain());
    }

    private static double number(JsonObject trace, String key, double otherwise) {
        return trace.has(key) ? trace.get(key).getAsDouble() : otherwise;
    }

    private static long[] longs(JsonElement array) {
        long[] out = new long[array.getAsJsonArray().size()];
        for (int i = 0; i < out.length; i++) {
            out[i] = array.getAsJsonArray().get(i).getAsLong();
        }
        return out;
    }

    private static NDArray values(
            NDManager manager, int step, int parameter, Shape shape, double offset, double factor) {
        float[] x = new float[(int) shape.size()];
        for (int i = 0; i < x.length; i++) {
            long hash = (step * 7919L + parameter * 104729L + i * 1299709L + 12345) % (1L << 31);
            hash = (hash * 1103515245L + 12345) % (1L << 31);
            x[i] = (float) (offset + (hash / 32768 - 32768) / 32768.0 * factor);
        }
        return manager.create(x, shape);
    }
}
