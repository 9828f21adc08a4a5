package org.djlmoe.training;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Predicate;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.checkpoint.PeftAdapter;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.expert.Experts;
import org.djlmoe.expert.LoraExperts;
import org.djlmoe.kernel.HalfArrays;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.vocab.RingDtpLoss;

/**
 * A {@link MoeDecoder} and the DJL {@link Model} that owns its arrays.
 *
 * <p>Closing it frees the weights. It is used by one thread at a time.
 */
public final class LanguageModel implements AutoCloseable {

    /**
     * The sizes of what runs piece by piece: smaller pieces take less memory and, when very small,
     * more time.
     *
     * @param moeTokens tokens a chunk in the MoE layers
     * @param vocabTokens tokens a block of the vocabulary loss
     */
    public record Chunks(int moeTokens, int vocabTokens) {

        /** Sizes beyond which larger pieces gain nothing. */
        public static final Chunks DEFAULT = new Chunks(4096, 512);
    }

    /** A target that is not predicted, for {@link #tokenLosses}. */
    public static final int IGNORED = -100;

    private static final String ROUTER = ".mlp.gate.weight";

    private final Model model;
    private final MoeDecoder decoder;
    private final Chunks chunks;
    private final RingDtpLoss loss;
    private final RingDtpLoss tokenLoss;

    private LanguageModel(MoeConfig config, Chunks chunks) {
        this.chunks = chunks;
        this.decoder = new MoeDecoder(config, chunks.moeTokens());
        this.loss = RingDtpLoss.builder().optBlockTokens(chunks.vocabTokens()).build();
        this.tokenLoss =
                RingDtpLoss.builder()
                        .optIgnoreIndex(IGNORED)
                        .optReduction(RingDtpLoss.Reduction.NONE)
                        .optBlockTokens(chunks.vocabTokens())
                        .build();
        this.model = Model.newInstance("language-model", Device.cpu(), "PyTorch");
        model.setBlock(decoder);
    }

    /**
     * Creates a model with random weights.
     *
     * @param config sizes and constants
     * @param chunks sizes of what runs piece by piece
     * @param seed decides the weights
     * @return the model
     */
    public static LanguageModel create(MoeConfig config, Chunks chunks, long seed) {
        LanguageModel created = new LanguageModel(config, chunks);
        created.initialize(seed);
        return created;
    }

    private void initialize(long seed) {
        Engine.getEngine("PyTorch").setRandomSeed((int) seed);
        decoder.initialize(model.getNDManager(), DataType.FLOAT32, new Shape(1, 1));
    }

    /**
     * Reads a model from a Hugging Face checkpoint folder.
     *
     * @param folder holds {@code config.json} and safetensors
     * @param chunks sizes of what runs piece by piece
     * @return the model, in F32
     * @throws IOException if a file is missing or broken, or the two do not fit together
     */
    public static LanguageModel load(Path folder, Chunks chunks) throws IOException {
        return load(folder, chunks, false);
    }

    /**
     * Reads a model whose experts are frozen and BF16 from the start: they are never there in F32.
     *
     * @param folder holds {@code config.json} and safetensors
     * @param chunks sizes of what runs piece by piece
     * @return the model; experts that are F32 or F16 in the checkpoint are rounded
     * @throws IOException if a file is missing or broken, or the two do not fit together
     */
    public static LanguageModel loadHalf(Path folder, Chunks chunks) throws IOException {
        return load(folder, chunks, true);
    }

    private static LanguageModel load(Path folder, Chunks chunks, boolean half) throws IOException {
        MoeConfig config = MoeConfig.fromJson(folder.resolve(HfCheckpoint.CONFIG_FILE));
        HfCheckpoint.check(folder, config);
        LanguageModel loaded = new LanguageModel(config, chunks);
        try {
            if (half) {
                loaded.narrowExperts();
            }
            loaded.initialize(0);
            HfCheckpoint.load(folder, loaded.decoder.checkpointParameters());
            return loaded;
        } catch (IOException | RuntimeException e) {
            loaded.close();
            throw e;
        }
    }

