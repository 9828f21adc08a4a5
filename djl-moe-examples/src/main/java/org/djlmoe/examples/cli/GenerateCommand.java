package org.djlmoe.examples.cli;

import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.concurrent.Callable;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.examples.demo.BaseModel;
import org.djlmoe.examples.files.TemporaryFolder;
import org.djlmoe.examples.serving.ServedCheckpoint;
import org.djlmoe.examples.serving.ServingSettings;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.serving.ExpertTraffic;
import org.djlmoe.serving.GenerationSettings;
import org.djlmoe.serving.Generator;
import org.djlmoe.serving.IncrementalDecoder;
import org.djlmoe.serving.Packing;
import org.djlmoe.serving.Prefetch;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe generate}: continues a text with experts that are loaded when they are asked for. */
@Command(
        name = "generate",
        description = "Continue a text, with some of the experts in fast memory or all of them.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false,
        footer = {
            "",
            "The same seed gives the same text, whatever the cache. Times per token leave out the"
                    + " prompt and the first token."
        })
final class GenerateCommand implements Callable<Integer> {

    private static final String ALL_RESIDENT = "all-resident";

    @Option(
            names = {"--checkpoint", "--model"},
            paramLabel = "DIR",
            description = "Checkpoint folder (default: the base model that comes along).")
    private Path checkpoint;

    @Option(
            names = "--prompt",
            paramLabel = "TEXT",
            defaultValue = "Mr President, ",
            description = "The text to continue (default: \"${DEFAULT-VALUE}\").")
    private String prompt;

    @Option(
            names = "--prior",
            paramLabel = "none|hard|BETA",
            description =
                    "How strongly the model's preferred experts are preferred (default: what its "
                            + ExpertPrior.FILE
                            + " says, none without one).")
    private String prior;

    @Option(
            names = "--expert-cache",
            paramLabel = "C",
            description =
                    "Experts a layer in fast memory (default: half of them, but what a token uses at"
                            + " least).")
    private Integer expertCache;

    @Option(
            names = "--policy",
            paramLabel = "P",
            defaultValue = "lfu_lifetime",
            description =
                    "Who leaves a full cache: lru, lfu, lfu_lifetime, fifo, random, discounted or"
                            + " static (default: ${DEFAULT-VALUE}).")
    private String policy;

    @Option(
            names = "--admission",
            paramLabel = "always|optional",
            description =
                    "Whether a policy may decline an expert that was just used (optional) or not"
                            + " (always, the default).")
    private EvictionPolicy.Admission admission = EvictionPolicy.Admission.ALWAYS;

    @Option(
            names = "--prefetch",
            paramLabel = "WAY",
            defaultValue = "off",
            description =
                    "What is loaded ahead for the next layer: off, router or frequency (default:"
                            + " ${DEFAULT-VALUE}).")
    private String prefetch;

    @Option(
            names = "--all-resident",
            description = "Keep all experts in fast memory; nothing is loaded.")
    private boolean allResident;

    @Option(
            names = "--tier",
            description = "Where the other experts are: ${COMPLETION-CANDIDATES} (default: file).")
    private ServingSettings.Tier tier;

    @Option(
            names = "--store",
            paramLabel = "FILE",
            description =
                    "Keep the packed experts in this file and use it again (default: a temporary"
                            + " file).")
    private String store;

    @Option(
            names = "--cold",
            description = "Have every load come from the disk instead of the system's page cache.")
    private boolean cold;

    @Option(
            names = "--bf16",
            description = "Store the experts in BF16, half the bytes, instead of F32.")
    private boolean bf16;

    @Option(
            names = "--pad-inner",
            paramLabel = "Nx",
            defaultValue = "1x",
            description =
                    "Make the experts N times as wide with zeros: the same text, more to load and to"
                            + " compute, as with a larger model.")
    private String padInner;

    @Option(
            names = "--max-tokens",
            paramLabel = "N",
            defaultValue = "128",
            description = "The most tokens to generate (default: ${DEFAULT-VALUE}).")
    private int maxTokens;

    @Option(
            names = "--temperature",
            paramLabel = "T",
            defaultValue = "0.8",
            description =
                    "What logits are divided by; 0 takes the likeliest token (default:"
                            + " ${DEFAULT-VALUE}).")
    private double temperature;

    @Option(
            names = "--top-k",
            paramLabel = "N",
            defaultValue = "0",
            description = "Draw among the N likeliest tokens only (default: all).")
    private int topK;

