package org.djlmoe.maskcoft;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonPrimitive;
import java.io.IOException;
import java.nio.charset.CharacterCodingException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import org.djlmoe.io.AtomicFiles;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.SelectionPrior;

/**
 * What MaskCoFT leaves for serving beside the weights: which experts of every layer are preferred,
 * and how strongly.
 *
 * <p>In a checkpoint folder it is the file {@code maskcoft.json}: {@code {"experts": E, "mask":
 * [[0, 2, ...], ...], "form": "additive", "beta": b, "protected_top": J, "logit_range": [D, ...],
 * "weights": "all"}}, the mask as ids of the preferred experts, a list a layer, each id once. An
 * infinite beta, the hard mask, is written as the string {@code "infinity"}. The logit range, a
 * number a layer or one for all, may be left out and is then 1; only the form {@code "scaled"} uses
 * it. Weights may be left out and are then {@code "all"}. What the keys mean stands with {@link
 * SelectionPrior} and {@link MaskedWeights}. The same mask, and what else is an array, lies in
 * {@code maskcoft.safetensors} beside it.
 *
 * @param mask the preferred experts
 * @param prior how strongly they are preferred; its logit range is overruled by the layers'
 * @param logitRanges D of every layer, see {@link SelectionPrior#meanLogitRange}
 * @param weights where combine weights come from; {@link MaskedWeights#KEPT} with a hard mask alone
 */
