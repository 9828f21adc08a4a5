package org.djlmoe.serving;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.initializer.Initializer;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.kernel.AttentionKernels;
import org.djlmoe.kernel.DecodeKernels;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.NormKernels;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.Router;
import org.djlmoe.routing.TokenSelector;

/**
 * A {@link MoeDecoder} that reads a prompt by chunks and then goes on token by token, each time
 * computing the new tokens alone: keys and values of the others are in a {@link KvCache}.
 *
 * <p>Logits are those of the full forward pass, grouped KV heads, rotary positions and sliding
 * window included; so is routing, with whatever prior the routers of {@link #decoder()} have. The
 * weights outside the experts are F32. Nothing is recorded for differentiation.
 *
 * <p>Memory beside weights and cache: what one chunk of n = B S tokens needs, about n ((4 + k) H +
 * 2 heads d) values and n times the past for the mask; with shared experts of width S, 3 S values a
 * token where that is more. Shared experts count as weights outside the experts: they are always in
 * memory.
 *
 * <p>One thread uses it. On the CPU.
 */
public final class IncrementalDecoder implements AutoCloseable {

    private static final String EXPERTS = ".mlp.experts.";

    private final NDManager manager;
    private final MoeDecoder decoder;
    private final MoeConfig config;
    private final ServedExperts experts;
    private final NDArray embedding;
    private final NDArray finalNorm;
    private final NDArray head;
    private final List<List<NDArray>> attention = new ArrayList<>();
    private final List<List<NDArray>> routing = new ArrayList<>();
    private final List<List<NDArray>> shared = new ArrayList<>();
    private final AttentionKernels.Settings attentionSettings;
    private final ExpertKernels.Settings routeSettings;

    private IncrementalDecoder(NDManager manager, MoeDecoder decoder, ServedExperts experts) {
        this.manager = manager;
        this.decoder = decoder;
        this.experts = experts;
        config = decoder.config();
        experts.requireFor(config);
        Map<String, Parameter> parameters = decoder.checkpointParameters();
        embedding = array(parameters, "model.embed_tokens.weight");
        finalNorm = array(parameters, "model.norm.weight");
        head = config.tieWordEmbeddings() ? embedding : array(parameters, "lm_head.weight");
        for (int l = 0; l < config.numLayers(); l++) {
            String prefix = "model.layers." + l + ".";
            List<NDArray> weights = new ArrayList<>();
            weights.add(array(parameters, prefix + "input_layernorm.weight"));
            for (String projection : List.of("q_proj", "k_proj", "v_proj", "o_proj")) {
                weights.add(array(parameters, prefix + "self_attn." + projection + ".weight"));
            }
            attention.add(weights);
            routing.add(
                    List.of(
                            array(parameters, prefix + "post_attention_layernorm.weight"),
                            array(parameters, prefix + "mlp.gate.weight")));
            if (config.sharedExpertIntermediateSize() > 0) {
                shared.add(
                        List.of(
                                array(parameters, prefix + "mlp.shared_expert.gate_up_proj"),
                                array(parameters, prefix + "mlp.shared_expert.down_proj"),
                                config.sharedExpertGated()
                                        ? array(
                                                parameters,
                                                prefix + "mlp.shared_expert_gate.weight")
                                        : TorchKernels.nothing()));
            }
        }
        attentionSettings =
                new AttentionKernels.Settings(
                        config.numHeads(),
                        config.numKeyValueHeads(),
                        config.headDim(),
                        config.slidingWindow(),
                        config.ropeTheta(),
                        config.rmsNormEps());
        Router router = decoder.moeBlocks().get(0).router();
        routeSettings =
                new ExpertKernels.Settings(
                        config.topK(), config.rmsNormEps(), 0, true, router.renormalizes());
    }

    private static NDArray array(Map<String, Parameter> parameters, String name) {
        Parameter parameter = parameters.get(name);
        if (!parameter.isInitialized()) {
            throw new IllegalArgumentException(
                    "Parameter '" + name + "' is not initialized: load or initialize the model");
        }
        return parameter.getArray();
    }

    /**
     * Serves a model that is in memory, with all its experts.
     *
     * @param decoder the model, initialized, without adapters; it must outlive the result
     * @return the decoder; closing it leaves the model as it is
     * @throws IllegalArgumentException if the experts have adapters: merge them first
     */
    public static IncrementalDecoder of(MoeDecoder decoder) {
        ResidentExperts experts = ResidentExperts.of(decoder);
        try {
            return of(decoder, experts);
        } catch (RuntimeException e) {
            experts.close();
            throw e;
        }
    }

