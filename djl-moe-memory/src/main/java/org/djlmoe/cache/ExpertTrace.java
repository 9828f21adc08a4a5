package org.djlmoe.cache;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/**
 * Which experts each token of each request was routed to: ids [layers, tokens, topK], immutable.
 *
 * <p>Requests lie one behind the other along the token axis. An id costs two bytes, so a million
 * tokens through 16 layers at top-8 are 256 MB; trace a sample of a long run, not all of it.
 */
public final class ExpertTrace {

    private final int numExperts;
    private final int topK;
    private final int tokens;
    private final List<Request> requests;

    /** Unsigned ids, [layers][tokens * topK]. */
    private final short[][] ids;

    private ExpertTrace(int numExperts, int topK, List<Request> requests, short[][] ids) {
        this.numExperts = numExperts;
        this.topK = topK;
        this.tokens = ids[0].length / topK;
        this.requests = List.copyOf(requests);
        this.ids = ids;
    }

    /**
     * Reads a trace file; see {@link #write}. It is read as a stream: memory holds the trace and
     * one request more.
     *
     * @param file the file, gzip if its name ends in {@code .gz}
     * @return the trace
     * @throws IllegalArgumentException if the file is no trace; the message names the file, the
     *     request and the layer, counted from 0
     * @throws IOException if the file cannot be read
     */
    public static ExpertTrace read(Path file) throws IOException {
        return new TraceReader(file).read();
    }

    /**
     * Writes a trace file, for {@link #read} and for other programs. The file is one JSON object:
     *
     * <pre>{@code
     * {"experts": 8, "top_k": 2, "requests": [
     *   {"layers": [[5, 0, 5, 3], [1, 2, 7, 1]]},
     *   {"layers": [[0, 6], [2, 4]]}]}
     * }</pre>
     *
     * <p>A request has one list of ids for each MoE layer. It holds the {@code top_k} distinct ids
     * of the request's first token, then those of the second, and so on; above, the first request
     * has two tokens, of which the second went to the experts 5 and 3 of layer 0. All layers of a
     * request have the same tokens, all requests the same layers. Ids are 0 to {@code experts} - 1.
     * Keys may come in any order, and further ones are passed over, so a file can say where it
     * comes from; a file with {@code requests} ahead of the two sizes is read twice. In Python,
     * with {@code ids[layer]} the INT64 [tokens, top_k] that a router chose for a request:
     *
     * <pre>{@code
     * requests.append({"layers": [ids[l].flatten().tolist() for l in range(layers)]})
     * }</pre>
     *
     * @param file the file, replaced if it exists; gzip if its name ends in {@code .gz}
     * @throws IOException if writing fails; then an old file is untouched
     */
    public void write(Path file) throws IOException {
        TraceWriter.write(this, file);
    }

    /**
     * Starts a trace.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Returns the number of experts a layer.
     *
     * @return the number of experts
     */
    public int numExperts() {
        return numExperts;
    }

    /**
     * Returns how many experts a token asks for in each layer.
     *
     * @return k
     */
    public int topK() {
        return topK;
    }

    /**
     * Returns the number of MoE layers.
     *
     * @return the number of layers
     */
    public int numLayers() {
        return ids.length;
    }

    /**
     * Returns the number of tokens over all requests.
     *
     * @return the number of tokens
     */
    public int tokens() {
        return tokens;
    }

    /**
     * Returns the requests in the order in which they were served.
     *
     * @return the requests; together they cover every token
     */
    public List<Request> requests() {
        return requests;
    }

    /**
     * Returns one selected expert.
     *
     * @param layer the MoE layer
     * @param token the token, counted over all requests
     * @param choice which of the token's experts, 0 to topK - 1
     * @return the expert id
     */
    public int expert(int layer, int token, int choice) {
        if (choice < 0 || choice >= topK) {
            throw new IndexOutOfBoundsException("Choice " + choice + " of top-" + topK);
        }
        return Short.toUnsignedInt(ids[layer][token * topK + choice]);
    }

    /**
     * Writes a token's experts into an array.
     *
     * @param layer the MoE layer
     * @param token the token, counted over all requests
     * @param into receives the topK ids from index 0 on
     */
    public void experts(int layer, int token, int[] into) {
        short[] row = ids[layer];
        for (int i = 0, at = token * topK; i < topK; i++, at++) {
            into[i] = Short.toUnsignedInt(row[at]);
        }
    }

    /**
     * Counts how often each expert was selected.
     *
     * @return [layers, experts]
     */
    public long[][] usage() {
        long[][] usage = new long[ids.length][numExperts];
        for (int l = 0; l < ids.length; l++) {
            for (short id : ids[l]) {
                usage[l][Short.toUnsignedInt(id)]++;
            }
        }
        return usage;
    }

    /**
     * Measures how evenly each layer's selections spread over its experts: the entropy of {@link
     * #usage}.
     *
     * @return [layers], in bits: 0 if always the same expert is selected (at top-1), log2(experts)
     *     if all are selected equally often
     */
    public double[] entropy() {
        return Arrays.stream(usage()).mapToDouble(ExpertTrace::entropy).toArray();
    }

    private static double entropy(long[] counts) {
        double sum = Arrays.stream(counts).sum();
        double bits = 0;
        for (long count : counts) {
            if (count > 0) {
                bits += count / sum * (Math.log(sum / count) / Math.log(2));
            }
        }
        return bits;
    }

    @Override
    public String toString() {
        return "ExpertTrace %d requests, %d tokens, %d layers, top-%d of %d experts"
                .formatted(requests.size(), tokens, ids.length, topK, numExperts);
    }

