package org.djlmoe.training;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import java.io.IOException;
import java.nio.file.Path;
import java.util.function.Predicate;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
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

    private final Model model;
    private final MoeDecoder decoder;
    private final RingDtpLoss loss;
    private final RingDtpLoss tokenLoss;

    private LanguageModel(MoeConfig config, Chunks chunks) {
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
        Engine.getEngine("PyTorch").setRandomSeed((int) seed);
        created.decoder.initialize(created.model.getNDManager(), DataType.FLOAT32, new Shape(1, 1));
        return created;
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
        MoeConfig config = MoeConfig.fromJson(folder.resolve(HfCheckpoint.CONFIG_FILE));
        HfCheckpoint.check(folder, config);
        LanguageModel loaded = create(config, chunks, 0);
        try {
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
     * Returns the decoder.
     *
     * @return the decoder
     */
    public MoeDecoder decoder() {
        return decoder;
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
     * others.
     *
     * @param path accepts a Hugging Face tensor name, or one with {@code lora_A} or {@code lora_B}
     *     for adapters
     */
    public void train(Predicate<String> path) {
        decoder.namedParameters().forEach((name, parameter) -> parameter.freeze(!path.test(name)));
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