    /**
     * Serves a model that is in memory, with experts from elsewhere. Its own need not be there.
     *
     * @param decoder the model; it must outlive the result
     * @param experts its experts; closed with the result
     * @return the decoder; closing it leaves the model as it is
     */
    public static IncrementalDecoder of(MoeDecoder decoder, ServedExperts experts) {
        NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        try {
            return new IncrementalDecoder(manager, decoder, experts);
        } catch (RuntimeException e) {
            manager.close();
            throw e;
        }
    }

    /**
     * Loads a checkpoint's weights outside the experts.
     *
     * @param folder holds {@code config.json} and safetensors
     * @param experts its experts; closed with the result
     * @return the decoder, without any prior
     * @throws IOException if a file is missing or broken
     */
    public static IncrementalDecoder load(Path folder, ServedExperts experts) throws IOException {
        MoeConfig config = MoeConfig.fromJson(folder.resolve(HfCheckpoint.CONFIG_FILE));
        MoeDecoder decoder = new MoeDecoder(config);
        Map<String, Shape> elsewhere = new LinkedHashMap<>(HfCheckpoint.parameterShapes(config));
        Map<String, Parameter> here = new LinkedHashMap<>(decoder.checkpointParameters());
        here.keySet().removeIf(name -> name.contains(EXPERTS));
        NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        try {
            here.forEach(
                    (name, parameter) -> {
                        if (parameter.getShape() == null) {
                            parameter.setShape(elsewhere.get(name));
                        }
                        parameter.setInitializer(Initializer.ZEROS);
                        parameter.freeze(true);
                        parameter.initialize(manager, DataType.FLOAT32);
                    });
            elsewhere.keySet().removeAll(here.keySet());
            HfCheckpoint.load(folder, here, elsewhere);
            return new IncrementalDecoder(manager, decoder, experts);
        } catch (IOException | RuntimeException e) {
            manager.close();
            throw e;
        }
    }

    /**
     * Returns the model, whose routers take priors and observers. Of a loaded model the experts'
     * parameters have no arrays.
     *
     * @return the model
     */
    public MoeDecoder decoder() {
        return decoder;
    }

    /**
     * Returns the experts.
     *
     * @return the experts
     */
    public ServedExperts experts() {
        return experts;
    }

    /**
     * Makes an empty cache.
     *
     * @param batch B, sequences that go in step
     * @param maxTokens the longest they may become
     * @return the cache, to be closed by the caller
     * @throws IllegalArgumentException if that is more than the model's positions
     */
    public KvCache newCache(int batch, int maxTokens) {
        return new KvCache(config, batch, maxTokens);
    }

    /**
     * Reads a prompt, or more of it, by chunks.
     *
     * @param cache what was read before, and is afterwards
     * @param prompt ids [B, S], S at least 1
     * @param chunkTokens the most tokens a sequence at a time
     * @return logits behind the last token, [B, V]
     */
    public float[][] prefill(KvCache cache, int[][] prompt, int chunkTokens) {
        return read(cache, prompt, chunkTokens, false)[0];
    }

    /**
     * Reads more of a text, by chunks, and returns all its logits.
     *
     * @param cache what was read before, and is afterwards
     * @param tokens ids of one sequence, [S]
     * @param chunkTokens the most tokens at a time
     * @return logits behind every token, [S, V]
     */
    public float[][] score(KvCache cache, int[] tokens, int chunkTokens) {
        float[][][] chunks = read(cache, new int[][] {tokens}, chunkTokens, true);
        return Arrays.stream(chunks).flatMap(Arrays::stream).toArray(float[][]::new);
    }

    /**
     * Reads one token of each sequence.
     *
     * @param cache what was read before, and is afterwards
     * @param tokens ids [B]
     * @return logits behind them, [B, V]
     */
    public float[][] decode(KvCache cache, int... tokens) {
        int[][] rows = Arrays.stream(tokens).mapToObj(t -> new int[] {t}).toArray(int[][]::new);
        check(cache, rows);
        return step(cache, rows, 0, 1, true, false);
    }

    private float[][][] read(KvCache cache, int[][] rows, int chunkTokens, boolean every) {
        check(cache, rows);
        if (chunkTokens < 1) {
            throw new IllegalArgumentException(
                    "A chunk has at least one token, not " + chunkTokens);
        }
        int chunk = Math.min(chunkTokens, cache.maxChunk());
        List<float[][]> logits = new ArrayList<>();
        int length = rows[0].length;
        for (int start = 0; start < length; start += chunk) {
            int s = Math.min(chunk, length - start);
            float[][] last = step(cache, rows, start, s, false, every);
            if (every || start + s == length) {
                logits.add(last);
            }
        }
        return logits.toArray(new float[0][][]);
    }

