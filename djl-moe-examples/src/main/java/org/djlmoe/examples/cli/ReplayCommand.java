package org.djlmoe.examples.cli;

import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.stream.IntStream;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.cache.ReplayResult;
import org.djlmoe.routing.ExpertMask;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe replay}: how many expert loads each cache policy would need for a routing trace. */
@Command(
        name = "replay",
        description = "Expert loads per token of cache policies and sizes, from a routing trace.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false,
        footer = {
            "",
            "The policy static keeps the experts that this trace uses most, which only a look ahead"
                    + " can know.",
            "belady, the fewest loads that any policy can have, is always in the table."
        })
final class ReplayCommand implements Callable<Integer> {

    private static final String ALL = "all";

    @Option(
            names = "--trace",
            paramLabel = "FILE",
            description = "Trace, of 'moe evaluate --trace' or another program; gzip if .gz.")
    private Path traceFile;

    @Option(
            names = "--model",
            paramLabel = "DIR",
            description = "Instead of a trace: checkpoint folder of a model to trace.")
    private Path model;

    @Mixin private HeldOutText text;

    @Option(
            names = "--cache",
            paramLabel = "N",
            split = ",",
            description = "Experts a layer that the cache holds (default: half of them).")
    private int[] cache;

    @Option(
            names = "--policies",
            paramLabel = "NAME",
            split = ",",
            defaultValue = ALL,
            description = "Policies, such as lru,lfu (default: ${DEFAULT-VALUE}).")
    private List<String> policies;

    @Option(
            names = "--cold-per-request",
            description = "Begin each request with an empty cache (default: one for all requests).")
    private boolean coldPerRequest;

    @Option(
            names = "--warm-up",
            paramLabel = "N",
            defaultValue = "0",
            description =
                    "Tokens not counted, at the start or of each request that begins cold (default:"
                            + " ${DEFAULT-VALUE}).")
    private int warmUp;

    @Option(
            names = "--admission",
            paramLabel = "always|optional",
            defaultValue = "always",
            description =
                    "Whether a used expert must occupy a slot of the cache (default:"
                            + " ${DEFAULT-VALUE}).")
    private EvictionPolicy.Admission admission;

    @Mixin private CommonOptions options;

    @Override
    public Integer call() throws IOException {
        if ((traceFile == null) == (model == null)) {
            throw new UserError("name either a trace, --trace FILE, or a model, --model DIR");
        }
        if (warmUp < 0) {
            throw new UserError("--warm-up must be 0 or more, not " + warmUp);
        }
        Set<EvictionPolicy.Type> types = types();
        ExpertTrace trace;
        String source;
        if (traceFile != null) {
            HeldOutText.refuse("has no effect without --model", options);
            Arguments.inputFile("--trace", traceFile);
            options.keepJsonOff("--trace", traceFile);
            trace = ExpertTrace.read(traceFile);
            source = traceFile.toString();
            checkSizes(trace.topK(), trace.numExperts());
        } else {
            options.keepJsonOutside(model);
            CheckpointFolder folder = CheckpointFolder.of(model);
            checkSizes(folder.config().topK(), folder.config().numExperts());
            HeldOutText.Run run = text.evaluate(folder, options);
            trace = run.evaluation().trace();
            source = model + " on " + run;
        }
        List<ReplayResult> results = replay(trace, types);
        print(trace, source, results);
        options.writeJson(report(trace, source, results));
        return ExitCodes.OK;
    }

    private Set<EvictionPolicy.Type> types() {
        Set<EvictionPolicy.Type> types = new LinkedHashSet<>();
        for (String name : policies) {
            if (name.equals(ALL)) {
                types.addAll(Arrays.asList(EvictionPolicy.Type.values()));
            } else {
                try {
                    types.add(EvictionPolicy.Type.of(name));
                } catch (IllegalArgumentException e) {
                    throw new UserError("--policies: " + e.getMessage(), e);
                }
            }
        }
        // Last, as the line under the others that none of them can pass.
        types.remove(EvictionPolicy.Type.BELADY);
        types.add(EvictionPolicy.Type.BELADY);
        return types;
    }

    private void checkSizes(int topK, int experts) {
        if (cache != null) {
            IntStream.of(cache).forEach(size -> Arguments.cache("--cache", size, topK, experts));
        }
    }

