package org.djlmoe.examples.cli;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.SelectionPrior;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class EvaluateAndReplayTest {

    /** Every evaluation here is on this much text. */
    private static final String[] TEXT = {
        "--language", "lv", "--rows", "4", "--batch", "3", "--sequence", "32", "--quiet"
    };

    @TempDir private static Path shared;
    private static Path model;

    /** The model again, with experts 0 and 3 of both layers preferred. */
    private static Path preferring;

    @TempDir private Path directory;

    private final StringWriter out = new StringWriter();
    private final StringWriter err = new StringWriter();

    @BeforeAll
    static void train() throws IOException {
        model = shared.resolve("model");
        StringWriter said = new StringWriter();
        int code =
                Moe.run(
                        new PrintWriter(said),
                        new PrintWriter(said),
                        "train --preset tiny --steps 2 --batch 2 --language lv --quiet --out"
                                .concat(" " + model)
                                .split(" "));
        assertEquals(ExitCodes.OK, code, said::toString);

        preferring = Files.createDirectory(shared.resolve("preferring"));
        try (Stream<Path> files = Files.list(model)) {
            for (Path file : files.toList()) {
                Files.copy(file, preferring.resolve(file.getFileName()));
            }
        }
        boolean[] kept = {true, false, false, true};
        new ExpertPrior(
                        ExpertMask.of(new boolean[][] {kept, kept}),
                        SelectionPrior.additive(0.001).withProtectedTop(1))
                .save(preferring);
    }

    private int run(String command, Object... args) {
        List<String> line = new ArrayList<>();
        line.addAll(List.of(command.split(" ")));
        Stream.of(args).map(Object::toString).forEach(line::add);
        out.getBuffer().setLength(0);
        err.getBuffer().setLength(0);
        return Moe.run(new PrintWriter(out), new PrintWriter(err), line.toArray(String[]::new));
    }

    /** Runs on {@link #TEXT} with the JSON on standard output. */
    private JsonObject figures(String command, Object... args) {
        Object[] all = Stream.of(new Object[] {"--json", "-"}, args).flatMap(Stream::of).toArray();
        assertEquals(ExitCodes.OK, run(command, all), err::toString);
        return JsonParser.parseString(out.toString()).getAsJsonObject();
    }

    private static Object[] onText(Object... args) {
        return Stream.of(TEXT, args).flatMap(Stream::of).toArray();
    }

    private void assertMistake(String message, String command, Object... args) {
        assertEquals(ExitCodes.USAGE, run(command, args), out::toString);
        assertEquals("moe " + command + ": " + message + "\n", err.toString());
        assertEquals("", out.toString());
    }

    @Test
    void evaluate_model_reportsFiguresThatFitTogether() throws IOException {
        Path file = directory.resolve("trace.json.gz");
        JsonObject report = figures("evaluate", onText("--model", model, "--trace", file));

        assertEquals(
                Set.of(
                        "model",
                        "language",
                        "split",
                        "rows",
                        "sequence",
                        "prior",
                        "loss",
                        "perplexity",
                        "tokens",
                        "seconds",
                        "tokens_per_second",
                        "expert_usage",
                        "routing_entropy_bits",
                        "cache",
                        "started_cold",
                        "loads_per_token",
                        "trace",
                        "tasks"),
                report.keySet());
        assertEquals("lv", report.get("language").getAsString());
        assertEquals("validation", report.get("split").getAsString());
        assertTrue(report.get("prior").isJsonNull());
        assertEquals(4 * 32, report.get("tokens").getAsInt());
        double loss = report.get("loss").getAsDouble();
        // Two steps of training: near, but not at, the uniform guess among 258 tokens.
        assertTrue(loss > 3 && loss < Math.log(258) + 0.5, () -> "loss " + loss);
        assertEquals(Math.exp(loss), report.get("perplexity").getAsDouble(), 1e-9);
        assertTrue(report.get("started_cold").getAsBoolean());
        assertEquals(2, report.get("cache").getAsInt());
        JsonObject loads = report.getAsJsonObject("loads_per_token");
        assertEquals(Set.of("lru", "lfu", "lfu_lifetime", "belady"), loads.keySet());
        for (String policy : loads.keySet()) {
            assertTrue(loads.get("belady").getAsDouble() <= loads.get(policy).getAsDouble());
        }

        ExpertTrace trace = ExpertTrace.read(file);
        assertEquals(
                "ExpertTrace 4 requests, 128 tokens, 2 layers, top-2 of 4 experts",
                trace.toString());
        for (int l = 0; l < 2; l++) {
            JsonArray shares = report.getAsJsonArray("expert_usage").get(l).getAsJsonArray();
            double sum = 0;
            for (int e = 0; e < 4; e++) {
                assertEquals(trace.usage()[l][e] / 256.0, shares.get(e).getAsDouble(), 1e-12);
                sum += shares.get(e).getAsDouble();
            }
            assertEquals(1, sum, 1e-12);
            assertEquals(
                    trace.entropy()[l],
                    report.getAsJsonArray("routing_entropy_bits").get(l).getAsDouble(),
                    1e-12);
        }
        assertTrue(err.toString().contains("loads per token with 2 of 4 experts"), err::toString);
    }

    @Test
    void evaluate_samePlaceTwice_isTheSameAndTestTextIsOther() {
        JsonObject one = figures("evaluate", onText("--model", model));
        JsonObject two = figures("evaluate", onText("--model", model));
        JsonObject test = figures("evaluate", onText("--model", model, "--split", "test"));
        assertEquals(one.get("loss"), two.get("loss"));
        assertEquals("test", test.get("split").getAsString());
        assertNotEquals(one.get("loss"), test.get("loss"));
    }

    /** The batch is how the work is cut, not what is measured. */
    @Test
    void evaluate_batch_doesNotChangeTheLoss() {
        JsonObject three = figures("evaluate", onText("--model", model));
        String[] cut = TEXT.clone();
        cut[5] = "1";
        JsonObject one =
                figures(
                        "evaluate",
                        Stream.concat(Stream.of(cut), Stream.of("--model", model)).toArray());
        assertEquals(three.get("loss").getAsDouble(), one.get("loss").getAsDouble(), 1e-5);
        assertEquals(three.get("tokens"), one.get("tokens"));
    }

    @Test
    void evaluate_prior_isTheFilesUnlessOverridden() {
        JsonObject own = figures("evaluate", onText("--model", preferring));
        assertEquals(0.001, own.getAsJsonObject("prior").get("beta").getAsDouble());
        assertEquals(1, own.getAsJsonObject("prior").get("protected_top").getAsInt());

        JsonObject none = figures("evaluate", onText("--model", preferring, "--prior", "none"));
        JsonObject plain = figures("evaluate", onText("--model", model));
        assertTrue(none.get("prior").isJsonNull());
        assertEquals(plain.get("loss"), none.get("loss"));
        assertEquals(plain.get("expert_usage"), none.get("expert_usage"));

        JsonObject zero = figures("evaluate", onText("--model", preferring, "--prior", "0"));
        assertEquals(plain.get("expert_usage"), zero.get("expert_usage"));

        JsonObject strong = figures("evaluate", onText("--model", preferring, "--prior", "50"));
        assertEquals(50, strong.getAsJsonObject("prior").get("beta").getAsDouble());
        assertEquals("additive", strong.getAsJsonObject("prior").get("form").getAsString());

        JsonObject hard = figures("evaluate", onText("--model", preferring, "--prior", "hard"));
        assertEquals("infinity", hard.getAsJsonObject("prior").get("beta").getAsString());
        for (JsonElement layer : hard.getAsJsonArray("expert_usage")) {
            assertEquals("[0.5,0.0,0.0,0.5]", layer.toString());
        }
        // Both preferred experts are loaded once in each of two layers, and never again.
        assertEquals(
                4.0 / 128, hard.getAsJsonObject("loads_per_token").get("lru").getAsDouble(), 1e-12);
        double strongLru = strong.getAsJsonObject("loads_per_token").get("lru").getAsDouble();
        assertTrue(
                strongLru < plain.getAsJsonObject("loads_per_token").get("lru").getAsDouble(),
                () -> "lru " + strongLru);
    }

    @Test
    void replay_writtenTrace_equalsReplayOfTheModel() {
        for (String name : List.of("trace.json", "trace.json.gz")) {
            Path file = directory.resolve(name);
            figures("evaluate", onText("--model", model, "--trace", file));
            Object[] settings = {"--cache", "2,3,4", "--seed", "5", "--cold-per-request"};
            JsonObject ofFile =
                    figures(
                            "replay",
                            Stream.of(new Object[] {"--trace", file}, settings)
                                    .flatMap(Stream::of)
                                    .toArray());
            JsonObject ofModel =
                    figures(
                            "replay",
                            Stream.of(onText("--model", model), settings)
                                    .flatMap(Stream::of)
                                    .toArray());
            ofFile.remove("source");
            ofModel.remove("source");
            assertEquals(ofModel, ofFile);
            assertEquals(3 * 8, ofFile.getAsJsonArray("results").size());
        }
    }

    /** Worked by hand: one layer, top-1, experts 0 1 0 2 0 1, cache of 2. */
    @Test
    void replay_smallTrace_countsWhatAPersonCounts() throws IOException {
        Path file = directory.resolve("t.json");
        Files.writeString(
                file,
                "{\"experts\":3,\"top_k\":1,\"requests\":[{\"layers\":[[0,1,0]]},"
                        + "{\"layers\":[[2,0,1]]}]}");
        JsonObject report =
                figures("replay", "--trace", file, "--cache", "2,3", "--policies", "lru,fifo,lru");
        assertEquals(
                Set.of(
                        "source",
                        "requests",
                        "tokens",
                        "layers",
                        "experts",
                        "top_k",
                        "admission",
                        "started_cold",
                        "cold_per_request",
                        "warm_up_tokens",
                        "counted_tokens",
                        "seed",
                        "results"),
                report.keySet());
        // 0, 1, 2 loaded; lru drops 1 for 2 and 2 for 1; fifo drops 0 for 2, then needs it back.
        assertEquals(
                List.of("lru 2 4", "fifo 2 5", "belady 2 4", "lru 3 3", "fifo 3 3", "belady 3 3"),
                loads(report, 6));
        assertTrue(report.get("started_cold").getAsBoolean());
        assertTrue(
                err.toString().contains("\ncold start: one cache for all requests; "),
                err::toString);

        JsonObject warm =
                figures(
                        "replay",
                        "--trace",
                        file,
                        "--cache",
                        "2",
                        "--policies",
                        "lru",
                        "--warm-up",
                        2);
        assertEquals(List.of("lru 2 2", "belady 2 2"), loads(warm, 4));
        assertFalse(warm.get("started_cold").getAsBoolean());
        assertTrue(err.toString().contains("\nwarm start: "), err::toString);

        JsonObject each =
                figures(
                        "replay",
                        "--trace",
                        file,
                        "--cache",
                        "2",
                        "--policies",
                        "lru",
                        "--cold-per-request");
        assertEquals(List.of("lru 2 5", "belady 2 5"), loads(each, 6));
        assertTrue(err.toString().contains("a new cache for each request"), err::toString);
    }

    private static List<String> loads(JsonObject report, int tokens) {
        assertEquals(tokens, report.get("counted_tokens").getAsInt());
        List<String> rows = new ArrayList<>();
        for (JsonElement element : report.getAsJsonArray("results")) {
            JsonObject row = element.getAsJsonObject();
            double loads = row.get("loads_per_token").getAsDouble();
            assertEquals(1 - loads, row.get("hit_rate").getAsDouble(), 1e-12);
            assertEquals(
                    loads, row.getAsJsonArray("loads_per_token_by_layer").get(0).getAsDouble());
            rows.add(
                    row.get("policy").getAsString()
                            + " "
                            + row.get("cache").getAsInt()
                            + " "
                            + Math.round(loads * tokens));
        }
        return rows;
    }

    /** With a staging buffer the bound may leave what will be asked for where it is. */
    @Test
    void replay_optionalAdmission_lowersTheBound() throws IOException {
        Path file = directory.resolve("t.json");
        Files.writeString(
                file, "{\"experts\":3,\"top_k\":1,\"requests\":[{\"layers\":[[0,1,0,2,0,1]]}]}");
        JsonObject optional =
                figures("replay", "--trace", file, "--cache", "1", "--admission", "optional");
        JsonObject always = figures("replay", "--trace", file, "--cache", "1");
        assertEquals("optional", optional.get("admission").getAsString());
        assertTrue(loads(optional, 6).contains("belady 1 4"), loads(optional, 6)::toString);
        assertEquals(
                Set.of("6"),
                loads(always, 6).stream().map(r -> r.split(" ")[2]).collect(Collectors.toSet()));
        assertTrue(err.toString().contains("the experts of the last token and no others"));
    }

    @Test
    void evaluate_mistakes_areOneLineAndTwo() throws IOException {
        Path none = directory.resolve("none");
        assertMistake("--model: there is no folder " + none, "evaluate", "--model", none);
        assertMistake(
                "--model: " + directory + " is not a checkpoint folder: it has no config.json",
                "evaluate",
                "--model",
                directory);
        assertMistake(
                "--cache 1 is too small: a token uses 2 experts of a layer at once; take 2 or more",
                "evaluate",
                "--model",
                model,
                "--cache",
                1);
        assertMistake(
                "--cache 5 is too large: a layer has 4 experts; take 4 or fewer",
                "evaluate",
                "--model",
                model,
                "--cache",
                5);
        assertMistake(
                "--prior must be none, hard or a strength of 0 or more, not 'soft'",
                "evaluate",
                "--model",
                model,
                "--prior",
                "soft");
        assertMistake(
                "--prior hard needs the preferred experts, but " + model + " has no maskcoft.json",
                "evaluate",
                "--model",
                model,
                "--prior",
                "hard");
        assertMistake(
                "--rows must be at least 1, not 0", "evaluate", "--model", model, "--rows", 0);
        assertMistake(
                "--sequence 513 exceeds the model's 512 positions",
                "evaluate",
                "--model",
                model,
                "--sequence",
                513);
        assertMistake(
                "--trace: " + directory + " is a directory; name a file in it",
                "evaluate",
                "--model",
                model,
                "--trace",
                directory);
        assertMistake(
                "Missing required option: '--model=DIR' (see moe evaluate --help)", "evaluate");

        Files.copy(model.resolve("config.json"), directory.resolve("config.json"));
        assertEquals(ExitCodes.USAGE, run("evaluate", onText("--model", directory)));
        assertTrue(err.toString().contains("holds neither model.safetensors nor"), err::toString);
        assertEquals(1, err.toString().lines().count());
        Path config = directory.resolve("config.json");
        Files.writeString(config, Files.readString(config).replace("258", "32000"));
        assertMistake(
                "--model: "
                        + directory
                        + " has a vocabulary of 32000 tokens, but the text here is cut into the 258"
                        + " of the byte-level tokenizer",
                "evaluate",
                "--model",
                directory);
    }

    @Test
    void evaluate_outputsThatWouldReplaceEachOtherOrTheModel_areRefusedBeforeAnyWork()
            throws IOException {
        Path file = directory.resolve("figures.json");
        assertMistake(
                "--json and --trace are the same file, " + file + ": name two",
                "evaluate",
                onText("--model", model, "--json", file, "--trace", file));
        Path link = Files.createSymbolicLink(directory.resolve("link"), model);
        Path weights = link.resolve("model.safetensors");
        byte[] before = Files.readAllBytes(weights);
        for (String option : List.of("--json", "--trace")) {
            assertMistake(
                    option
                            + ": "
                            + weights
                            + " is a file of the model in "
                            + model
                            + ", which it would replace; name another file",
                    "evaluate",
                    onText("--model", model, option, weights));
        }
        assertMistake(
                "--json: "
                        + model.resolve("config.json")
                        + " is a file of the model in "
                        + model
                        + ", which it would replace; name another file",
                "replay",
                onText("--model", model, "--json", model.resolve("config.json")));
        assertArrayEquals(before, Files.readAllBytes(weights));

        Path missing = directory.resolve("new").resolve("trace.json");
        assertMistake(
                "--trace: there is no directory "
                        + missing.getParent()
                        + "; make it or name a file elsewhere",
                "evaluate",
                onText("--model", model, "--trace", missing));
        assertFalse(Files.exists(missing.getParent()));

        Path trace = directory.resolve("t.json");
        Files.writeString(trace, "{\"experts\":2,\"top_k\":1,\"requests\":[{\"layers\":[[0]]}]}");
        assertMistake(
                "--json and --trace are the same file, " + trace + ": name two",
                "replay",
                "--trace",
                trace,
                "--json",
                trace);
    }

    /** Without a look at the weights such a model fills memory before anything is compared. */
    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            value = {
                "hidden_size | 1000000000 | hidden_size is 1000000000, but tensor",
                "hidden_size | -64 | hidden_size is -64, but must be at least 1",
                "hidden_size | 3e9 | hidden_size is 3E+9, not a whole number below 2^31",
                "num_hidden_layers | 1000000000 | num_hidden_layers is 1000000000, but the weights"
                        + " have 2: set it to 2",
                "num_hidden_layers | 1 | num_hidden_layers is 1, but the weights have 2",
                "num_attention_heads | 0 | num_attention_heads is 0, but must be at least 1",
                "head_dim | 500000000 | num_attention_heads x head_dim is",
                "head_dim | 7 | head_dim is 7, but rotary pairs need an even width",
                "head_dim | null | no multiple of num_attention_heads",
                "num_key_value_heads | 1000000 | no multiple of num_key_value_heads, 1000000",
                "num_local_experts | 1000000000 | num_local_experts is 1000000000, but tensor",
                "num_experts_per_tok | 5 | num_experts_per_tok is 5, more than the 4",
                "intermediate_size | 1000000000 | intermediate_size is 1000000000, but tensor"
            })
    void evaluate_sizeInConfigThatCannotBe_namesTheKeyBeforeAnyWork(
            String key, String value, String message) throws IOException {
        try (Stream<Path> files = Files.list(model)) {
            for (Path file : files.toList()) {
                Files.copy(file, directory.resolve(file.getFileName()));
            }
        }
        Path config = directory.resolve("config.json");
        JsonObject json = JsonParser.parseString(Files.readString(config)).getAsJsonObject();
        json.add(key, JsonParser.parseString(value));
        if (value.equals("null")) {
            json.addProperty("num_attention_heads", 3);
        }
        Files.writeString(config, json.toString());
        assertEquals(ExitCodes.USAGE, run("evaluate", onText("--model", directory)));
        assertTrue(err.toString().contains(config + ": "), err::toString);
        assertTrue(err.toString().contains(message), err::toString);
        assertEquals(1, err.toString().lines().count());
    }

    @Test
    void replay_mistakes_areOneLineAndTwo() throws IOException {
        Path file = directory.resolve("t.json");
        Files.writeString(file, "{\"experts\":4,\"top_k\":2,\"requests\":[{\"layers\":[[0,4]]}]}");
        Path none = directory.resolve("none.json");

        String either = "name either a trace, --trace FILE, or a model, --model DIR";
        assertMistake(either, "replay");
        assertMistake(either, "replay", "--trace", file, "--model", model);
        assertMistake("--trace: there is no file " + none, "replay", "--trace", none);
        assertMistake(
                "--trace: " + directory + " is a directory; name a file",
                "replay",
                "--trace",
                directory);
        assertMistake(
                file + ": request 0, layer 0: expert 4 does not exist, ids are 0..3",
                "replay",
                "--trace",
                file);
        assertMistake(
                "--policies: No eviction policy 'mru': choose one of lru, lfu, lfu_lifetime, fifo,"
                        + " random, discounted, static, belady",
                "replay",
                "--trace",
                file,
                "--policies",
                "lru,mru");
        assertMistake(
                "--rows has no effect without --model", "replay", "--trace", file, "--rows", 3);
        assertMistake(
                "--warm-up must be 0 or more, not -1", "replay", "--trace", file, "--warm-up", -1);
        Files.writeString(file, "{\"experts\":4,\"top_k\":2,\"requests\":[{\"layers\":[[0,3]]}]}");
        assertMistake(
                "--cache 1 is too small: a token uses 2 experts of a layer at once; take 2 or more",
                "replay",
                "--trace",
                file,
                "--cache",
                "4,1");
        assertMistake(
                "--cache 5 is too large: a layer has 4 experts; take 4 or fewer",
                "replay",
                "--trace",
                file,
                "--cache",
                "4,5");
        assertMistake(
                "--cache 1 is too small: a token uses 2 experts of a layer at once; take 2 or more",
                "replay",
                "--model",
                model,
                "--cache",
                1);
        assertMistake(
                "1 warm-up tokens leave none of ExpertTrace 1 requests, 1 tokens, 1 layers, top-2"
                        + " of 4 experts to count",
                "replay",
                "--trace",
                file,
                "--warm-up",
                1);
        assertMistake(
                "Invalid value for option '--admission': expected one of [ALWAYS, OPTIONAL]"
                        + " (case-insensitive) but was 'never' (see moe replay --help)",
                "replay",
                "--trace",
                file,
                "--admission",
                "never");
    }

    @Test
    void evaluate_tasks_accuracyByTaskAndMean() {
        Path file = directory.resolve("tasks.jsonl");
        int code = run("corpus", "tasks", "--out", file, "--language", "lv", "--items", "3");
        assertEquals(ExitCodes.OK, code, err::toString);
        assertTrue(out.toString().contains("questions written to " + file), out::toString);

        JsonObject tasks =
                figures("evaluate", onText("--model", model, "--tasks", file))
                        .getAsJsonObject("tasks");
        assertEquals(9, tasks.getAsJsonArray("tasks").size());
        double sum = 0;
        for (JsonElement task : tasks.getAsJsonArray("tasks")) {
            sum += task.getAsJsonObject().get("accuracy").getAsDouble();
        }
        assertEquals(sum / 9, tasks.get("mean").getAsDouble(), 1e-9);
    }

    @Test
    void evaluate_brokenTasks_namesLineAndField() throws IOException {
        Path file = Files.writeString(directory.resolve("tasks.jsonl"), "{\"choices\": 3}\n");
        assertMistake(
                file + ", line 1: \"choices\" must be a list of texts",
                "evaluate",
                onText("--model", model, "--tasks", file));
        assertMistake(
                "--tasks: there is no file " + directory.resolve("none"),
                "evaluate",
                onText("--model", model, "--tasks", directory.resolve("none")));
    }

    @Test
    void tasks_outputsThatWouldReplaceEachOtherOrTheQuestions_refusedBeforeAnyWork()
            throws IOException {
        Path file = directory.resolve("tasks.jsonl");
        assertMistake(
                "--json and --out are the same file, " + file + ": name two",
                "corpus tasks",
                "--out",
                file,
                "--json",
                file);
        assertFalse(Files.exists(file));
        String questions =
                "{\"task\": \"t\", \"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 1}\n";
        Files.writeString(file, questions);
        for (String option : List.of("--json", "--trace")) {
            assertMistake(
                    option + " and --tasks are the same file, " + file + ": name two",
                    "evaluate",
                    onText("--model", model, "--tasks", file, option, file));
        }
        assertEquals(questions, Files.readString(file));
    }

    @Test
    void study_jsonThatWouldReplaceTheReport_refusedBeforeAnyWork() {
        Path page = directory.resolve("report.html");
        assertMistake(
                "--json and the report's page are the same file, " + page + ": name two",
                "study",
                "--out",
                directory,
                "--json",
                page);
    }

    @Test
    void study_numbersThatMakeNone_refused() {
        assertMistake("--seeds must be at least 1, not 0", "study", "--seeds", "0");
        assertMistake("--steps must be at least 1, not 0", "study", "--steps", "0");
    }
}