public record ExpertPrior(
        ExpertMask mask, SelectionPrior prior, List<Double> logitRanges, MaskedWeights weights) {

    /** The name of the file in a checkpoint folder. */
    public static final String FILE = "maskcoft.json";

    private static final Gson GSON = new GsonBuilder().setPrettyPrinting().create();

    /** Checks that the parts fit each other. */
    public ExpertPrior {
        logitRanges = List.copyOf(logitRanges);
        if (logitRanges.size() != mask.numLayers()) {
            throw new IllegalArgumentException(
                    "The mask has "
                            + mask.numLayers()
                            + " layers, but there are "
                            + logitRanges.size()
                            + " logit ranges");
        }
        logitRanges.forEach(prior::withLogitRange);
        weights.check(prior);
    }

    /**
     * A prior of one logit range for all layers, with combine weights from all experts.
     *
     * @param mask the preferred experts
     * @param prior how strongly they are preferred
     */
    public ExpertPrior(ExpertMask mask, SelectionPrior prior) {
        this(
                mask,
                prior,
                Collections.nCopies(mask.numLayers(), prior.logitRange()),
                MaskedWeights.ALL);
    }

    /**
     * Returns this prior with the logit range of every layer.
     *
     * @param ranges D of every layer
     * @return the prior
     */
    public ExpertPrior withLogitRanges(List<Double> ranges) {
        return new ExpertPrior(mask, prior, ranges, weights);
    }

    /**
     * Returns this prior with another rule for combine weights.
     *
     * @param rule where they come from
     * @return the prior
     */
    public ExpertPrior withWeights(MaskedWeights rule) {
        return new ExpertPrior(mask, prior, logitRanges, rule);
    }

    /**
     * Returns this mask under another prior, with combine weights from all experts unless both are
     * hard masks.
     *
     * @param other how strongly the experts are preferred
     * @return the prior
     */
    public ExpertPrior withPrior(SelectionPrior other) {
        return new ExpertPrior(
                mask, other, logitRanges, other.isHardMask() ? weights : MaskedWeights.ALL);
    }

    /**
     * Has every layer's router rank by this prior.
     *
     * @param decoder the decoder
     * @throws IllegalArgumentException if the mask has other layers or experts than the decoder
     */
    public void apply(MoeDecoder decoder) {
        List<MoeBlock> layers = decoder.moeBlocks();
        if (mask.numLayers() != layers.size()) {
            throw new IllegalArgumentException(
                    "The mask has "
                            + mask.numLayers()
                            + " layers, the decoder has "
                            + layers.size());
        }
        for (int l = 0; l < layers.size(); l++) {
            layers.get(l)
                    .router()
                    .setPrior(mask.kept(l), prior.withLogitRange(logitRanges.get(l)), weights);
        }
    }

    /**
     * Has every layer's router rank by its own logits.
     *
     * @param decoder the decoder
     */
    public static void clear(MoeDecoder decoder) {
        decoder.moeBlocks().forEach(layer -> layer.router().clearPrior());
    }

    /**
     * Returns whether ranking by this prior is ranking by the router's softmax plus a fixed array:
     * in the form p + beta m, and for a hard mask, where the array is minus infinity.
     *
     * @return whether there is a selection bias
     */
    public boolean hasSelectionBias() {
        return prior.form() == SelectionPrior.Form.PROBABILITY || prior.isHardMask();
    }

    /**
     * Returns what a loader adds to the softmax scores of a layer's router to rank its experts, as
     * DeepSeek-V3's {@code e_score_correction_bias} is added to sigmoid scores. It ranks as this
     * prior does if that protects none of the router's own choices (J = 0); a loader that only adds
     * a bias cannot protect any.
     *
     * @param layer the MoE layer
     * @return [experts]: beta for preferred experts and 0 for the others; under a hard mask 0 and
     *     minus infinity
     * @throws IllegalStateException if the prior is no such bias, see {@link #hasSelectionBias}
     */
    public float[] selectionBias(int layer) {
        if (!hasSelectionBias()) {
            throw new IllegalStateException(
                    "A prior of the form "
                            + prior.form().name().toLowerCase(Locale.ROOT)
                            + " is added to logits: only the form probability is a bias of the scores");
        }
        float[] bias = new float[mask.numExperts()];
        for (int e = 0; e < bias.length; e++) {
            boolean kept = mask.isKept(layer, e);
            if (prior.isHardMask()) {
                bias[e] = kept ? 0 : Float.NEGATIVE_INFINITY;
            } else {
                bias[e] = kept ? (float) prior.beta() : 0;
            }
        }
        return bias;
    }

    /**
     * Writes the prior into a checkpoint folder.
     *
     * @param folder the folder
     * @throws IOException if writing fails
     */
    public void save(Path folder) throws IOException {
        save(folder, null);
    }

    /**
     * Writes the prior and the mask logits that it comes from into a checkpoint folder.
     *
     * @param folder the folder
     * @param theta [layers, experts], or null if they are not known
     * @throws IOException if writing fails
     */
    public void save(Path folder, double[][] theta) throws IOException {
        MaskFile.write(folder, this, theta);
        JsonObject json = GSON.fromJson(mask.toJson(), JsonObject.class);
        json.addProperty("form", prior.form().name().toLowerCase(Locale.ROOT));
        if (prior.isHardMask()) {
            json.addProperty("beta", "infinity");
        } else {
            json.addProperty("beta", prior.beta());
        }
        json.addProperty("protected_top", prior.protectedTop());
        json.add("logit_range", GSON.toJsonTree(logitRanges));
        json.addProperty("weights", weights.name().toLowerCase(Locale.ROOT));
        AtomicFiles.writeString(folder.resolve(FILE), GSON.toJson(json) + "\n");
    }

    /**
     * Removes what {@link #save} writes, if it is there.
     *
     * @param folder the folder
     * @throws IOException if a file cannot be removed
     */
    public static void delete(Path folder) throws IOException {
        Files.deleteIfExists(folder.resolve(FILE));
        Files.deleteIfExists(folder.resolve(MaskFile.NAME));
    }

    /**
     * Reads the mask logits of a checkpoint folder.
     *
     * @param folder the folder
     * @return theta, [layers, experts], or null if the folder has none
     * @throws IOException if a file cannot be read, or has other layers or experts than the mask
     */
    public static double[][] loadTheta(Path folder) throws IOException {
        ExpertPrior prior = load(folder);
        return prior == null ? null : MaskFile.readTheta(folder, prior.mask);
    }

    /**
     * Reads the prior of a checkpoint folder.
     *
     * @param folder the folder
     * @return the prior, or null if the folder has none
     * @throws IOException if the file cannot be read
     * @throws IllegalArgumentException if it is not what {@link #save} writes
     */
    public static ExpertPrior load(Path folder) throws IOException {
        Path file = folder.resolve(FILE);
        if (!Files.exists(file)) {
            return null;
        }
        try {
            String text = Files.readString(file);
            ExpertMask mask = ExpertMask.fromJson(text);
            JsonObject json = GSON.fromJson(text, JsonObject.class);
            JsonPrimitive beta = value(json.get("beta"), "beta");
            SelectionPrior prior =
                    new SelectionPrior(
                            choice(SelectionPrior.Form.class, json.get("form"), "form"),
                            beta.getAsString().equals("infinity")
                                    ? Double.POSITIVE_INFINITY
                                    : number(beta, "beta"),
                            whole(json.get("protected_top"), "protected_top"),
                            1);
            return new ExpertPrior(
                    mask,
                    prior,
                    ranges(json.get("logit_range"), mask.numLayers()),
                    json.has("weights")
                            ? choice(MaskedWeights.class, json.get("weights"), "weights")
                            : MaskedWeights.ALL);
        } catch (CharacterCodingException e) {
            throw new IllegalArgumentException(
                    file + " is not a MaskCoFT prior: it is not text in UTF-8", e);
        } catch (JsonParseException | IllegalArgumentException e) {
            throw new IllegalArgumentException(
                    file + " is not a MaskCoFT prior: " + e.getMessage(), e);
        }
    }

    private static JsonPrimitive value(JsonElement json, String key) {
        if (json == null || json.isJsonNull()) {
            throw new IllegalArgumentException("\"" + key + "\" is missing");
        }
        if (!json.isJsonPrimitive()) {
            throw new IllegalArgumentException("\"" + key + "\" must be one value, not " + json);
        }
        return json.getAsJsonPrimitive();
    }

    private static double number(JsonElement json, String key) {
        JsonPrimitive value = value(json, key);
        try {
            return Double.parseDouble(value.getAsString());
        } catch (NumberFormatException e) {
            throw new IllegalArgumentException("\"" + key + "\" must be a number, not " + value, e);
        }
    }

    private static int whole(JsonElement json, String key) {
        double number = number(json, key);
        if (number != (int) number) {
            throw new IllegalArgumentException(
                    "\"" + key + "\" must be a whole number, not " + json);
        }
        return (int) number;
    }

    private static <E extends Enum<E>> E choice(Class<E> type, JsonElement json, String key) {
        String name = value(json, key).getAsString();
        List<String> names = new ArrayList<>();
        for (E constant : type.getEnumConstants()) {
            names.add(constant.name().toLowerCase(Locale.ROOT));
            if (names.get(names.size() - 1).equals(name.toLowerCase(Locale.ROOT))) {
                return constant;
            }
        }
        throw new IllegalArgumentException(
                "\"" + key + "\" must be one of " + String.join(", ", names) + ", not " + json);
    }

    /** A number a layer, one for all, or none, which is 1. */
    private static List<Double> ranges(JsonElement json, int layers) {
        if (json == null || !json.isJsonArray()) {
            return Collections.nCopies(layers, json == null ? 1 : number(json, "logit_range"));
        }
        List<Double> ranges = new ArrayList<>();
        json.getAsJsonArray().forEach(range -> ranges.add(number(range, "logit_range")));
        return ranges;
    }
}
