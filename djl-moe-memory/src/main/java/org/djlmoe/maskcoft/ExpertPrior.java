package org.djlmoe.maskcoft;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Locale;
import org.djlmoe.io.AtomicFiles;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;

/**
 * What MaskCoFT leaves for serving beside the weights: which experts of every layer are preferred,
 * and how strongly.
 *
 * <p>In a checkpoint folder it is the file {@code maskcoft.json}: {@code {"mask": [[0, 2, ...],
 * ...], "experts": E, "form": "additive", "beta": b, "protected_top": J, "logit_range": D}}, the
 * mask as ids of the preferred experts, a list a layer, each id once. An infinite beta, the hard
 * mask, is written as the string {@code "infinity"}. The logit range may be left out and is then 1;
 * only the form {@code "scaled"} uses it. What the others mean stands with {@link SelectionPrior}.
 *
 * @param mask the preferred experts
 * @param prior how strongly they are preferred
 */
public record ExpertPrior(ExpertMask mask, SelectionPrior prior) {

    /** The name of the file in a checkpoint folder. */
    public static final String FILE = "maskcoft.json";

    private static final Gson GSON = new GsonBuilder().setPrettyPrinting().create();

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
            layers.get(l).router().setPrior(mask.kept(l), prior);
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
     * Writes the prior into a checkpoint folder.
     *
     * @param folder the folder
     * @throws IOException if writing fails
     */
    public void save(Path folder) throws IOException {
        JsonObject json = new JsonObject();
        json.add("mask", GSON.toJsonTree(ids()));
        json.addProperty("experts", mask.numExperts());
        json.addProperty("form", prior.form().name().toLowerCase(Locale.ROOT));
        if (prior.isHardMask()) {
            json.addProperty("beta", "infinity");
        } else {
            json.addProperty("beta", prior.beta());
        }
        json.addProperty("protected_top", prior.protectedTop());
        json.addProperty("logit_range", prior.logitRange());
        AtomicFiles.writeString(folder.resolve(FILE), GSON.toJson(json) + "\n");
    }

    private int[][] ids() {
        int[][] ids = new int[mask.numLayers()][];
        for (int l = 0; l < ids.length; l++) {
            ids[l] = mask.experts(l);
        }
        return ids;
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
            JsonObject json = GSON.fromJson(Files.readString(file), JsonObject.class);
            int[][] ids = GSON.fromJson(json.get("mask"), int[][].class);
            int experts = json.get("experts").getAsInt();
            if (experts < 1) {
                throw new IllegalArgumentException(
                        "experts is " + experts + ": it must be 1 or more");
            }
            boolean[][] kept = new boolean[ids.length][experts];
            for (int l = 0; l < ids.length; l++) {
                for (int id : ids[l]) {
                    if (id < 0 || id >= experts) {
                        throw new IllegalArgumentException(
                                "layer " + l + " has expert " + id + " of " + experts);
                    }
                    if (kept[l][id]) {
                        throw new IllegalArgumentException(
                                "layer " + l + " has expert " + id + " twice");
                    }
                    kept[l][id] = true;
                }
            }
            String beta = json.get("beta").getAsString();
            SelectionPrior prior =
                    new SelectionPrior(
                            SelectionPrior.Form.valueOf(
                                    json.get("form").getAsString().toUpperCase(Locale.ROOT)),
                            beta.equals("infinity")
                                    ? Double.POSITIVE_INFINITY
                                    : Double.parseDouble(beta),
                            json.get("protected_top").getAsInt(),
                            json.has("logit_range") ? json.get("logit_range").getAsDouble() : 1);
            return new ExpertPrior(ExpertMask.of(kept), prior);
        } catch (JsonParseException
                | NullPointerException
                | IllegalStateException
                | UnsupportedOperationException
                | IllegalArgumentException e) {
            throw new IllegalArgumentException(
                    file + " is not a MaskCoFT prior: " + e.getMessage(), e);
        }
    }
}