    private void check(KvCache cache, int[][] rows) {
        if (rows.length != cache.batch()) {
            throw new IllegalArgumentException(
                    "The cache is for %d sequences, %d were given"
                            .formatted(cache.batch(), rows.length));
        }
        for (int[] row : rows) {
            if (row.length == 0 || row.length != rows[0].length) {
                throw new IllegalArgumentException(
                        "Every sequence needs the same number of tokens, at least one");
            }
            for (int id : row) {
                if (id < 0 || id >= config.vocabSize()) {
                    throw new IllegalArgumentException(
                            "Token id %d is outside the vocabulary of %d; is this the model's own tokenizer?"
                                    .formatted(id, config.vocabSize()));
                }
            }
        }
        if (rows[0].length > cache.maxTokens() - cache.length()) {
            cache.reserve(rows[0].length);
        }
    }

    /** Runs S tokens of each sequence, from {@code start} on. */
    private float[][] step(
            KvCache cache, int[][] rows, int start, int s, boolean decoding, boolean every) {
        cache.reserve(s);
        int n = rows.length * s;
        long[] ids = new long[n];
        for (int i = 0; i < n; i++) {
            ids[i] = rows[i / s][start + i % s];
        }
        try (GradMode off = GradMode.off();
                NDManager scope = manager.newSubManager()) {
            Shape shape = new Shape(n, config.hiddenSize());
            NDArray x = scope.create(shape);
            NDArray between = scope.create(shape);
            NDArray h = scope.create(shape);
            NDArray combine = scope.create(new Shape(n, config.topK()));
            NDArray chosen = scope.create(new Shape(n, config.topK()), DataType.INT64);
            NDArray out = scope.create(new Shape((long) n * config.topK(), config.hiddenSize()));
            NormKernels.embed(scope.create(ids), embedding, x);
            for (int l = 0; l < config.numLayers(); l++) {
                DecodeKernels.attention(
                        x, s, attention.get(l), attentionSettings, cache.past(l), between);
                MoeBlock block = decoder.moeBlocks().get(l);
                Router router = block.router();
                route(scope, l, router.selector(), between, chosen, combine);
                router.observe(chosen);
                experts.begin(l, chosen.toLongArray(), decoding);
                if (decoding && n == 1 && l + 1 < config.numLayers()) {
                    prefetch(scope, l + 1, between);
                }
                NormKernels.rmsNorm(between, routing.get(l).get(0), config.rmsNormEps(), h);
                if (!shared.isEmpty()) {
                    // Always resident: they are computed while the others are being loaded.
                    List<NDArray> own = shared.get(l);
                    DecodeKernels.addShared(h, own.get(0), own.get(1), own.get(2), between);
                }
                experts.compute(h, out);
                DecodeKernels.combine(between, combine, out, x);
            }
            NDArray logits =
                    DecodeKernels.logits(scope, x, s, finalNorm, config.rmsNormEps(), head, every);
            cache.advance(s);
            return rows(logits.toFloatArray());
        }
    }

    private void route(
            NDManager scope,
            int layer,
            TokenSelector selector,
            NDArray x,
            NDArray ids,
            NDArray combine) {
        List<NDArray> weights = routing.get(layer);
        Router router = decoder.moeBlocks().get(layer).router();
        NDArray none = TorchKernels.nothing();
        long n = x.getShape().get(0);
        try (ExpertScratch scratch = ExpertScratch.routing(scope, n, config.hiddenSize())) {
            if (selector == null) {
                ExpertKernels.route(
                        x,
                        0,
                        1,
                        weights,
                        routeSettings,
                        router.selection(scope),
                        none,
                        none,
                        ids,
                        combine,
                        scratch);
                return;
            }
            try (NDArray logits = scope.create(new Shape(n, router.experts()))) {
                ExpertKernels.routerLogits(x, weights, routeSettings, scratch, logits);
                try (NDArray chosen = router.select(logits)) {
                    chosen.copyTo(ids);
                }
                ExpertKernels.combine(logits, routeSettings, none, none, ids, combine);
            }
        }
    }

    private void prefetch(NDManager scope, int next, NDArray x) {
        if (!experts.wantsForecast()) {
            experts.prefetch(next, new long[0]);
            return;
        }
        Shape shape = new Shape(1, config.topK());
        try (NDArray ids = scope.create(shape, DataType.INT64);
                NDArray combine = scope.create(shape)) {
            // What a selector chooses depends on what it was asked before, so nobody asks it ahead.
            route(scope, next, null, x, ids, combine);
            experts.prefetch(next, ids.toLongArray());
        }
    }

    private float[][] rows(float[] flat) {
        int vocab = config.vocabSize();
        float[][] rows = new float[flat.length / vocab][];
        for (int i = 0; i < rows.length; i++) {
            rows[i] = Arrays.copyOfRange(flat, i * vocab, (i + 1) * vocab);
        }
        return rows;
    }

    /** Frees experts and loaded weights. */
    @Override
    public void close() {
        experts.close();
        manager.close();
    }
}
