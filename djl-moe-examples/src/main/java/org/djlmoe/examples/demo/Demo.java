package org.djlmoe.examples.demo;

import java.io.IOException;
import java.nio.file.Path;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.examples.text.TextData;
import org.djlmoe.maskcoft.CoAdaptation;
import org.djlmoe.maskcoft.MaskCoFT;
import org.djlmoe.maskcoft.MaskCoFT.Stage;
import org.djlmoe.maskcoft.PriorSweep;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;

/**
 * Fine-tunes the base model on one language in two ways and compares them with the base:
 * cross-entropy alone (the control: routers and adapters, no mask) and MaskCoFT. Test text, never
 * trained on and never chosen by, decides.
 */
public final class Demo {

    /** The policies that loads are replayed under. */
    static final List<EvictionPolicy.Type> POLICIES =
            List.of(
                    EvictionPolicy.Type.LRU,
                    EvictionPolicy.Type.LFU,
                    EvictionPolicy.Type.LFU_LIFETIME,
                    EvictionPolicy.Type.FIFO,
                    EvictionPolicy.Type.BELADY);

    /** Is told what is going on; a new label begins a new part. */
    @FunctionalInterface
    public interface Listener {

        /**
         * Called after every step.
         *
         * @param label what is going on
         * @param step steps done in this part
         * @param steps its steps in all
         * @param tokens tokens of this step
         * @param loss mean loss of this step, in nats a token
         */
        void step(String label, int step, int steps, long tokens, double loss);
    }

    /**
     * One way, on the test text.
     *
     * @param perplexity of the test text
     * @param loadsPerToken expert loads a token over all layers, by policy
     * @param usage tokens an expert, by layer
     * @param losses training loss of every step; empty for the base
     */
    public record Arm(
            double perplexity,
            Map<EvictionPolicy.Type, Double> loadsPerToken,
            long[][] usage,
            float[] losses) {}

    /**
     * What the demonstration found.
     *
     * @param config the model
     * @param base the base model as it is
     * @param control fine-tuned without a mask
     * @param maskcoft fine-tuned with MaskCoFT, under the chosen prior
     * @param recipe mask, losses and betas of MaskCoFT
     * @param controlValidation the control's perplexity on the validation text
     * @param tokensPerSecond training speed of the control
     */
    public record Result(
            MoeConfig config,
            Arm base,
            Arm control,
            Arm maskcoft,
            MaskCoFT.Result recipe,
            double controlValidation,
            double tokensPerSecond) {}

    private final DemoSettings settings;
    private final Path base;
    private final TextData text;
    private final PackedBatches batches;
    private final Listener listener;

    /**
     * Prepares a demonstration.
     *
     * @param settings how long it runs
     * @param base the base model's checkpoint folder
     * @param listener is told what is going on
     * @throws IOException if the text cannot be read
     */
    public Demo(DemoSettings settings, Path base, Listener listener) throws IOException {
        this.settings = settings;
        this.base = base;
        this.text = TextData.load(settings.language(), settings.sequence());
        this.batches = text.train().batches(settings.batch(), settings.seed());
        this.listener = listener;
    }

    /**
     * Runs all arms.
     *
     * @param chunks sizes of what runs piece by piece
     * @param out where the fine-tuned model is saved
     * @return what was found
     * @throws IOException if a checkpoint cannot be read or written
     */
    public Result run(LanguageModel.Chunks chunks, Path out) throws IOException {
        Arm baseArm;
        Arm control;
        double controlValidation;
        double tokensPerSecond;
        MoeConfig config;
        try (LanguageModel model = LanguageModel.load(base, chunks)) {
            config = model.decoder().config();
            baseArm = test(model, "base", new float[0]);
            long start = System.nanoTime();
            float[] losses =
                    CoAdaptation.builder()
                            .setModel(model)
                            .setBatches(batches)
                            .setSteps(settings.steps())
                            .optAdapters(DemoSettings.RANK, DemoSettings.ALPHA)
                            .optLearningRate(settings.learningRate())
                            .optSeed(settings.seed())
                            .build()
                            .run(
                                    (step, steps, tokens, loss) ->
                                            listener.step(
                                                    "control: routers and adapters",
                                                    step,
                                                    steps,
                                                    tokens,
                                                    loss));
            double seconds = (System.nanoTime() - start) / 1e9;
            tokensPerSecond =
                    (double) settings.steps() * settings.batch() * settings.sequence() / seconds;
            controlValidation = Evaluation.of(model, validation(), t -> {}).perplexity();
            control = test(model, "control", losses);
        }
        try (LanguageModel model = LanguageModel.load(base, chunks)) {
            MaskCoFT.Result recipe = recipe(model, controlValidation).run(this::report);
            recipe.prior().apply(model.decoder());
            Arm maskcoft = test(model, "maskcoft", recipe.losses());
            model.decoder().moeBlocks().forEach(layer -> layer.experts().mergeAdapters());
            model.save(out, SaveOptions.builder().build());
            recipe.prior().save(out);
            return new Result(
                    config, baseArm, control, maskcoft, recipe, controlValidation, tokensPerSecond);
        }
    }

    private MaskCoFT recipe(LanguageModel model, double controlValidation) {
        return MaskCoFT.builder()
                .setModel(model)
                .setBatches(batches)
                .setValidation(validation())
                .optMaskSteps(settings.maskSteps())
                .optMaskSamples(settings.maskSamples())
                .optSteps(settings.steps())
                .optAdapters(DemoSettings.RANK, DemoSettings.ALPHA)
                .optLearningRate(settings.learningRate())
                .optCacheSize(settings.cacheSize())
                .optPerplexityLimit(PriorSweep.TOLERANCE * controlValidation)
                .optSeed(settings.seed())
                .build();
    }

    private void report(Stage stage, int step, int steps, long tokens, double loss) {
        String label =
                switch (stage) {
                    case MASK -> "maskcoft 1: learning the mask";
                    case ADAPT -> "maskcoft 2: routers and adapters";
                    case PRIOR -> "maskcoft 3: choosing beta";
                };
        listener.step(label, step, steps, tokens, loss);
    }

    private Iterable<TokenBatch> validation() {
        return text.validation().sample(settings.validationRows(), DemoSettings.EVALUATION_BATCH);
    }

    private Arm test(LanguageModel model, String name, float[] losses) {
        long total = (long) Math.min(settings.testRows(), text.test().rows()) * settings.sequence();
        long[] done = {0};
        Evaluation evaluation =
                Evaluation.of(
                        model,
                        text.test().sample(settings.testRows(), DemoSettings.EVALUATION_BATCH),
                        tokens -> {
                            listener.step(
                                    "testing " + name,
                                    (int) tokens,
                                    (int) total,
                                    tokens - done[0],
                                    Double.NaN);
                            done[0] = tokens;
                        });
        return new Arm(
                evaluation.perplexity(),
                loads(evaluation.trace()),
                evaluation.trace().usage(),
                losses);
    }

    private Map<EvictionPolicy.Type, Double> loads(ExpertTrace trace) {
        LoadReplay replay = LoadReplay.builder().setCapacity(settings.cacheSize()).build();
        Map<EvictionPolicy.Type, Double> loads = new EnumMap<>(EvictionPolicy.Type.class);
        for (EvictionPolicy.Type policy : POLICIES) {
            loads.put(policy, replay.run(trace, policy).loadsPerToken());
        }
        return loads;
    }
}
