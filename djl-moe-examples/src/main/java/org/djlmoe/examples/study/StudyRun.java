package org.djlmoe.examples.study;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumSet;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.stream.IntStream;
import java.util.zip.CRC32;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.data.PackedBatches;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.examples.serving.GenerationBench;
import org.djlmoe.examples.serving.ServingSettings;
import org.djlmoe.examples.tasks.TaskFile;
import org.djlmoe.examples.tasks.TaskGenerator;
import org.djlmoe.examples.tasks.TaskItem;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.examples.text.TextData;
import org.djlmoe.maskcoft.CoAdaptation;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.maskcoft.MaskLearning;
import org.djlmoe.maskcoft.MaskSearch;
import org.djlmoe.maskcoft.PriorSweep;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.serving.Packing;
import org.djlmoe.training.CachePriors;
import org.djlmoe.training.ChoiceEvaluation;
import org.djlmoe.training.ChoiceQuestion;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.LogitRanges;

/**
 * Trains every arm on every seed, with the same batches and the same initial adapters, and measures
 * each over the strengths of its prior. Strengths are chosen on validation text, figures come from
 * test text.
 *
 * <p>A trained model with all that is measured of it is a unit. Finished units are files; a study
 * that is run again into the same folder makes those that are missing.
 */
public final class StudyRun {

    /** What a training token costs in evaluated tokens, roughly. */
    private static final int TRAINING_COST = 3;

    private static final int LONGEST_TASK_ROW = 150;

    /** Tokens of a timed text that are its prompt. */
    private static final int PROMPT = 32;

    /** Is told what is going on. */
    @FunctionalInterface
    public interface Listener {

        /**
         * Called whenever something is done.
         *
         * @param label what is going on
         * @param work how much of {@link #work()} was done, in evaluated tokens
         * @param resumed whether an earlier run did it
         */
        void done(String label, long work, boolean resumed);
    }

    private record Job(Arm arm, int kept, long seed) {

        String name() {
            return switch (arm) {
                case BASE -> "base";
                case CONTROL -> "control-seed" + seed;
                default ->
                        "%s-kept%d-seed%d"
                                .formatted(arm.name().toLowerCase(Locale.ROOT), kept, seed);
            };
        }
    }

    private final StudySettings settings;
    private final Set<Arm> arms;
    private final Path base;
    private final MoeConfig config;
    private final UnitStore store;
    private final String settingsText;
    private final TextData text;
    private final PackedTokens other;
    private final List<ChoiceQuestion> questions;
    private Listener listener = (label, work, resumed) -> {};
    private String label = "";

    /**
     * Prepares a study.
     *
     * @param settings what is compared
     * @param arms the arms to run; the base and the control always do
     * @param base checkpoint folder of the model that all arms start from
     * @param folder where finished units are kept
     * @throws IOException if text or model cannot be read
     */
    public StudyRun(StudySettings settings, Set<Arm> arms, Path base, Path folder)
            throws IOException {
        this.settings = settings;
        this.arms = EnumSet.of(Arm.BASE, Arm.CONTROL);
        this.arms.addAll(arms);
        this.base = base;
        this.config = MoeConfig.fromJson(base.resolve(HfCheckpoint.CONFIG_FILE));
        this.store = new UnitStore(folder);
        this.text = TextData.load(settings.language(), settings.sequence());
        this.other = TextData.load(settings.otherLanguage(), settings.sequence()).test();
        this.questions = questions(settings);
        this.settingsText = text(settings, base);
    }

