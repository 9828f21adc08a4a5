package org.djlmoe.routing;

import com.google.gson.Gson;
import com.google.gson.JsonParseException;
import com.google.gson.annotations.SerializedName;
import java.util.Arrays;
import java.util.BitSet;
import java.util.SplittableRandom;
import java.util.stream.IntStream;

/**
 * The experts that are kept in each MoE layer: a boolean [layers, experts], immutable.
 *
 * <p>A mask says nothing about what happens to a dropped expert: under a hard mask it is never
 * selected, under a {@link SelectionPrior} it is only ranked behind.
 */
public final class ExpertMask {

    private static final Gson GSON = new Gson();

    private final int experts;
    private final BitSet[] kept;

    private ExpertMask(int experts, BitSet[] kept) {
        this.experts = experts;
        this.kept = kept;
    }

    /**
     * Keeps every expert.
     *
     * @param layers the number of MoE layers
     * @param experts the number of experts a layer
     * @return the mask that drops nothing
     */
    public static ExpertMask all(int layers, int experts) {
        checkShape(layers, experts);
        BitSet[] kept = new BitSet[layers];
        for (int l = 0; l < layers; l++) {
            kept[l] = new BitSet(experts);
            kept[l].set(0, experts);
        }
        return new ExpertMask(experts, kept);
    }

    /**
     * Keeps what is marked.
     *
     * @param kept whether an expert is kept, [layers, experts]
     * @return the mask
     */
    public static ExpertMask of(boolean[][] kept) {
        checkShape(kept.length, kept.length == 0 ? 0 : kept[0].length);
        int experts = kept[0].length;
        BitSet[] sets = new BitSet[kept.length];
        for (int l = 0; l < kept.length; l++) {
            checkRow(l, kept[l].length, experts);
            sets[l] = new BitSet(experts);
            for (int e = 0; e < experts; e++) {
                sets[l].set(e, kept[l][e]);
            }
        }
        return new ExpertMask(experts, sets);
    }

    /**
     * Keeps the n highest scores of each layer; of equal scores the lower id is kept.
     *
     * @param scores a score per expert, [layers, experts]; infinite is allowed, NaN is not
     * @param n how many experts to keep a layer
     * @return the mask
     */
    public static ExpertMask topN(double[][] scores, int n) {
        return topN(scores, n, 0);
    }

    /**
     * Keeps the n highest scores of each layer, and of all others, whatever their layer, the
     * highest: layers share a number of places. Of equal scores the lower id, then the lower layer
     * is kept.
     *
     * @param scores a score per expert, [layers, experts], comparable across layers; infinite is
     *     allowed, NaN is not
     * @param n how many experts every layer keeps at least
     * @param shared how many more are kept over all layers
     * @return the mask
     */
    public static ExpertMask topN(double[][] scores, int n, int shared) {
        int experts = scores.length == 0 ? 0 : scores[0].length;
        checkShape(scores.length, experts);
        checkKeep(n, experts);
        BitSet[] kept = new BitSet[scores.length];
        for (int l = 0; l < scores.length; l++) {
            checkRow(l, scores[l].length, experts);
            for (int e = 0; e < experts; e++) {
                if (Double.isNaN(scores[l][e])) {
                    throw new IllegalArgumentException(
                            "The score of expert " + e + " in layer " + l + " is NaN");
                }
            }
            kept[l] = new BitSet(experts);
            for (int e : Ranking.top(scores[l], n)) {
                kept[l].set(e);
            }
        }
        int places = scores.length * (experts - n);
        if (shared < 0 || shared > places) {
            throw new IllegalArgumentException(
                    "Cannot share %d places: beyond %d experts a layer there are %d"
                            .formatted(shared, n, places));
        }
        int[] left =
                IntStream.range(0, scores.length * experts)
                        .filter(i -> !kept[i / experts].get(i % experts))
                        .toArray();
        double[] leftScores =
                Arrays.stream(left).mapToDouble(i -> scores[i / experts][i % experts]).toArray();
        for (int at : Ranking.top(leftScores, shared)) {
            kept[left[at] / experts].set(left[at] % experts);
        }
        return new ExpertMask(experts, kept);
    }

    /**
     * Keeps n experts of each layer, drawn uniformly.
     *
     * @param layers the number of MoE layers
     * @param experts the number of experts a layer
     * @param n how many experts to keep a layer
     * @param seed decides the draw
     * @return the mask
     */
    public static ExpertMask random(int layers, int experts, int n, long seed) {
        checkShape(layers, experts);
        checkKeep(n, experts);
        SplittableRandom random = new SplittableRandom(seed);
        BitSet[] kept = new BitSet[layers];
        for (int l = 0; l < layers; l++) {
            int[] ids = IntStream.range(0, experts).toArray();
            kept[l] = new BitSet(experts);
            for (int i = 0; i < n; i++) {
                int j = random.nextInt(i, experts);
                kept[l].set(ids[j]);
                ids[j] = ids[i];
            }
        }
        return new ExpertMask(experts, kept);
    }

    /**
     * Keeps the n most used experts of each layer; of equals the lower id is kept.
     *
     * @param usage how often an expert was selected, [layers, experts]
     * @param n how many experts to keep a layer
     * @return the mask
     */
    public static ExpertMask mostFrequent(long[][] usage, int n) {
        double[][] scores = new double[usage.length][];
        for (int l = 0; l < usage.length; l++) {
            scores[l] = Arrays.stream(usage[l]).asDoubleStream().toArray();
        }
        return topN(scores, n);
    }