    @Option(
            names = "--top-p",
            paramLabel = "P",
            defaultValue = "0.95",
            description =
                    "Draw among the likeliest tokens that together reach this probability (default:"
                            + " ${DEFAULT-VALUE}).")
    private double topP;

    @Option(
            names = "--repetition-penalty",
            paramLabel = "R",
            defaultValue = "1",
            description =
                    "Divide the logits of tokens that are in the text already (default:"
                            + " ${DEFAULT-VALUE}, none).")
    private double repetitionPenalty;

    @Option(
            names = "--stop",
            paramLabel = "TEXT",
            description = "End before this text; may be given several times.")
    private List<String> stop = List.of();

    @Option(
            names = "--compare",
            paramLabel = "DIR|all-resident",
            description =
                    "Then do the same with another checkpoint, or with all experts resident, and set"
                            + " the figures side by side.")
    private String compare;

    @Option(
            names = "--trace",
            paramLabel = "FILE",
            description =
                    "Write which experts each token of prompt and text went to; gzip if it ends in"
                            + " .gz.")
    private String traceFile;

    @Mixin private AdapterFolder adapter;

    @Mixin private CommonOptions options;

    @Override
    public Integer call() throws IOException {
        Path target = traceFile == null ? null : Arguments.outputFile("--trace", traceFile);
        GenerationSettings settings = generation();
        if (prompt.isEmpty()) {
            throw new UserError("--prompt is empty: give at least a letter");
        }
        keepFilesApart(target);
        try (TemporaryFolder base = TemporaryFolder.create("djl-moe-base-");
                TemporaryFolder merged = TemporaryFolder.create("djl-moe-merged-")) {
            Path folder = checkpoint == null ? BaseModel.extract(base.path()) : checkpoint;
            if (adapter.path() != null && store != null) {
                throw new UserError(
                        "--store keeps the experts of a checkpoint, not merged ones: leave it out, or"
                                + " write the merged model with finetune");
            }
            CheckpointFolder own = adapter.merged(CheckpointFolder.of(folder), merged.path());
            List<Side> sides = sides(own, checkpoint == null ? "base model" : folder.toString());
            List<Figures> figures = new ArrayList<>();
            for (Side side : sides) {
                figures.add(generate(side, settings, sides.size() > 1, target));
            }
            if (figures.size() > 1) {
                compare(figures.get(0), figures.get(1));
            }
            if (target != null) {
                options.text().printf(Locale.ROOT, "trace written to %s%n", traceFile);
            }
            options.writeJson(new Report(prompt, options.seed(), Drawing.of(settings), figures));
            return ExitCodes.OK;
        }
    }

    /** Fails if a file to be written is another one, or one of a model that is read. */
    private void keepFilesApart(Path trace) {
        Path packed = store == null ? null : Arguments.outputFile("--store", store);
        List<Path> models = new ArrayList<>();
        if (checkpoint != null) {
            models.add(checkpoint);
        }
        if (compare != null && !compare.equals(ALL_RESIDENT)) {
            models.add(Path.of(compare));
        }
        for (Path folder : models) {
            options.keepJsonOutside(folder);
            if (trace != null) {
                Arguments.outside("--trace", trace, folder);
            }
            if (packed != null) {
                Arguments.outside("--store", packed, folder);
            }
        }
        if (trace != null) {
            options.keepJsonOff("--trace", trace);
        }
        if (packed != null) {
            options.keepJsonOff("--store", packed);
            if (trace != null) {
                Arguments.distinct("--trace", trace, "--store", packed);
            }
        }
    }