    /**
     * Writes the weights and {@code config.json}.
     *
     * @param folder created if missing
     * @param options layout, element type and size of files
     * @throws IllegalStateException if experts have adapters: they would be left out
     * @throws IOException if writing fails
     */
    public void save(Path folder, SaveOptions options) throws IOException {
        if (!decoder.adapterParameters().isEmpty()) {
            throw new IllegalStateException(
                    "The experts have adapters, which a checkpoint leaves out: merge them first");
        }
        HfCheckpoint.save(folder, decoder.config(), decoder.checkpointParameters(), options);
    }

    /**
     * Writes the adapters in PEFT's format, see {@link PeftAdapter}.
     *
     * @param folder created if missing
     * @param baseModel name or path of the model without adapters, or null
     * @param routers whether to save the routers along, which is needed if they have trained
     * @throws IllegalStateException if not every layer has adapters
     * @throws IOException if writing fails
     */
    public void saveAdapter(Path folder, String baseModel, boolean routers) throws IOException {
        double alpha = Double.NaN;
        for (MoeBlock layer : decoder.moeBlocks()) {
            LoraExperts adapters = layer.experts().adapters();
            if (adapters == null) {
                throw new IllegalStateException(
                        "Not all experts have adapters: attach or train some first");
            }
            alpha = adapters.alpha();
        }
        Map<String, Parameter> whole = new LinkedHashMap<>();
        if (routers) {
            decoder.checkpointParameters()
                    .forEach(
                            (name, parameter) -> {
                                if (name.endsWith(ROUTER)) {
                                    whole.put(name, parameter);
                                }
                            });
        }
        PeftAdapter.save(
                folder, decoder.config(), alpha, baseModel, decoder.adapterParameters(), whole);
    }

    /**
     * Reads an adapter in PEFT's format and attaches it; routers that it brings replace the
     * model's.
     *
     * @param folder holds {@code adapter_config.json} and {@code adapter_model.safetensors}
     * @return what was read
     * @throws IllegalStateException if experts have adapters already
     * @throws IOException if a file is missing or broken, or the adapter is not of this model; then
     *     the model is as before
     */
    public PeftAdapter attachAdapter(Path folder) throws IOException {
        PeftAdapter adapter = PeftAdapter.open(folder, decoder.config());
        List<Experts> attached = new ArrayList<>();
        boolean done = false;
        try {
            for (MoeBlock layer : decoder.moeBlocks()) {
                LoraExperts lora = layer.experts().attachAdapters(adapter.rank(), adapter.alpha());
                attached.add(layer.experts());
                lora.initialize(manager(), DataType.FLOAT32, new Shape(1));
            }
            adapter.load(decoder.namedParameters());
            done = true;
            return adapter;
        } finally {
            if (!done) {
                attached.forEach(Experts::detachAdapters);
            }
        }
    }

    /**
     * Adds the adapters of all experts to the weights and drops them. Routers, embedding and head
     * have none and stay as they are.
     *
     * @return how many weights changed
     * @throws IllegalStateException if a layer has no adapters, or an adapter is not finite; the
     *     message names the tensor, and nothing has changed
     */
    public long mergeAdapters() {
        checkAdapters();
        return decoder.moeBlocks().stream()
                .mapToLong(layer -> layer.experts().mergeAdapters())
                .sum();
    }

    /**
     * Merges the adapters until the result is closed, which puts the weights back to the bit. It
     * keeps a copy of all expert weights.
     *
     * @return undoes the merge
     * @throws IllegalStateException as {@link #mergeAdapters}
     */
    public MergedModel mergeAdaptersForNow() {
        checkAdapters();
        return new MergedModel(decoder);
    }

    private void checkAdapters() {
        if (decoder.adapterParameters().size() != 4 * decoder.moeBlocks().size()) {
            throw new IllegalStateException(
                    "Not all experts have adapters: there is nothing, or not everything, to merge");
        }
        decoder.adapterParameters()
                .forEach(
                        (name, parameter) -> {
                            try (NDArray values = parameter.getArray().stopGradient();
                                    NDArray sum = values.sum()) {
                                if (!Float.isFinite(sum.getFloat())) {
                                    throw new IllegalStateException(
                                            "'"
                                                    + name
                                                    + "' holds numbers that are not finite: nothing"
                                                    + " was merged");
                                }
                            }
                        });
    }

