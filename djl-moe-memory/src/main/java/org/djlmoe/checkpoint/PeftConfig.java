package org.djlmoe.checkpoint;

import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.regex.Pattern;
import java.util.regex.PatternSyntaxException;
import org.djlmoe.io.AtomicFiles;

/**
 * What {@code adapter_config.json} says about an adapter.
 *
 * @param file where it stands, for messages
 * @param rank r where no pattern says otherwise
 * @param alpha the scaling numerator where no pattern says otherwise
 * @param rootScale whether products are scaled by alpha over the root of r
 * @param rankPattern names to ranks
 * @param alphaPattern names to numerators
 * @param targetParameters parameters with adapters, as suffixes of their names
 */
record PeftConfig(
        Path file,
        int rank,
        double alpha,
        boolean rootScale,
        Map<Pattern, Double> rankPattern,
        Map<Pattern, Double> alphaPattern,
        List<String> targetParameters) {

    /** Whether the file names a parameter as one with an adapter. */
    boolean targets(String parameter) {
        return targetParameters.stream()
                .anyMatch(t -> parameter.equals(t) || parameter.endsWith("." + t));
    }

    int rankOf(String name) {
        return (int) pattern(rankPattern, name, rank);
    }

    double scaleOf(String name, int rankOfName) {
        double numerator = pattern(alphaPattern, name, alpha);
        return numerator / (rootScale ? Math.sqrt(rankOfName) : rankOfName);
    }

    private static double pattern(Map<Pattern, Double> patterns, String name, double otherwise) {
        for (Map.Entry<Pattern, Double> entry : patterns.entrySet()) {
            if (entry.getKey().matcher(name).matches()) {
                return entry.getValue();
            }
        }
        return otherwise;
    }

    static PeftConfig read(Path file) throws IOException {
        JsonObject json;
        try (Reader text = Files.newBufferedReader(file)) {
            JsonElement root = JsonParser.parseReader(text);
            if (!root.isJsonObject()) {
                throw new CheckpointException(file + ": not a JSON object");
            }
            json = root.getAsJsonObject();
        } catch (JsonParseException e) {
            throw new CheckpointException(file + ": not JSON: " + e.getMessage());
        }
        try {
            return of(file, json);
        } catch (ClassCastException
                | IllegalStateException
                | UnsupportedOperationException
                | NumberFormatException
                | PatternSyntaxException e) {
            throw new CheckpointException(
                    file + ": a value has another type than PEFT writes: " + e.getMessage());
        }
    }

    private static PeftConfig of(Path file, JsonObject json) throws CheckpointException {
        JsonElement type = value(json, "peft_type");
        if (type == null || !"LORA".equals(type.getAsString())) {
            throw new CheckpointException(
                    file + ": peft_type is " + type + "; only LORA adapters can be loaded");
        }
        for (String unsupported :
                List.of("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora")) {
            JsonElement on = value(json, unsupported);
            if (on != null && on.getAsBoolean()) {
                throw new CheckpointException(
                        file + ": " + unsupported + " is true, which these adapters cannot do");
            }
        }
        JsonElement bias = value(json, "bias");
        if (bias != null && !"none".equals(bias.getAsString())) {
            throw new CheckpointException(
                    file + ": bias is " + bias + ", but the model has no biases");
        }
        JsonElement rank = value(json, "r");
        JsonElement alpha = value(json, "lora_alpha");
        if (rank == null || alpha == null) {
            throw new CheckpointException(
                    file + ": lacks " + (rank == null ? "r" : "lora_alpha") + " of the adapters");
        }
        JsonElement root = value(json, "use_rslora");
        return new PeftConfig(
                file,
                rank.getAsInt(),
                alpha.getAsDouble(),
                root != null && root.getAsBoolean(),
                patterns(value(json, "rank_pattern")),
                patterns(value(json, "alpha_pattern")),
                names(value(json, "target_parameters")));
    }

    private static JsonElement value(JsonObject json, String key) {
        JsonElement element = json.get(key);
        return element == null || element.isJsonNull() ? null : element;
    }

    /** PEFT matches a key as a regular expression against the end of a name. */
    private static Map<Pattern, Double> patterns(JsonElement json) {
        Map<Pattern, Double> patterns = new LinkedHashMap<>();
        if (json != null) {
            json.getAsJsonObject()
                    .entrySet()
                    .forEach(
                            e ->
                                    patterns.put(
                                            Pattern.compile("(.*\\.)?(" + e.getKey() + ")"),
                                            e.getValue().getAsDouble()));
        }
        return patterns;
    }

    private static List<String> names(JsonElement json) {
        List<String> names = new ArrayList<>();
        if (json != null) {
            json.getAsJsonArray().forEach(name -> names.add(name.getAsString()));
        }
        return names;
    }

    /** Writes the file for adapters on all experts. */
    static void write(Path file, int rank, double alpha, String baseModel, String... modulesToSave)
            throws IOException {
        JsonObject json = new JsonObject();
        json.addProperty("peft_type", "LORA");
        json.addProperty("task_type", "CAUSAL_LM");
        json.addProperty("base_model_name_or_path", baseModel);
        json.addProperty("inference_mode", true);
        json.addProperty("r", rank);
        if (alpha == Math.rint(alpha)) {
            json.addProperty("lora_alpha", (long) alpha);
        } else {
            json.addProperty("lora_alpha", alpha);
        }
        json.addProperty("lora_dropout", 0.0);
        json.addProperty("lora_bias", false);
        json.addProperty("bias", "none");
        json.addProperty("fan_in_fan_out", false);
        json.addProperty("init_lora_weights", true);
        json.addProperty("use_dora", false);
        json.addProperty("use_rslora", false);
        json.add("rank_pattern", new JsonObject());
        json.add("alpha_pattern", new JsonObject());
        json.add("target_modules", new JsonArray());
        json.add("target_parameters", array(PeftAdapter.GATE_UP, PeftAdapter.DOWN));
        json.add("modules_to_save", modulesToSave.length == 0 ? null : array(modulesToSave));
        String text = new GsonBuilder().setPrettyPrinting().serializeNulls().create().toJson(json);
        AtomicFiles.writeString(file, text + "\n");
    }

    private static JsonArray array(String... names) {
        JsonArray array = new JsonArray();
        for (String name : names) {
            array.add(name);
        }
        return array;
    }
}