    /**
     * A request's place in the trace.
     *
     * @param firstToken where it begins, counted over all requests
     * @param tokens how many tokens it has
     */
    public record Request(int firstToken, int tokens) {}

    /** Collects ids as a model hands them out: per layer, some tokens at a time. */
    public static final class Builder {

        private int numExperts;
        private int topK;
        private int numLayers;
        private short[][] ids;
        private int[] sizes;
        private final List<Integer> starts = new ArrayList<>();

        private Builder() {}

        /**
         * Sets the number of experts a layer.
         *
         * @param experts 1 to 65536
         * @return this builder
         */
        public Builder setNumExperts(int experts) {
            checkEmpty();
            numExperts = experts;
            return this;
        }

        /**
         * Sets how many experts a token asks for.
         *
         * @param k at least 1
         * @return this builder
         */
        public Builder setTopK(int k) {
            checkEmpty();
            topK = k;
            return this;
        }

        /**
         * Sets the number of MoE layers.
         *
         * @param layers at least 1
         * @return this builder
         */
        public Builder setNumLayers(int layers) {
            checkEmpty();
            numLayers = layers;
            return this;
        }

        /**
         * Begins the next request; what is appended from here on belongs to it.
         *
         * @return this builder
         * @throws IllegalStateException if the layers of the request before hold different numbers
         *     of tokens
         */
        public Builder beginRequest() {
            prepare();
            starts.add(checkLevel());
            return this;
        }

        /**
         * Appends tokens of one layer.
         *
         * @param layer the MoE layer
         * @param selected the ids, [tokens * topK], token by token; the ids of a token are distinct
         * @return this builder
         */
        public Builder append(int layer, int... selected) {
            long[] wide = new long[selected.length];
            for (int i = 0; i < wide.length; i++) {
                wide[i] = selected[i];
            }
            return append(layer, wide);
        }

        /**
         * Appends tokens of one layer.
         *
         * @param layer the MoE layer
         * @param selected the ids, [tokens * topK], token by token; the ids of a token are distinct
         * @return this builder
         */
        public Builder append(int layer, long[] selected) {
            prepare();
            if (starts.isEmpty()) {
                throw new IllegalStateException("Call beginRequest() before the first append()");
            }
            if (layer < 0 || layer >= numLayers) {
                throw new IllegalArgumentException(
                        "Layer " + layer + " of a trace of " + numLayers + " layers");
            }
            if (selected.length % topK != 0) {
                throw new IllegalArgumentException(
                        "%d ids are no whole number of tokens at top-%d"
                                .formatted(selected.length, topK));
            }
            for (int i = 0; i < selected.length; i++) {
                check(layer, selected, i);
            }
            int size = sizes[layer];
            if (size + selected.length > ids[layer].length) {
                int grown = Math.max(size + selected.length, 2 * ids[layer].length);
                ids[layer] = Arrays.copyOf(ids[layer], grown);
            }
            for (int i = 0; i < selected.length; i++) {
                ids[layer][size + i] = (short) selected[i];
            }
            sizes[layer] = size + selected.length;
            return this;
        }

        /**
         * Finishes the trace. The builder can go on collecting.
         *
         * @return the trace
         * @throws IllegalStateException if there is no token, or a layer misses some
         */
        public ExpertTrace build() {
            prepare();
            int end = checkLevel();
            if (end == 0) {
                throw new IllegalStateException("The trace holds no token");
            }
            List<Request> requests = new ArrayList<>();
            for (int i = 0; i < starts.size(); i++) {
                int next = i + 1 < starts.size() ? starts.get(i + 1) : end;
                requests.add(new Request(starts.get(i), next - starts.get(i)));
            }
            short[][] copy = new short[numLayers][];
            for (int l = 0; l < numLayers; l++) {
                copy[l] = Arrays.copyOf(ids[l], sizes[l]);
            }
            return new ExpertTrace(numExperts, topK, requests, copy);
        }

        private void check(int layer, long[] selected, int i) {
            if (selected[i] < 0 || selected[i] >= numExperts) {
                throw new IllegalArgumentException(
                        "Layer %d: expert %d does not exist, ids are 0..%d"
                                .formatted(layer, selected[i], numExperts - 1));
            }
            for (int j = i - i % topK; j < i; j++) {
                if (selected[j] == selected[i]) {
                    throw new IllegalArgumentException(
                            "Layer %d: a token asks for expert %d twice"
                                    .formatted(layer, selected[i]));
                }
            }
        }

        private void checkEmpty() {
            if (ids != null) {
                throw new IllegalStateException("The shape is fixed once a request has begun");
            }
        }

        private void prepare() {
            if (ids != null) {
                return;
            }
            if (numExperts < 1 || numExperts > 1 << 16) {
                throw new IllegalArgumentException(
                        "numExperts is " + numExperts + ": set 1 to 65536");
            }
            if (topK < 1 || topK > numExperts) {
                throw new IllegalArgumentException(
                        "topK is %d: set 1 to numExperts (%d)".formatted(topK, numExperts));
            }
            if (numLayers < 1) {
                throw new IllegalArgumentException("numLayers is " + numLayers + ": set 1 or more");
            }
            ids = new short[numLayers][16 * topK];
            sizes = new int[numLayers];
        }

        /** Returns the number of tokens, which all layers must agree on. */
        private int checkLevel() {
            for (int l = 1; l < numLayers; l++) {
                if (sizes[l] != sizes[0]) {
                    throw new IllegalStateException(
                            "Layer %d has %d tokens where layer 0 has %d: append every layer's ids"
                                    .formatted(l, sizes[l] / topK, sizes[0] / topK));
                }
            }
            return sizes[0] / topK;
        }
    }
}