    /**
     * Freezes the experts' weights and narrows them to BF16: see {@link Experts#narrowWeights}.
     * Nothing else changes its type. To be called while no trainer exists.
     */
    public void narrowExperts() {
        decoder.moeBlocks().forEach(layer -> layer.experts().narrowWeights(manager()));
    }

    /** Widens the experts' weights to F32 again. To be called while no trainer exists. */
    public void widenExperts() {
        decoder.moeBlocks().forEach(layer -> layer.experts().widenWeights(manager()));
    }

    /**
     * Returns the decoder.
     *
     * @return the decoder
     */
    public MoeDecoder decoder() {
        return decoder;
    }

    /**
     * Returns the sizes of what runs piece by piece. Sums in other pieces differ in their last
     * bits.
     *
     * @return the sizes that the model was made with
     */
    public Chunks chunks() {
        return chunks;
    }

    /**
     * Tells models apart by their weights, without adapters. It reads all of them, which takes
     * about as long as reading a checkpoint from memory.
     *
     * @return SHA-256 of names, types, shapes and values, in hexadecimal
     */
    public String digest() {
        return HfCheckpoint.digest(decoder.checkpointParameters());
    }

    /**
     * Returns the loss of the next token.
     *
     * @return mean cross-entropy
     */
    public RingDtpLoss lossFunction() {
        return loss;
    }

    /**
     * Returns the DJL model.
     *
     * @return the model, owner of all weights
     */
    public Model model() {
        return model;
    }

    /**
     * Returns the manager of the weights.
     *
     * @return the manager
     */
    public NDManager manager() {
        return model.getNDManager();
    }

    /**
     * Chooses what trains: thaws the parameters whose path a predicate accepts and freezes the
     * others. Balancing biases stay frozen: loads move them, not gradients.
     *
     * @param path accepts a Hugging Face tensor name, or one with {@code lora_A} or {@code lora_B}
     *     for adapters
     * @throws IllegalArgumentException if it accepts weights that are BF16
     */
    public void train(Predicate<String> path) {
        decoder.namedParameters()
                .forEach(
                        (name, parameter) -> {
                            if (path.test(name) && HalfArrays.isHalf(parameter.getArray())) {
                                throw new IllegalArgumentException(
                                        "'"
                                                + name
                                                + "' is BF16 and cannot train: widen the experts first");
                            }
                        });
        decoder.namedParameters()
                .forEach(
                        (name, parameter) ->
                                parameter.freeze(
                                        parameter.getType() == Parameter.Type.RUNNING_MEAN
                                                || !path.test(name)));
    }

    /**
     * Returns how many numbers train.
     *
     * @return elements of the parameters that are not frozen
     */
    public long trainableElements() {
        return decoder.namedParameters().values().stream()
                .filter(Parameter::requiresGradient)
                .mapToLong(parameter -> parameter.getArray().size())
                .sum();
    }

    /**
     * Computes the mean loss of a batch without gradients.
     *
     * @param batch inputs and targets
     * @return mean cross-entropy in nats a token
     */
    public double loss(TokenBatch batch) {
        return evaluate(loss, batch)[0];
    }

    /**
     * Computes the loss of every token of a batch without gradients.
     *
     * @param batch inputs and targets; {@link #IGNORED} is a target that is not predicted
     * @return cross-entropy in nats, [B, S] row by row, 0 where the target is ignored
     */
    public float[] tokenLosses(TokenBatch batch) {
        return evaluate(tokenLoss, batch);
    }

    private float[] evaluate(RingDtpLoss function, TokenBatch batch) {
        try (GradMode off = GradMode.off();
                NDManager scope = manager().newSubManager()) {
            NDList out =
                    decoder.forward(
                            new ParameterStore(scope, false),
                            new NDList(batch.toInputs(scope)),
                            false);
            return function.evaluate(new NDList(batch.toTargets(scope)), out).toFloatArray();
        }
    }

    @Override
    public void close() {
        model.close();
    }
}