    private List<ReplayResult> replay(ExpertTrace trace, Set<EvictionPolicy.Type> types) {
        int[] sizes =
                cache == null
                        ? new int[] {EvaluateCommand.defaultCache(trace.numExperts(), trace.topK())}
                        : IntStream.of(cache).distinct().toArray();
        List<ReplayResult> results = new ArrayList<>();
        long[][] usage = trace.usage();
        for (int size : sizes) {
            ExpertMask mostUsed =
                    ExpertMask.mostFrequent(usage, Math.min(size, trace.numExperts()));
            LoadReplay replay =
                    LoadReplay.builder()
                            .setCapacity(size)
                            .optAdmission(admission)
                            .optResetPerRequest(coldPerRequest)
                            .optWarmUpTokens(warmUp)
                            .optStaticSet(mostUsed)
                            .optSeed(options.seed())
                            .build();
            results.addAll(replay.run(trace, List.copyOf(types)));
        }
        return results;
    }

    private void print(ExpertTrace trace, String source, List<ReplayResult> results) {
        PrintWriter out = options.text();
        out.println(source);
        out.printf(
                Locale.ROOT,
                "%d requests, %d tokens, %d layers, top-%d of %d experts%n",
                trace.requests().size(),
                trace.tokens(),
                trace.numLayers(),
                trace.topK(),
                trace.numExperts());
        boolean cold = results.get(0).startedCold();
        out.printf(
                Locale.ROOT,
                "%s start: %s; %s%n",
                cold ? "cold" : "warm",
                coldPerRequest ? "a new cache for each request" : "one cache for all requests",
                cold
                        ? "the loads that fill it count"
                        : "the first "
                                + warmUp
                                + (coldPerRequest ? " tokens of each" : " tokens")
                                + " are not counted");
        out.printf(
                Locale.ROOT,
                "%5s  %-12s %12s %9s %9s%n",
                "cache",
                "policy",
                "loads/token",
                "hits",
                "/belady");
        for (ReplayResult result : results) {
            double bound = bound(results, result.capacity());
            out.printf(
                    Locale.ROOT,
                    "%5d  %-12s %12.3f %7.1f %% %9s%n",
                    result.capacity(),
                    result.policy().jsonName(),
                    result.loadsPerToken(),
                    100 * result.hitRate(),
                    bound == 0
                            ? "-"
                            : String.format(Locale.ROOT, "%.2f", result.loadsPerToken() / bound));
        }
        if (admission == EvictionPolicy.Admission.ALWAYS
                && results.stream().anyMatch(r -> r.capacity() == trace.topK())) {
            out.println(EvaluateCommand.noChoice(trace.topK()));
        }
    }

    private static double bound(List<ReplayResult> results, int capacity) {
        return results.stream()
                .filter(r -> r.capacity() == capacity)
                .filter(r -> r.policy() == EvictionPolicy.Type.BELADY)
                .findFirst()
                .orElseThrow()
                .loadsPerToken();
    }

    private Report report(ExpertTrace trace, String source, List<ReplayResult> results) {
        return new Report(
                source,
                trace.requests().size(),
                trace.tokens(),
                trace.numLayers(),
                trace.numExperts(),
                trace.topK(),
                admission.name().toLowerCase(Locale.ROOT),
                results.get(0).startedCold(),
                coldPerRequest,
                warmUp,
                results.get(0).tokens(),
                options.seed(),
                results.stream().map(Row::of).toList());
    }

    record Row(
            String policy,
            int cache,
            double loads_per_token,
            double hit_rate,
            double[] loads_per_token_by_layer) {

        static Row of(ReplayResult result) {
            return new Row(
                    result.policy().jsonName(),
                    result.capacity(),
                    result.loadsPerToken(),
                    result.hitRate(),
                    IntStream.range(0, result.misses().size())
                            .mapToDouble(result::loadsPerToken)
                            .toArray());
        }
    }

    record Report(
            String source,
            int requests,
            int tokens,
            int layers,
            int experts,
            int top_k,
            String admission,
            boolean started_cold,
            boolean cold_per_request,
            int warm_up_tokens,
            long counted_tokens,
            long seed,
            List<Row> results) {}
}