    /**
     * Reads what {@link #toJson()} wrote. Further keys are passed over, so that the object may be
     * part of a larger one.
     *
     * @param json {@code {"experts":8,"mask":[[0,1,5],[2,3,4]]}}, one list of kept ids a layer
     * @return the mask
     * @throws IllegalArgumentException if the text is no such object, or names an expert that does
     *     not exist or twice
     */
    public static ExpertMask fromJson(String json) {
        Json read;
        try {
            read = GSON.fromJson(json, Json.class);
        } catch (JsonParseException e) {
            throw new IllegalArgumentException(
                    "Not an expert mask: it must be a JSON object with a number \"experts\" and a list"
                            + " of ids a layer \"mask\"",
                    e);
        }
        if (read == null || read.kept == null || read.numExperts == 0) {
            throw new IllegalArgumentException(
                    "Not an expert mask: \"experts\" and \"mask\" are required");
        }
        checkShape(read.kept.length, read.numExperts);
        BitSet[] kept = new BitSet[read.kept.length];
        for (int l = 0; l < kept.length; l++) {
            if (read.kept[l] == null) {
                throw new IllegalArgumentException("Expert mask: layer " + l + " has no list");
            }
            kept[l] = new BitSet(read.numExperts);
            for (int e : read.kept[l]) {
                if (e < 0 || e >= read.numExperts || kept[l].get(e)) {
                    throw new IllegalArgumentException(
                            "Expert mask: layer %d names expert %d, which is not one of 0..%d or listed twice"
                                    .formatted(l, e, read.numExperts - 1));
                }
                kept[l].set(e);
            }
        }
        return new ExpertMask(read.numExperts, kept);
    }

    /**
     * Writes the mask as one JSON object; see {@link #fromJson}.
     *
     * @return the JSON text
     */
    public String toJson() {
        Json json = new Json();
        json.numExperts = experts;
        json.kept = new int[kept.length][];
        for (int l = 0; l < kept.length; l++) {
            json.kept[l] = experts(l);
        }
        return GSON.toJson(json);
    }

    /**
     * Returns the number of MoE layers.
     *
     * @return the number of MoE layers
     */
    public int numLayers() {
        return kept.length;
    }

    /**
     * Returns the number of experts a layer.
     *
     * @return the number of experts, kept and dropped
     */
    public int numExperts() {
        return experts;
    }

    /**
     * Returns whether an expert is kept.
     *
     * @param layer the MoE layer
     * @param expert the expert id
     * @return whether it is kept
     */
    public boolean isKept(int layer, int expert) {
        if (expert < 0 || expert >= experts) {
            throw new IndexOutOfBoundsException("Expert " + expert + " of " + experts);
        }
        return kept[layer].get(expert);
    }

    /**
     * Returns the kept set of a layer.
     *
     * @param layer the MoE layer
     * @return whether an expert is kept, [experts]; a copy
     */
    public boolean[] kept(int layer) {
        boolean[] row = new boolean[experts];
        kept[layer].stream().forEach(e -> row[e] = true);
        return row;
    }

    /**
     * Returns the ids that a layer keeps.
     *
     * @param layer the MoE layer
     * @return the kept ids, ascending; a copy
     */
    public int[] experts(int layer) {
        return kept[layer].stream().toArray();
    }

    /**
     * Returns how many experts a layer keeps.
     *
     * @param layer the MoE layer
     * @return the number of kept experts
     */
    public int count(int layer) {
        return kept[layer].cardinality();
    }

    @Override
    public boolean equals(Object o) {
        return o instanceof ExpertMask other
                && experts == other.experts
                && Arrays.equals(kept, other.kept);
    }

    @Override
    public int hashCode() {
        return 31 * experts + Arrays.hashCode(kept);
    }

    /** Draws one line a layer, {@code #} for a kept expert and {@code .} for a dropped one. */
    @Override
    public String toString() {
        StringBuilder sb = new StringBuilder();
        sb.append("ExpertMask ").append(kept.length).append(" x ").append(experts);
        for (int l = 0; l < kept.length; l++) {
            sb.append("%n  layer %-3d ".formatted(l));
            for (int e = 0; e < experts; e++) {
                sb.append(kept[l].get(e) ? '#' : '.');
            }
            sb.append("  ").append(count(l)).append(" kept");
        }
        return sb.toString();
    }

    private static void checkShape(int layers, int experts) {
        if (layers < 1 || experts < 1) {
            throw new IllegalArgumentException(
                    "A mask needs at least one layer and one expert, got %d x %d"
                            .formatted(layers, experts));
        }
    }

    private static void checkKeep(int n, int experts) {
        if (n < 1 || n > experts) {
            throw new IllegalArgumentException(
                    "Cannot keep %d of %d experts: choose 1 to %d".formatted(n, experts, experts));
        }
    }

    private static void checkRow(int layer, int length, int experts) {
        if (length != experts) {
            throw new IllegalArgumentException(
                    "Layer %d has %d experts where layer 0 has %d"
                            .formatted(layer, length, experts));
        }
    }

    /** The shape of the JSON text. */
    private static final class Json {
        @SerializedName("experts")
        int numExperts;

        @SerializedName("mask")
        int[][] kept;
    }
}