    private static List<ChoiceQuestion> questions(StudySettings settings) throws IOException {
        if (settings.taskItems() == 0) {
            return List.of();
        }
        List<TaskItem> items =
                new TaskGenerator(
                                TextData.documents(TextData.Part.TEST),
                                settings.language(),
                                settings.taskItems(),
                                0)
                        .generate();
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
            return TaskFile.tokenize(items, tokenizer);
        }
    }

    /** Everything that a unit depends on beside its name. More seeds and more arms may follow. */
    private static String text(StudySettings s, Path base) throws IOException {
        CRC32 crc = new CRC32();
        for (String file : List.of(HfCheckpoint.CONFIG_FILE, "model.safetensors")) {
            if (Files.exists(base.resolve(file))) {
                crc.update(Files.readAllBytes(base.resolve(file)));
            }
        }
        return ("model %08x, %s and %s, %d steps of %d x %d, mask %d x %d, rate %s, rank %d, soft %s"
                        + " for %s, first %d protected, rows %d and %d, %d questions, caches %s,"
                        + " claims at %d under %s, beta %s, lambda %s")
                .formatted(
                        crc.getValue(),
                        s.language().code(),
                        s.otherLanguage().code(),
                        s.steps(),
                        s.batch(),
                        s.sequence(),
                        s.maskSteps(),
                        s.maskSamples(),
                        s.learningRate(),
                        s.rank(),
                        s.softBeta(),
                        s.softShare(),
                        s.protectedTop(),
                        s.validationRows(),
                        s.testRows(),
                        s.taskItems(),
                        s.caches(),
                        s.cache(),
                        s.policy().jsonName(),
                        s.betas(),
                        s.lambdas());
    }

    private List<Job> jobs() {
        List<Job> jobs = new ArrayList<>();
        jobs.add(new Job(Arm.BASE, 0, settings.seeds().get(0)));
        for (long seed : settings.seeds()) {
            jobs.add(new Job(Arm.CONTROL, 0, seed));
            for (Arm arm : List.of(Arm.MASKCOFT, Arm.FREQUENT, Arm.RANDOM)) {
                if (wanted(arm)) {
                    jobs.add(new Job(arm, settings.kept(), seed));
                }
            }
        }
        for (int kept : settings.keptSweep()) {
            for (long seed : settings.seeds().stream().limit(settings.keptSeeds()).toList()) {
                for (Arm arm : List.of(Arm.MASKCOFT, Arm.FREQUENT)) {
                    if (wanted(arm)) {
                        jobs.add(new Job(arm, kept, seed));
                    }
                }
            }
        }
        return jobs;
    }

    private boolean wanted(Arm arm) {
        return arms.contains(arm) || (arm == Arm.MASKCOFT && arms.contains(Arm.MASKCOFT_CACHE));
    }

    /** The sweeps of a model. Sweeps over what is kept are about the static prior alone. */
    private List<Arm> series(Job job) {
        return Arrays.stream(Arm.values())
                .filter(arm -> arm.model() == job.arm)
                .filter(
                        arm ->
                                !arm.steersByCache()
                                        || (arms.contains(arm)
                                                && (job.kept == 0 || job.kept == settings.kept())))
                .toList();
    }

    /**
     * Returns how much there is to do in all.
     *
     * @return work in evaluated tokens
     */
    public long work() {
        return jobs().stream().mapToLong(this::work).sum();
    }

    private long work(Job job) {
        long step = (long) settings.batch() * settings.sequence();
        long work = job.arm == Arm.BASE ? 0 : TRAINING_COST * step * settings.steps();
        if (job.arm == Arm.MASKCOFT) {
            work += step * settings.maskSteps() * settings.maskSamples();
        }
        for (Arm arm : series(job)) {
            work += pointWork() * strengths(arm) + otherRows() * settings.sequence();
            work += asksQuestions(job) ? questionWork() : 0;
        }
        return work;
    }

    private int strengths(Arm arm) {
        if (arm.steersByCache()) {
            return settings.lambdas().size();
        }
        return arm == Arm.BASE || arm == Arm.CONTROL ? 1 : settings.betas().size();
    }

    private long pointWork() {
        return settings.sequence()
                * ((long) Math.min(settings.validationRows(), text.validation().rows())
                        + Math.min(settings.testRows(), text.test().rows()));
    }

    private long otherRows() {
        return Math.min(settings.testRows() / 2, other.rows());
    }

    private boolean asksQuestions(Job job) {
        return !questions.isEmpty() && (job.kept == 0 || job.kept == settings.kept());
    }

    private long questionWork() {
        return (long) LONGEST_TASK_ROW * questions.stream().mapToInt(q -> q.choices().size()).sum();
    }

    /**
     * Runs what is not done yet.
     *
     * @param told is told what is going on
     * @return what was found, in this run and before
     * @throws IOException if a checkpoint or a unit cannot be read or written
     * @throws IllegalArgumentException if the folder has units of other settings
     */
    public StudyReport run(Listener told) throws IOException {
        listener = told;
        long start = System.nanoTime();
        List<Figures.Unit> units = units();
        Results results = new Results(units, times());
        return new StudyReport(settings, results, (System.nanoTime() - start) / 1e9);
    }

    private List<Figures.Unit> units() throws IOException {
        List<Figures.Unit> units = new ArrayList<>();
        for (Job job : jobs()) {
            label = job.name();
            Figures.Unit unit = store.read(job.name(), settingsText);
            // One that an earlier run made for fewer arms lacks sweeps.
            if (unit == null
                    || !unit.series().stream()
                            .map(Figures.Series::arm)
                            .toList()
                            .containsAll(series(job))) {
                unit = make(job, units);
                store.write(unit);
            } else {
                listener.done(label, work(job), true);
            }
            units.add(unit);
        }
        return units;
    }

    private void done(long work) {
        listener.done(label, work, false);
    }

    private Figures.Unit make(Job job, List<Figures.Unit> before) throws IOException {
        try (LanguageModel model = LanguageModel.load(base, LanguageModel.Chunks.DEFAULT)) {
            ExpertMask mask = mask(job, model);
            if (job.arm != Arm.BASE) {
                adapt(job, model, mask);
            }
            double limit = limit(job, before);
            List<Double> ranges = LogitRanges.measure(model, validation());
            List<Figures.Series> series = new ArrayList<>();
            SelectionPrior chosen = null;
            for (Arm arm : series(job)) {
                List<Figures.Point> points = new ArrayList<>();
                List<SelectionPrior> priors = new ArrayList<>();
                for (int i = 0; i < strengths(arm); i++) {
                    SelectionPrior prior =
                            mask == null ? null : arm.steersByCache() ? chosen : prior(i);
                    double lambda = arm.steersByCache() ? settings.lambdas().get(i) : 0;
                    priors.add(prior);
                    points.add(point(model, mask, prior, lambda, ranges, arm.steersByCache()));
                    done(pointWork());
                }
                if (job.arm == Arm.BASE || job.arm == Arm.CONTROL) {
                    limit = arm.steersByCache() ? limit : limit(points.get(0));
                }
                int choice = choose(points, limit);
                if (!arm.steersByCache()) {
                    chosen = priors.get(choice);
                }
                boolean asks = asksQuestions(job);
                series.add(
                        finish(
                                model,
                                mask,
                                priors.get(choice),
                                ranges,
                                arm,
                                points,
                                choice,
                                points.get(choice).validation() <= limit,
                                asks));
            }
            if (job.arm != Arm.BASE
                    && timed(job.seed)
                    && (job.kept == 0 || job.kept == settings.kept())) {
                keep(job, model, mask, chosen);
            }
            return new Figures.Unit(
                    job.name(),
                    settingsText,
                    job.kept,
                    job.seed,
                    mask == null ? null : mask.toJson(),
                    series);
        }
    }

    private SelectionPrior prior(int i) {
        double beta = settings.betas().get(i);
        return Double.isInfinite(beta)
                ? SelectionPrior.hardMask()
                : SelectionPrior.additive(beta).withProtectedTop(settings.protectedTop());
    }

    private static double limit(Figures.Point without) {
        return PriorSweep.TOLERANCE * without.validation();
    }

    /**
     * A factor times the control's perplexity on the validation text. The base and the control have
     * their own without prior, which is not known yet.
     */
    private static double limit(Job job, List<Figures.Unit> before) {
        if (job.arm == Arm.BASE || job.arm == Arm.CONTROL) {
            return Double.NaN;
        }
        return before.stream()
                .flatMap(unit -> unit.seed() == job.seed ? unit.series().stream() : null)
                .filter(series -> series.arm() == Arm.CONTROL)
                .mapToDouble(series -> limit(series.choice()))
                .findFirst()
                .orElseThrow();
    }

    /** As {@link PriorSweep#choose} does. */
    static int choose(List<Figures.Point> points, double limit) {
        List<PriorSweep.Point> sweep = new ArrayList<>();
        for (Figures.Point point : points) {
            // The prior is not looked at.
            sweep.add(
                    new PriorSweep.Point(
                            SelectionPrior.additive(0),
                            point.validation(),
                            point.validationLoads()));
        }
        PriorSweep.Point chosen = PriorSweep.choose(sweep, limit).chosen();
        return IntStream.range(0, points.size())
                .filter(i -> sweep.get(i) == chosen)
                .findFirst()
                .orElseThrow();
    }

    private ExpertMask mask(Job job, LanguageModel model) {
        return switch (job.arm) {
            case RANDOM ->
                    ExpertMask.random(config.numLayers(), config.numExperts(), job.kept, job.seed);
            case FREQUENT -> ExpertMask.mostFrequent(usage(model), job.kept);
            case MASKCOFT ->
                    MaskSearch.run(
                            model,
                            batches(job.seed),
                            MaskLearning.builder()
                                    .setNumLayers(config.numLayers())
                                    .setNumExperts(config.numExperts())
                                    .setKept(job.kept)
                                    .setTopK(config.topK())
                                    .optSamples(settings.maskSamples())
                                    .optInitialUsage(usage(model), 1)
                                    .optSeed(job.seed)
                                    .build(),
                            settings.maskSteps(),
                            (step, steps, tokens, loss) -> done(tokens));
            default -> null;
        };
    }

    private long[][] usage(LanguageModel model) {
        return Evaluation.of(model, validation(), t -> {}).trace().usage();
    }

    private void adapt(Job job, LanguageModel model, ExpertMask mask) {
        CoAdaptation.Builder stage =
                CoAdaptation.builder()
                        .setModel(model)
                        .setBatches(batches(job.seed))
                        .setSteps(settings.steps())
                        .optMask(mask)
                        .optAdapters(settings.rank(), 2.0 * settings.rank())
                        .optLearningRate(settings.learningRate())
                        .optSeed(job.seed);
        if (mask != null) {
            stage.optSoftPrior(
                    SelectionPrior.additive(settings.softBeta())
                            .withProtectedTop(settings.protectedTop()),
                    settings.softShare());
        }
        stage.build().run((step, steps, tokens, loss) -> done(TRAINING_COST * tokens));
    }

    private PackedBatches batches(long seed) {
        return text.train().batches(settings.batch(), seed);
    }

    private Iterable<TokenBatch> validation() {
        return text.validation().sample(settings.validationRows(), StudySettings.EVALUATION_BATCH);
    }

    private Figures.Point point(
            LanguageModel model,
            ExpertMask mask,
            SelectionPrior prior,
            double lambda,
            List<Double> ranges,
            boolean steered) {
        rank(model, mask, prior);
        Evaluation validation = evaluate(model, validation(), lambda, ranges, steered);
        Evaluation test =
                evaluate(
                        model,
                        text.test().sample(settings.testRows(), StudySettings.EVALUATION_BATCH),
                        lambda,
                        ranges,
                        steered);
        return point(prior, lambda, validation, test);
    }

    private Figures.Point point(
            SelectionPrior prior, double lambda, Evaluation validation, Evaluation test) {
        boolean hard = prior != null && prior.isHardMask();
        return new Figures.Point(
                prior == null || hard ? 0 : prior.beta(),
                hard,
                lambda,
                validation.perplexity(),
                LoadReplay.builder()
                        .setCapacity(settings.cache())
                        .build()
                        .run(validation.trace(), settings.policy())
                        .loadsPerToken(),
                test.perplexity(),
                loads(validation.trace(), test.trace()));
    }

    /** The static policy's set is what the arm itself uses most on the validation text. */
    private List<Figures.Load> loads(ExpertTrace validation, ExpertTrace test) {
        List<Figures.Load> loads = new ArrayList<>();
        for (int cache : settings.caches()) {
            LoadReplay replay =
                    LoadReplay.builder()
                            .setCapacity(cache)
                            .optStaticSet(ExpertMask.mostFrequent(validation.usage(), cache))
                            .build();
            for (EvictionPolicy.Type policy : EvictionPolicy.Type.values()) {
                double value = replay.run(test, policy).loadsPerToken();
                loads.add(new Figures.Load(cache, policy.jsonName(), value));
            }
        }
        return loads;
    }

    private static void rank(LanguageModel model, ExpertMask mask, SelectionPrior prior) {
        if (prior == null) {
            ExpertPrior.clear(model.decoder());
        } else {
            new ExpertPrior(mask, prior).apply(model.decoder());
        }
    }

    private Evaluation evaluate(
            LanguageModel model,
            Iterable<TokenBatch> batches,
            double lambda,
            List<Double> ranges,
            boolean steered) {
        try (CachePriors priors = steered ? steer(model, lambda, ranges) : null) {
            return Evaluation.of(model, batches, t -> {});
        }
    }

    private CachePriors steer(LanguageModel model, double lambda, List<Double> ranges) {
        return CachePriors.attach(model, lambda, ranges, settings.cache(), settings.policy(), 1);
    }

    /** What is measured at the chosen strength alone. */
    private Figures.Series finish(
            LanguageModel model,
            ExpertMask mask,
            SelectionPrior prior,
            List<Double> ranges,
            Arm arm,
            List<Figures.Point> points,
            int choice,
            boolean withinLimit,
            boolean asks) {
        rank(model, mask, prior);
        double lambda = points.get(choice).lambda();
        boolean steered = arm.steersByCache();
        Evaluation foreign =
                evaluate(
                        model,
                        other.sample((int) otherRows(), StudySettings.EVALUATION_BATCH),
                        lambda,
                        ranges,
                        steered);
        done(otherRows() * settings.sequence());
        List<Figures.Task> tasks = List.of();
        if (asks) {
            try (CachePriors priors = steered ? steer(model, lambda, ranges) : null) {
                tasks =
                        ChoiceEvaluation.of(model, questions, 0, t -> {}).tasks().stream()
                                .map(t -> new Figures.Task(t.task(), t.questions(), t.accuracy()))
                                .toList();
            }
            done(questionWork());
        }
        return new Figures.Series(
                arm, points, choice, withinLimit, point(prior, lambda, foreign, foreign), tasks);
    }

    /** Keeps the model for {@link #times}. Merges the adapters, so this comes last. */
    private void keep(Job job, LanguageModel model, ExpertMask mask, SelectionPrior prior)
            throws IOException {
        for (MoeBlock layer : model.decoder().moeBlocks()) {
            layer.experts().mergeAdapters();
        }
        Path folder = store.model(job.name());
        model.save(folder, SaveOptions.builder().build());
        if (mask != null) {
            new ExpertPrior(mask, prior).save(folder);
        }
    }

    private boolean timed(long seed) {
        return settings.seeds().indexOf(seed) < settings.timedSeeds();
    }

    private List<Figures.Times> times() throws IOException {
        List<Figures.Times> all = new ArrayList<>();
        for (long seed : settings.seeds().stream().filter(this::timed).toList()) {
            List<Job> jobs =
                    jobs().stream()
                            .filter(job -> job.arm != Arm.BASE && job.seed == seed)
                            .filter(job -> job.kept == 0 || job.kept == settings.kept())
                            .toList();
            String name = "times-seed" + seed;
            String made = settingsText + ", " + jobs.stream().map(Job::name).toList();
            Figures.Times times = store.readTimes(name, made);
            label = name;
            if (times == null) {
                times = measure(name, made, seed, jobs);
                store.write(times);
            }
            all.add(times);
        }
        return all;
    }

    private Figures.Times measure(String name, String made, long seed, List<Job> jobs)
            throws IOException {
        List<int[]> texts = new ArrayList<>();
        for (TokenBatch batch : text.test().sample(settings.timedTexts(), 1)) {
            texts.add(batch.inputs());
        }
        try {
            return measure(name, made, seed, jobs, texts, true);
        } catch (IOException | UnsupportedOperationException e) {
            // Not every file system lets a reader go around the page cache.
            return measure(name, made, seed, jobs, texts, false);
        }
    }

    private Figures.Times measure(
            String name, String made, long seed, List<Job> jobs, List<int[]> texts, boolean cold)
            throws IOException {
        List<Figures.Timing> timings = new ArrayList<>();
        for (int widen : List.of(1, settings.widen())) {
            ServingSettings serving =
                    ServingSettings.offloaded(settings.cache())
                            .withPolicy(settings.policy())
                            .withPacking(new Packing(false, widen))
                            .withCold(cold);
            List<GenerationBench.Arm> arms = new ArrayList<>();
            List<Arm> named = new ArrayList<>(List.of(Arm.BASE));
            arms.add(new GenerationBench.Arm("base", base, null, serving));
            for (Job job : jobs) {
                named.add(job.arm);
                arms.add(GenerationBench.Arm.of(job.name(), store.model(job.name()), serving));
            }
            List<GenerationBench.Result> results = GenerationBench.run(arms, texts, PROMPT);
            for (int i = 0; i < results.size(); i++) {
                GenerationBench.Result result = results.get(i);
                timings.add(
                        new Figures.Timing(
                                named.get(i),
                                widen,
                                result.millisPerToken(),
                                result.loadingShare(),
                                result.loadsPerToken()));
            }
        }
        String reads =
                cold ? "a file, around the page cache" : "a file that the page cache may hold";
        return new Figures.Times(name, made, seed, reads, timings);
    }
}