    private GenerationSettings generation() throws IOException {
        Arguments.positive("--max-tokens", maxTokens);
        if (temperature == 0) {
            options.refuse("has no effect with --temperature 0", "--top-k", "--top-p");
        }
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
            return GenerationSettings.builder()
                    .optMaxTokens(maxTokens)
                    .optTemperature(temperature)
                    .optTopK(topK)
                    .optTopP(topP)
                    .optRepetitionPenalty(repetitionPenalty)
                    .optStopTokens(Set.of(tokenizer.endOfText(), tokenizer.padding()))
                    .optStopStrings(stop)
                    .optSeed(options.seed())
                    .build();
        }
    }

    /** One way of serving one folder. */
    private record Side(
            String name, CheckpointFolder folder, ExpertPrior prior, ServingSettings settings) {}

    private List<Side> sides(CheckpointFolder own, String name) throws IOException {
        ServingSettings settings = serving(own.config());
        List<Side> sides = new ArrayList<>();
        sides.add(side(name, own, settings));
        if (ALL_RESIDENT.equals(compare)) {
            if (allResident) {
                throw new UserError(
                        "--compare all-resident compares nothing with --all-resident: drop one");
            }
            ServingSettings resident = ServingSettings.allResident(settings.packing());
            sides.add(side(name, own, resident));
        } else if (compare != null) {
            if (store != null) {
                throw new UserError(
                        "--store holds the experts of one checkpoint: leave it out to compare two");
            }
            CheckpointFolder other = CheckpointFolder.of("--compare", Path.of(compare));
            sides.add(side(compare, other, serving(other.config())));
        }
        if (traceFile != null && sides.size() > 1) {
            throw new UserError("--trace writes one run: leave out --compare");
        }
        return sides;
    }

    private Side side(String name, CheckpointFolder folder, ServingSettings settings)
            throws IOException {
        return new Side(name, folder, folder.prior(prior), settings);
    }

    private ServingSettings serving(MoeConfig config) {
        Packing packing = new Packing(bf16, widening());
        if (allResident) {
            options.refuse(
                    "has no effect with --all-resident",
                    "--expert-cache",
                    "--policy",
                    "--admission",
                    "--prefetch",
                    "--cold",
                    "--tier",
                    "--store");
            return ServingSettings.allResident(packing);
        }
        int size =
                expertCache == null
                        ? EvaluateCommand.defaultCache(config.numExperts(), config.topK())
                        : expertCache;
        Arguments.cache("--expert-cache", size, config.topK(), config.numExperts());
        ServingSettings.Tier from = tier == null ? ServingSettings.Tier.FILE : tier;
        if (from == ServingSettings.Tier.HOST && (cold || store != null)) {
            throw new UserError(
                    (cold ? "--cold" : "--store") + " needs experts in a file: drop --tier host");
        }
        EvictionPolicy.Type type = EvictionPolicy.Type.of(policy);
        if (type == EvictionPolicy.Type.BELADY) {
            throw new UserError(
                    "--policy belady knows the future, which only moe replay has: choose another"
                            + " one");
        }
        if (admission == EvictionPolicy.Admission.OPTIONAL && !type.mayDecline()) {
            throw new UserError(
                    "--admission optional has no effect with --policy "
                            + policy
                            + ", which declines no expert");
        }
        Path file = store == null ? null : Arguments.outputFile("--store", store);
        return new ServingSettings(
                size,
                type,
                admission,
                Prefetch.of(prefetch),
                from,
                cold,
                packing,
                file,
                options.seed());
    }

    private int widening() {
        String digits = padInner.toLowerCase(Locale.ROOT).replaceFirst("x$", "");
        try {
            int factor = Integer.parseInt(digits);
            if (factor >= 1) {
                return factor;
            }
        } catch (NumberFormatException e) {
            // Answered below.
        }
        throw new UserError(
                "--pad-inner must be a factor of 1 or more, such as 16x, not '" + padInner + "'");
    }

    private Figures generate(Side side, GenerationSettings settings, boolean named, Path trace)
            throws IOException {
        PrintWriter out = options.text();
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer();
                ServedCheckpoint served =
                        ServedCheckpoint.open(
                                side.folder().path(), side.prior(), side.settings())) {
            IncrementalDecoder decoder = served.decoder();
            ExpertTrace.Builder routing = trace == null ? null : record(decoder);
            if (named) {
                out.printf(Locale.ROOT, "== %s, %s%n", side.name(), decoder.experts().describe());
            }
            out.print(prompt);
            out.flush();
            Generator.Result result =
                    new Generator(decoder, tokenizer::decode)
                            .generate(
                                    tokenizer.encode(prompt),
                                    settings,
                                    piece -> {
                                        out.print(piece);
                                        out.flush();
                                    });
            out.println();
            Figures figures = Figures.of(side.name(), decoder, side.prior(), result);
            print(figures);
            if (routing != null) {
                routing.build().write(trace);
            }
            return figures;
        } catch (CheckpointException | SafetensorsException e) {
            throw new UserError(e.getMessage(), e);
        }
    }

    private static ExpertTrace.Builder record(IncrementalDecoder decoder) {
        MoeConfig config = decoder.decoder().config();
        ExpertTrace.Builder trace =
                ExpertTrace.builder()
                        .setNumExperts(config.numExperts())
                        .setTopK(config.topK())
                        .setNumLayers(config.numLayers())
                        .beginRequest();
        for (int l = 0; l < config.numLayers(); l++) {
            int layer = l;
            decoder.decoder()
                    .moeBlocks()
                    .get(l)
                    .router()
                    .setObserver(ids -> trace.append(layer, ids.toLongArray()));
        }
        return trace;
    }

    private void print(Figures f) {
        PrintWriter out = options.text();
        out.printf(Locale.ROOT, "%nexperts: %s%n", f.experts());
        out.printf(
                Locale.ROOT,
                "prior: %s; fast memory for experts %.1f MB%n",
                f.prior() == null ? "none" : f.prior(),
                Memory.megabytes(f.resident_bytes()));
        out.printf(
                Locale.ROOT,
                "prompt: %d tokens in %.3f s, %d loads; stopped by %s%n",
                f.prompt_tokens(),
                f.prompt_seconds(),
                f.prompt_loads(),
                f.stopped_by());
        if (f.tokens() < 2) {
            out.println("one token alone has no time per token");
            return;
        }
        out.printf(
                Locale.ROOT,
                "%d tokens, %.1f tokens/s, %.3f ms per output token, %.1f %% of it waiting for loads"
                        + " (the loader was reading for %.1f %%)%n",
                f.tokens(),
                f.tokens_per_second(),
                f.ms_per_token(),
                100 * f.loading_share(),
                100 * f.reading_share());
        out.printf(
                Locale.ROOT,
                "%.3f loads per token, hit rate %.1f %%, %.1f MB loaded; prefetched %d, of use %d%n",
                f.loads_per_token(),
                100 * f.hit_rate(),
                Memory.megabytes(f.bytes_loaded()),
                f.prefetches(),
                f.prefetch_hits());
    }

    private void compare(Figures a, Figures b) {
        options.text()
                .printf(
                        Locale.ROOT,
                        "%nsecond against first: time per output token %s, loads per token %s, %s%n",
                        change(a.ms_per_token(), b.ms_per_token()),
                        change(a.loads_per_token(), b.loads_per_token()),
                        a.text().equals(b.text()) ? "the same text" : "another text");
    }

    private static String change(double before, double after) {
        if (!(before > 0) || Double.isNaN(after)) {
            return String.format(Locale.ROOT, "%.3f -> %.3f", before, after);
        }
        return String.format(
                Locale.ROOT, "%.3f -> %.3f (%+.1f %%)", before, after, 100 * (after / before - 1));
    }

    record Figures(
            String name,
            String experts,
            HeldOutText.PriorFigures prior,
            long resident_bytes,
            String text,
            String stopped_by,
            int prompt_tokens,
            double prompt_seconds,
            long prompt_loads,
            int tokens,
            double tokens_per_second,
            double ms_per_token,
            double loading_share,
            double reading_share,
            double loads_per_token,
            double hit_rate,
            long bytes_loaded,
            long prefetches,
            long prefetch_hits) {

        static Figures of(
                String name,
                IncrementalDecoder decoder,
                ExpertPrior prior,
                Generator.Result result) {
            ExpertTraffic decode = result.decode();
            return new Figures(
                    name,
                    decoder.experts().describe(),
                    HeldOutText.PriorFigures.of(prior),
                    decoder.experts().residentBytes(),
                    result.text(),
                    result.reason().name().toLowerCase(Locale.ROOT).replace('_', ' '),
                    result.promptTokens(),
                    result.promptSeconds(),
                    result.prompt().loads(),
                    result.tokens().size(),
                    1e3 / result.millisPerToken(),
                    result.millisPerToken(),
                    result.loadingShare(),
                    decode.loadNanos() / 1e9 / result.decodeSeconds(),
                    decode.loadsPerToken(),
                    decode.hitRate(),
                    decode.bytes(),
                    decode.prefetches(),
                    decode.prefetchHits());
        }
    }

    record Drawing(
            int max_tokens,
            double temperature,
            int top_k,
            double top_p,
            double repetition_penalty,
            List<String> stop) {

        static Drawing of(GenerationSettings s) {
            return new Drawing(
                    s.maxTokens(),
                    s.temperature(),
                    s.topK(),
                    s.topP(),
                    s.repetitionPenalty(),
                    s.stopStrings());
        }
    }

    record Report(String prompt, long seed, Drawing drawing, List<Figures> runs) {}
}
