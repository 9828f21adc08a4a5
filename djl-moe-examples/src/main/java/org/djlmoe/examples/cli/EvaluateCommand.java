package org.djlmoe.examples.cli;

import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.StringJoiner;
import java.util.concurrent.Callable;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.cache.ReplayResult;
import org.djlmoe.examples.tasks.TaskFile;
import org.djlmoe.examples.tasks.TaskItem;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.training.ChoiceEvaluation;
import org.djlmoe.training.ChoiceQuestion;
import org.djlmoe.training.LanguageModel;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe evaluate}: what a model makes of held-out text, and which experts it uses for it. */
@Command(
        name = "evaluate",
        description =
                "Perplexity, use of the experts and expert loads of a model on held-out text.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class EvaluateCommand implements Callable<Integer> {

    private static final List<EvictionPolicy.Type> POLICIES =
            List.of(
                    EvictionPolicy.Type.LRU,
                    EvictionPolicy.Type.LFU,
                    EvictionPolicy.Type.LFU_LIFETIME,
                    EvictionPolicy.Type.BELADY);

    @Option(
            names = "--model",
            required = true,
            paramLabel = "DIR",
            description = "Checkpoint folder.")
    private Path model;

    @Mixin private HeldOutText text;

    @Option(
            names = "--cache",
            paramLabel = "N",
            description =
                    "Experts a layer that the replayed cache holds (default: half of them, but what"
                            + " a token uses at least).")
    private Integer cache;

    @Option(
            names = "--trace",
            paramLabel = "FILE",
            description = "Write which experts each token went to; gzip if it ends in .gz.")
    private String traceFile;

    @Option(
            names = "--tasks",
            paramLabel = "FILE",
            description =
                    "Also answer the multiple-choice questions of a file of JSON lines, as moe corpus"
                            + " tasks writes it: accuracy by length-normalised log-likelihood.")
    private Path tasksFile;

    @Mixin private CommonOptions options;

    @Override
    public Integer call() throws IOException {
        List<TaskItem> items = null;
        if (tasksFile != null) {
            Arguments.inputFile("--tasks", tasksFile);
            options.keepJsonOff("--tasks", tasksFile);
            items = TaskFile.read(tasksFile);
        }
        Path target = null;
        if (traceFile != null) {
            target = Arguments.outputFileInPlace("--trace", traceFile);
            options.keepJsonOff("--trace", target);
            Arguments.outside("--trace", target, model);
            if (tasksFile != null) {
                Arguments.distinct("--trace", target, "--tasks", tasksFile);
            }
        }
        options.keepJsonOutside(model);
        CheckpointFolder folder = CheckpointFolder.of(model);
        int topK = folder.config().topK();
        int experts = folder.config().numExperts();
        int size = cache == null ? defaultCache(experts, topK) : cache;
        Arguments.cache("--cache", size, topK, experts);

        List<ChoiceQuestion> questions = items == null ? List.of() : tokenize(items);
        ChoiceEvaluation[] answered = new ChoiceEvaluation[1];
        HeldOutText.Run run =
                text.evaluate(
                        folder,
                        options,
                        model -> {
                            if (!questions.isEmpty()) {
                                answered[0] = answer(model, questions);
                            }
                        });
        ExpertTrace trace = run.evaluation().trace();
        List<ReplayResult> replayed =
                LoadReplay.builder().setCapacity(size).build().run(trace, POLICIES);
        Map<String, Double> loads = new LinkedHashMap<>();
        replayed.forEach(r -> loads.put(r.policy().jsonName(), r.loadsPerToken()));
        if (target != null) {
            trace.write(target);
        }
        Report report =
                new Report(
                        model.toString(),
                        run.language(),
                        run.split(),
                        run.rows(),
                        run.sequence(),
                        run.prior(),
                        run.evaluation().loss(),
                        run.evaluation().perplexity(),
                        run.evaluation().tokens(),
                        run.seconds(),
                        run.evaluation().tokens() / run.seconds(),
                        shares(trace),
                        trace.entropy(),
                        size,
                        replayed.get(0).startedCold(),
                        loads,
                        traceFile,
                        TaskFigures.of(answered[0]));
        print(report, run, trace);
        options.writeJson(report);
        return ExitCodes.OK;
    }

    /** Returns half of the experts, but what a token uses at least. */
    static int defaultCache(int experts, int topK) {
        return Math.max(topK, experts / 2);
    }

    /** What to say about a cache that has room for one token's experts only. */
    static String noChoice(int topK) {
        return "a cache of "
                + topK
                + " holds the experts of the last token and no others, whatever the policy";
    }

    private static List<ChoiceQuestion> tokenize(List<TaskItem> items) throws IOException {
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
            return TaskFile.tokenize(items, tokenizer);
        }
    }

    private ChoiceEvaluation answer(LanguageModel model, List<ChoiceQuestion> questions) {
        int choices = questions.stream().mapToInt(q -> q.choices().size()).sum();
        long[] before = {0};
        try (ProgressBar bar = options.progress("answering", choices).optUnit("choices").build()) {
            return ChoiceEvaluation.of(
                    model,
                    questions,
                    options.seed(),
                    done -> {
                        bar.advance(done - before[0]);
                        before[0] = done;
                    });
        }
    }

    private static double[][] shares(ExpertTrace trace) {
        double selections = (double) trace.tokens() * trace.topK();
        return Arrays.stream(trace.usage())
                .map(layer -> Arrays.stream(layer).mapToDouble(n -> n / selections).toArray())
                .toArray(double[][]::new);
    }

    private void print(Report report, HeldOutText.Run run, ExpertTrace trace) {
        PrintWriter out = options.text();
        out.println(run);
        out.printf(
                Locale.ROOT,
                "perplexity %.3f, loss %.4f nats/token, %d tokens, %.0f tokens/s%n",
                report.perplexity(),
                report.loss(),
                report.tokens(),
                report.tokens_per_second());
        out.printf(
                Locale.ROOT,
                "entropy in bits (%.2f if even) and share of the selections by expert, %%%n",
                Math.log(trace.numExperts()) / Math.log(2));
        for (int l = 0; l < trace.numLayers(); l++) {
            StringJoiner shares = new StringJoiner(" ");
            for (double share : report.expert_usage()[l]) {
                shares.add(String.format(Locale.ROOT, "%4.1f", 100 * share));
            }
            out.printf(
                    Locale.ROOT,
                    "layer %-3d %.2f  %s%n",
                    l,
                    report.routing_entropy_bits()[l],
                    shares);
        }
        StringJoiner loads = new StringJoiner(", ");
        report.loads_per_token()
                .forEach(
                        (policy, value) ->
                                loads.add(String.format(Locale.ROOT, "%s %.3f", policy, value)));
        out.printf(
                Locale.ROOT,
                "loads per token with %d of %d experts a layer cached, from a cold start: %s%n",
                report.cache(),
                trace.numExperts(),
                loads);
        if (report.cache() == trace.topK()) {
            out.println(noChoice(trace.topK()));
        }
        if (report.tasks() != null) {
            report.tasks().print(out);
        }
        if (report.trace() != null) {
            out.printf(Locale.ROOT, "trace written to %s%n", report.trace());
        }
    }

    record Report(
            String model,
            String language,
            String split,
            int rows,
            int sequence,
            HeldOutText.PriorFigures prior,
            double loss,
            double perplexity,
            long tokens,
            double seconds,
            double tokens_per_second,
            double[][] expert_usage,
            double[] routing_entropy_bits,
            int cache,
            boolean started_cold,
            Map<String, Double> loads_per_token,
            String trace,
            TaskFigures tasks) {}
}
