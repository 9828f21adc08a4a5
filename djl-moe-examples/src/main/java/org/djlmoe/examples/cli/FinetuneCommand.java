package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.concurrent.Callable;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.examples.demo.BaseModel;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.examples.text.Language;
import org.djlmoe.examples.text.TextData;
import org.djlmoe.maskcoft.CoAdaptation;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.maskcoft.MaskCoFT;
import org.djlmoe.maskcoft.MaskCoFTSettings;
import org.djlmoe.maskcoft.MaskEstimator;
import org.djlmoe.maskcoft.RunSaves;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PeakMeter;
import org.djlmoe.plan.PlanSettings;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.TrainingCheckpoint;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe finetune}: fine-tunes a model on one language of the parliament transcripts. */
@Command(
        name = "finetune",
        description = {
            "Fine-tune a model on one language of the parliament transcripts.",
            "--save-every counts the steps of each stage, of the mask and of training, and saves at"
                    + " the end of a stage too; --resume goes on in any stage."
        },
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class FinetuneCommand implements Callable<Integer> {

    private static final int VALIDATION_ROWS = 64;
    private static final int EVALUATION_BATCH = 16;
    private static final String TRAINING = "training";

    /** What trains, and under which mask. */
    enum Method {
        /** Learned expert mask, then routers and adapters under it, then a soft prior. */
        MASKCOFT,
        /** Routers and adapters with cross-entropy alone. */
        CE,
        /** Adapters alone. */
        LORA
    }

    @Mixin private CommonOptions options;
    @Mixin private OutputDirectory out;
    @Mixin private Memory memory;
    @Mixin private SavedStates saved;

    @Option(
            names = "--method",
            paramLabel = "METHOD",
            defaultValue = "maskcoft",
            description =
                    "${COMPLETION-CANDIDATES}: maskcoft = learned expert mask, then routers and adapters,"
                            + " then a soft prior; ce = routers and adapters, no mask; lora = adapters"
                            + " only (default: ${DEFAULT-VALUE}).")
    private Method method;

    @Option(
            names = "--model",
            paramLabel = "DIR",
            description = "Checkpoint folder to start from (default: the demo's base model).")
    private Path base;

    @Option(
            names = "--language",
            paramLabel = "CODE",
            defaultValue = "de",
            description = "Language to fine-tune on (default: ${DEFAULT-VALUE}).")
    private String language;

    @Option(
            names = "--steps",
            paramLabel = "N",
            defaultValue = "200",
            description = "Training steps (default: ${DEFAULT-VALUE}).")
    private int steps;

    @Option(
            names = "--batch",
            paramLabel = "N",
            defaultValue = "8",
            description = "Rows a batch (default: ${DEFAULT-VALUE}).")
    private int batch;

    @Option(
            names = "--sequence",
            paramLabel = "N",
            defaultValue = "256",
            description = "Tokens a row (default: ${DEFAULT-VALUE}).")
    private int sequence;

    @Option(
            names = "--learning-rate",
            paramLabel = "RATE",
            defaultValue = "2e-3",
            description = "Highest learning rate (default: ${DEFAULT-VALUE}).")
    private double learningRate;

    @Option(
            names = "--rank",
            paramLabel = "N",
            defaultValue = "16",
            description = "Rank of the adapters; alpha is twice that (default: ${DEFAULT-VALUE}).")
    private int rank;

    @Option(
            names = "--mask-steps",
            paramLabel = "N",
            defaultValue = "40",
            description = "maskcoft: updates of the mask (default: ${DEFAULT-VALUE}).")
    private int maskSteps;

    @Option(
            names = "--kept",
            paramLabel = "N",
            description =
                    "maskcoft: experts a layer that the mask keeps (default: three quarters).")
    private Integer kept;

    @Option(
            names = "--kept-total",
            paramLabel = "N",
            description =
                    "maskcoft: experts that all layers keep together, in place of --kept; how they"
                            + " are shared is learnt.")
    private Integer keptTotal;

    /** How the mask's gradient is estimated. */
    enum Estimator {
        /** From forward losses. */
        PLACKETT_LUCE,
        /** Straight through. */
        GUMBEL,
        /** Straight through, dropped experts too. */
        DENSE
    }

    @Option(
            names = "--estimator",
            paramLabel = "ESTIMATOR",
            description =
                    "maskcoft: how the mask learns, ${COMPLETION-CANDIDATES}: from forward losses,"
                            + " straight through, or straight through with --excluded dropped"
                            + " experts a token (default: plackett_luce).")
    private Estimator estimator;

    @Option(
            names = "--excluded",
            paramLabel = "N",
            description = "--estimator dense: dropped experts that run a token (default: 1).")
    private Integer excluded;

    @Option(
            names = "--load-weight",
            paramLabel = "X",
            description =
                    "maskcoft, plackett_luce: adds this times the replayed loads a token to the loss"
                            + " of a mask (default: 0).")
    private Double loadWeight;

    @Option(
            names = "--mask-weights",
            paramLabel = "WHICH",
            description =
                    "maskcoft: combine weights under the mask from the softmax over ${COMPLETION-CANDIDATES}"
                            + " experts; the same where the model divides them by their sum (default:"
                            + " all).")
    private MaskedWeights maskWeights;

    @Option(
            names = "--adapter-out",
            paramLabel = "DIR",
            description =
                    "Also write adapters, routers and prior by themselves into this folder, in the"
                            + " format of Hugging Face PEFT.")
    private Path adapterOut;

    @Option(
            names = "--half-experts",
            description =
                    "Hold the experts in BF16: half the memory for them. The saved model's experts"
                            + " are rounded to BF16 once, after merging; --adapter-out keeps what"
                            + " was trained.")
    private boolean halfExperts;

    @Override
    public Integer call() throws IOException {
        Arguments.positive("--steps", steps);
        Arguments.positive("--batch", batch);
        Arguments.positive("--sequence", sequence);
        Arguments.positive("--rank", rank);
        Arguments.positive("--mask-steps", maskSteps);
        Arguments.positive("--learning-rate", learningRate);
        saved.check();
        Language only = Arguments.language(language);
        Path folder = out.create(Path.of("runs", "finetune"));
        options.keepJsonOutside(folder);
        if (adapterOut != null) {
            Path place = adapterOut.toAbsolutePath().normalize();
            if (place.equals(folder.toAbsolutePath().normalize())
                    || (base != null && place.equals(base.toAbsolutePath().normalize()))) {
                throw new UserError(
                        "--adapter-out: " + adapterOut + " is the folder of a model; name another");
            }
            options.keepJsonOutside(adapterOut);
        }
        options.keepJsonOutside(base == null ? folder.resolve("base") : base);
        CheckpointFolder start =
                CheckpointFolder.of(
                        base == null ? BaseModel.extract(folder.resolve("base")) : base);
        if (sequence > start.config().maxPositionEmbeddings()) {
            throw new UserError(
                    "--sequence is "
                            + sequence
                            + ", but the model is made for "
                            + start.config().maxPositionEmbeddings()
                            + " tokens at most");
        }
        checkMaskOptions(start.config());
        Map<String, String> settings = settings(only);
        Optional<TrainingCheckpoint> last = saved.start(folder, settings);
        TextData text = TextData.load(only, sequence);
        PackedBatches batches = text.train().batches(batch, options.seed());
        // No more rows at a time than the plan is made for.
        Iterable<TokenBatch> validation =
                text.validation().sample(VALIDATION_ROWS, Math.min(batch, EVALUATION_BATCH));
        PlanSettings.Builder planned =
                PlanSettings.builder()
                        .setBatch(batch)
                        .setSequence(sequence)
                        .optAdapters(rank)
                        .optFrozenHalf(halfExperts);
        if (method == Method.MASKCOFT && recipe().estimator().needsBackward()) {
            planned.optMask(recipe().estimator().excludedExperts());
        }
        MemoryPlan plan = memory.plan(start.config(), planned);
        if (options.verbose()) {
            options.text().print(plan);
        }
        try (PeakMeter meter = PeakMeter.start();
                LanguageModel model = load(start, SavedStates.chunks(last, plan, settings))) {
            RunSaves saves = saved.of(folder, last, settings);
            List<float[]> routers = Moved.routers(model);
            double before = Evaluation.of(model, validation, t -> {}).perplexity();
            long begin = System.nanoTime();
            MaskCoFT.Result result = null;
            float[] losses;
            long tokens;
            try (StageProgress progress = new StageProgress(options)) {
                last.ifPresent(from -> progress.after(label(from), (int) from.state().step()));
                if (method == Method.MASKCOFT) {
                    MaskCoFT recipe = maskcoft(model, batches, validation);
                    result =
                            SavedStates.explained(
                                    () ->
                                            recipe.run(
                                                    (s, i, n, t, x) ->
                                                            progress.step(label(s), i, n, t, x),
                                                    saves));
                    losses = result.losses();
                } else {
                    CoAdaptation recipe = adapt(model, batches);
                    losses =
                            SavedStates.explained(
                                    () ->
                                            recipe.run(
                                                    (i, n, t, x) ->
                                                            progress.step(TRAINING, i, n, t, x),
                                                    saves));
                }
                tokens = progress.tokens();
            }
            double seconds = (System.nanoTime() - begin) / 1e9;
            if (adapterOut != null) {
                saveAdapter(model, result, start.path());
            }
            Moved moved = Moved.merging(model, routers);
            ExpertPrior prior = result == null ? null : result.prior();
            if (prior != null) {
                prior.apply(model.decoder());
            }
            double after = Evaluation.of(model, validation, t -> {}).perplexity();
            save(model, result, folder);
            Report report =
                    new Report(
                            method.name().toLowerCase(Locale.ROOT),
                            options.seed(),
                            language,
                            steps,
                            before,
                            after,
                            prior == null ? null : prior.prior().beta(),
                            tokens / seconds,
                            seconds,
                            Memory.megabytes(meter.stop().peakBytes()),
                            Memory.megabytes(plan.peakBytes()),
                            folder.toString(),
                            adapterOut == null ? null : adapterOut.toString(),
                            last.map(from -> label(from)).orElse(null),
                            last.map(from -> (int) from.state().step()).orElse(0),
                            moved,
                            losses);
            print(report, prior);
            options.writeJson(report);
        }
        return ExitCodes.OK;
    }

    private LanguageModel load(CheckpointFolder start, LanguageModel.Chunks chunks)
            throws IOException {
        return halfExperts ? start.loadHalf(chunks) : start.load(chunks);
    }

    private void saveAdapter(LanguageModel model, MaskCoFT.Result result, Path start)
            throws IOException {
        ExpertPrior.delete(adapterOut);
        model.saveAdapter(adapterOut, start.toString(), method != Method.LORA);
        if (result != null) {
            result.save(adapterOut);
        }
    }

    private void checkMaskOptions(MoeConfig config) {
        if (method != Method.MASKCOFT) {
            options.refuse(
                    "goes with --method maskcoft",
                    "--mask-steps",
                    "--kept",
                    "--kept-total",
                    "--estimator",
                    "--excluded",
                    "--load-weight",
                    "--mask-weights");
            return;
        }
        if (kept != null) {
            Arguments.kept(kept, config.topK(), config.numExperts());
        }
        if (keptTotal != null) {
            int least = config.topK() * config.numLayers();
            int most = config.numExperts() * config.numLayers();
            if (kept != null) {
                throw new UserError("--kept and --kept-total exclude each other");
            }
            if (keptTotal < least || keptTotal > most) {
                throw new UserError(
                        "--kept-total must be from "
                                + least
                                + " (top-k in every layer) to "
                                + most
                                + " (all experts), not "
                                + keptTotal);
            }
        }
        if (excluded != null) {
            Arguments.positive("--excluded", excluded);
            if (estimator != Estimator.DENSE) {
                throw new UserError("--excluded goes with --estimator dense");
            }
        }
        if (loadWeight != null) {
            if (!(loadWeight >= 0 && Double.isFinite(loadWeight))) {
                throw new UserError("--load-weight must be 0 or more, not " + loadWeight);
            }
            if (estimator != null && estimator != Estimator.PLACKETT_LUCE) {
                throw new UserError(
                        "--load-weight goes with --estimator plackett_luce: loads have no gradient");
            }
        }
        int dropped =
                recipe().budget(config.numLayers(), config.numExperts(), config.topK())
                        .mostDropped(config.numLayers(), config.numExperts());
        if (dropped == 0) {
            options.refuse(
                    "has no effect where the mask keeps all experts",
                    "--mask-steps",
                    "--estimator",
                    "--load-weight",
                    "--mask-weights");
        }
        if (excluded != null && excluded > dropped) {
            throw new UserError(
                    "--excluded must be from 1 to "
                            + dropped
                            + ", the most experts that the mask drops in a layer, not "
                            + excluded);
        }
    }

    /** What decides the run besides model and text; what is not here may change when it goes on. */
    private Map<String, String> settings(Language only) {
        Map<String, String> settings = new TreeMap<>();
        settings.put("--method", method.name().toLowerCase(Locale.ROOT));
        settings.put("--language", only.code());
        settings.put("--steps", Integer.toString(steps));
        settings.put("--batch", Integer.toString(batch));
        settings.put("--sequence", Integer.toString(sequence));
        settings.put("--learning-rate", Double.toString(learningRate));
        settings.put("--rank", Integer.toString(rank));
        settings.put("--half-experts", Boolean.toString(halfExperts));
        settings.put("--seed", Long.toString(options.seed()));
        put(settings, "--mask-steps", method == Method.MASKCOFT ? maskSteps : null);
        put(settings, "--kept", kept);
        put(settings, "--kept-total", keptTotal);
        put(settings, "--estimator", estimator);
        put(settings, "--excluded", excluded);
        put(settings, "--load-weight", loadWeight);
        put(settings, "--mask-weights", maskWeights);
        return settings;
    }

    private static void put(Map<String, String> settings, String option, Object value) {
        settings.put(option, value == null ? "default" : value.toString().toLowerCase(Locale.ROOT));
    }

    private String label(TrainingCheckpoint from) {
        return method == Method.MASKCOFT ? from.state().stage() : TRAINING;
    }

    private static String label(MaskCoFT.Stage stage) {
        return stage.name().toLowerCase(Locale.ROOT);
    }

    private MaskCoFT maskcoft(
            LanguageModel model, PackedBatches batches, Iterable<TokenBatch> validation) {
        return MaskCoFT.builder()
                .setModel(model)
                .setBatches(batches)
                .setValidation(validation)
                .optSettings(recipe())
                .build();
    }

    private MaskCoFTSettings recipe() {
        MaskCoFTSettings.Builder recipe =
                MaskCoFTSettings.builder()
                        .optMaskSteps(maskSteps)
                        .optSteps(steps)
                        .optAdapters(rank, 2.0 * rank)
                        .optHalfExperts(halfExperts)
                        .optLearningRate(learningRate)
                        .optSeed(options.seed());
        if (kept != null) {
            recipe.optKept(kept);
        }
        if (keptTotal != null) {
            recipe.optKeptTotal(keptTotal);
        }
        if (estimator != null) {
            recipe.optEstimator(
                    switch (estimator) {
                        case PLACKETT_LUCE -> MaskEstimator.plackettLuce();
                        case GUMBEL -> MaskEstimator.gumbel();
                        case DENSE -> MaskEstimator.dense(excluded == null ? 1 : excluded);
                    });
        }
        if (loadWeight != null) {
            recipe.optLoadWeight(loadWeight);
        }
        if (maskWeights != null) {
            recipe.optWeights(maskWeights);
        }
        return recipe.build();
    }

    private CoAdaptation adapt(LanguageModel model, PackedBatches batches) {
        return CoAdaptation.builder()
                .setModel(model)
                .setBatches(batches)
                .setSteps(steps)
                .optTrainRouters(method == Method.CE)
                .optAdapters(rank, 2.0 * rank)
                .optHalfExperts(halfExperts)
                .optLearningRate(learningRate)
                .optSeed(options.seed())
                .build();
    }

    private static void save(LanguageModel model, MaskCoFT.Result result, Path folder)
            throws IOException {
        // One from an earlier run into this folder would be applied to these weights.
        ExpertPrior.delete(folder);
        model.save(folder, SaveOptions.builder().build());
        if (result != null) {
            result.save(folder);
        }
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
            tokenizer.save(folder);
        }
    }

    private void print(Report report, ExpertPrior prior) {
        if (report.resumed_stage() != null) {
            options.text()
                    .printf(
                            "went on after step %d of %s%n",
                            report.resumed_from(), report.resumed_stage());
        }
        options.text()
                .printf(
                        Locale.ROOT,
                        "%s, %d steps: validation perplexity %.3f -> %.3f%n",
                        report.method(),
                        report.steps(),
                        report.perplexity_before(),
                        report.perplexity_after());
        if (prior != null) {
            options.text().printf("beta %s, kept experts:%n%s%n", report.beta(), prior.mask());
        }
        options.text().println(report.moved());
        options.text().printf("saved to %s%n", report.model());
        if (report.adapter() != null) {
            options.text().printf("adapter saved to %s%n", report.adapter());
        }
    }

    record Report(
            String method,
            long seed,
            String language,
            int steps,
            double perplexity_before,
            double perplexity_after,
            Double beta,
            double tokens_per_second,
            double seconds,
            double peak_mb,
            double planned_peak_mb,
            String model,
            String adapter,
            String resumed_stage,
            int resumed_from,
            Moved moved,
            float[] losses) {}
}
