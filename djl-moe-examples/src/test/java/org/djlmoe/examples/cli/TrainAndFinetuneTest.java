package org.djlmoe.examples.cli;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

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
import java.util.stream.Stream;
import org.djlmoe.examples.demo.Demo;
import org.djlmoe.examples.demo.DemoReport;
import org.djlmoe.examples.demo.DemoSettings;
import org.djlmoe.examples.text.Language;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PeakMeter;
import org.djlmoe.plan.PlanSettings;
import org.djlmoe.training.LanguageModel;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class TrainAndFinetuneTest {

    @TempDir private static Path shared;
    private static Path model;

    @TempDir private Path directory;

    private final StringWriter out = new StringWriter();
    private final StringWriter err = new StringWriter();

    @BeforeAll
    static void train() {
        model = shared.resolve("model");
        StringWriter said = new StringWriter();
        PrintWriter writer = new PrintWriter(said);
        String line =
                "train --preset tiny --steps 3 --batch 2 --language lv --quiet --out " + model;
        assertEquals(ExitCodes.OK, Moe.run(writer, writer, line.split(" ")), said::toString);
    }

    private int run(String line, Object... more) {
        List<String> arguments = new ArrayList<>(List.of(line.split(" ")));
        Stream.of(more).map(Object::toString).forEach(arguments::add);
        return Moe.run(
                new PrintWriter(out), new PrintWriter(err), arguments.toArray(String[]::new));
    }

    private JsonObject figures(String line, Object... more) {
        assertEquals(ExitCodes.OK, run(line + " --quiet --json -", more), err::toString);
        JsonObject json = JsonParser.parseString(out.toString()).getAsJsonObject();
        out.getBuffer().setLength(0);
        return json;
    }

    private static String method(String name) {
        return " --method " + name + (name.equals("maskcoft") ? " --mask-steps 1" : "");
    }

    private static List<Float> losses(JsonObject json) {
        List<Float> losses = new ArrayList<>();
        for (JsonElement loss : json.getAsJsonArray("losses")) {
            losses.add(loss.getAsFloat());
        }
        return losses;
    }

    @Test
    void train_sameSeedTwice_sameLosses() {
        String line = "train --steps 3 --batch 2 --language lv";
        JsonObject one = figures(line, "--out", directory.resolve("a"));
        JsonObject two = figures(line, "--out", directory.resolve("b"));
        JsonObject other = figures(line, "--out", directory.resolve("c"), "--seed", 7);

        assertEquals(3, losses(one).size());
        assertEquals(losses(one), losses(two));
        assertFalse(losses(one).equals(losses(other)));
        assertEquals(42, one.get("seed").getAsLong());
        assertTrue(one.get("tokens_per_second").getAsDouble() > 0);
        assertTrue(Files.exists(directory.resolve("a").resolve("tokenizer.json")));
    }

    @Test
    void train_stoppedAndResumed_isTheUninterruptedRunToTheBit() throws IOException {
        String line = "train --steps 5 --batch 2 --language lv --save-every 2";
        Path whole = directory.resolve("whole");
        Path resumed = directory.resolve("resumed");
        JsonObject one = figures(line, "--out", whole);
        // What a kill after step 5's loss would have left: the state after step 2.
        Path states = Files.createDirectories(resumed.resolve("checkpoints"));
        String first = "checkpoint-000001-step-2";
        copy(whole.resolve("checkpoints").resolve(first), states.resolve(first));
        JsonObject two = figures(line + " --resume", "--out", resumed);

        assertEquals(0, one.get("resumed_from").getAsInt());
        assertEquals(2, two.get("resumed_from").getAsInt());
        assertEquals(losses(one), losses(two));
        assertEquals(one.get("validation_loss"), two.get("validation_loss"));
        assertEquals(
                -1,
                Files.mismatch(
                        whole.resolve("model.safetensors"), resumed.resolve("model.safetensors")));
        try (Stream<Path> kept = Files.list(states)) {
            assertEquals(2, kept.count());
        }

        // All is done already: the same model once more.
        JsonObject three = figures(line + " --resume", "--out", resumed);
        assertEquals(4, three.get("resumed_from").getAsInt());
        assertEquals(losses(one), losses(three));
    }

    private static void copy(Path from, Path to) throws IOException {
        Files.createDirectory(to);
        try (Stream<Path> files = Files.list(from)) {
            for (Path file : files.toList()) {
                Files.copy(file, to.resolve(file.getFileName()));
            }
        }
    }

    @Test
    void train_savedStateThatDoesNotFit_oneLineThatSaysWhatToDo() throws IOException {
        String line = "train --quiet --steps 2 --batch 2 --language lv --save-every 1 --out ";
        assertEquals(ExitCodes.OK, run(line + directory + " --resume"), err::toString);

        assertUserError(line + directory, "--resume");
        assertUserError(
                line.replace("--steps 2", "--steps 3") + directory + " --seed 7 --resume",
                "--seed 42 -> 7, --steps 2 -> 3");
        Path latest = directory.resolve("checkpoints").resolve("checkpoint-000002-step-2");
        Files.delete(latest.resolve("optimizer.safetensors"));
        assertUserError(line + directory + " --resume", "optimizer.safetensors");
        Files.writeString(latest.resolve("training_state.json"), "{}");
        assertUserError(line + directory + " --resume", "training_state.json");
        assertUserError(
                line.replace("--save-every 1", "--save-every 0") + directory.resolve("x"),
                "--save-every");
    }

    /** Of every method, from a state in each stage or at its end, as a kill would have left it. */
    @ParameterizedTest
    @CsvSource({
        "maskcoft --mask-steps 3 --half-experts, 2, mask, 3, 000002-mask-step-3",
        "maskcoft --mask-steps 3 --estimator gumbel, 5, adapt, 4, 000004-adapt-step-4",
        "maskcoft --mask-steps 3 --kept-total 5, 3, adapt, 3, 000004-adapt-step-3",
        "ce, 5, training, 4, 000002-adapt-step-4",
        "lora --half-experts, 3, training, 2, 000001-adapt-step-2"
    })
    void finetune_killedAndResumed_isTheUninterruptedRunToTheBit(
            String method, int steps, String stage, int step, String state) throws IOException {
        Path whole = directory.resolve("whole");
        Path resumed = directory.resolve("resumed");
        String line =
                "finetune --batch 2 --sequence 32 --rank 2 --language lv --method "
                        + method
                        + " --steps "
                        + steps
                        + " --save-every 2 --model "
                        + model;
        JsonObject one = figures(line, "--out", whole, "--adapter-out", whole.resolve("adapter"));
        String from = "checkpoint-" + state;
        Path states = Files.createDirectories(resumed.resolve("checkpoints"));
        copy(whole.resolve("checkpoints").resolve(from), states.resolve(from));
        // Another budget would choose other chunks.
        JsonObject two =
                figures(
                        line + " --resume --budget 1g",
                        "--out",
                        resumed,
                        "--adapter-out",
                        resumed.resolve("adapter"));

        assertEquals(0, one.get("resumed_from").getAsInt());
        assertEquals(step, two.get("resumed_from").getAsInt());
        assertEquals(stage, two.get("resumed_stage").getAsString());
        assertEquals(losses(one), losses(two));
        for (String figure : List.of("perplexity_before", "perplexity_after", "beta", "moved")) {
            assertEquals(one.get(figure), two.get(figure), figure);
        }
        for (String file :
                List.of(
                        "model.safetensors",
                        "maskcoft.safetensors",
                        "adapter/adapter_model.safetensors")) {
            if (method.startsWith("maskcoft") || !file.startsWith("maskcoft")) {
                assertEquals(-1, Files.mismatch(whole.resolve(file), resumed.resolve(file)), file);
            }
        }
    }

    @Test
    void finetune_savedStateThatDoesNotFit_oneLineThatSaysWhatToDo() throws IOException {
        String line =
                "finetune --quiet --batch 2 --sequence 32 --mask-steps 2 --steps 2 --rank 2"
                        + " --language lv --save-every 1 --out "
                        + directory
                        + " --model ";
        // There is none yet: from the start.
        assertEquals(ExitCodes.OK, run(line + model + " --resume"), err::toString);

        assertUserError(line + model, "--resume");
        assertUserError(
                line.replace("--steps 2", "--steps 3") + model + " --kept 3 --resume",
                "--kept default -> 3, --steps 2 -> 3");
        assertUserError(
                line.replace("--mask-steps 2 ", "") + model + " --method ce --resume",
                "--method maskcoft -> ce");
        Path other = directory.resolve("other");
        String train = "train --quiet --steps 1 --batch 2 --language lv --seed 7 --out " + other;
        assertEquals(ExitCodes.OK, run(train), err::toString);
        assertUserError(line + other + " --resume", "another model");
        Path latest = directory.resolve("checkpoints").resolve("checkpoint-000004-adapt-step-2");
        Files.delete(latest.resolve("mask_learning.safetensors"));
        assertUserError(line + model + " --resume", "mask_learning.safetensors");
        // A state of `train`.
        assertEquals(ExitCodes.OK, run(train + " --save-every 1"), err::toString);
        assertUserError(
                line.replace(directory.toString(), other.toString()) + model + " --resume",
                "another command");
        assertUserError(line.replace("every 1", "every 0") + model, "--save-every");
    }

    private void assertUserError(String line, String part) {
        err.getBuffer().setLength(0);
        assertEquals(ExitCodes.USAGE, run(line), err::toString);
        assertEquals(1, err.toString().lines().count(), err::toString);
        assertTrue(err.toString().contains(part), err::toString);
    }

    @Test
    void train_budgetTooSmall_oneLineWithNumbersAndExitCode2() {
        int code = run("train --quiet --budget 100m --out", directory);

        assertEquals(ExitCodes.USAGE, code);
        assertEquals(1, err.toString().lines().count(), err::toString);
        assertTrue(err.toString().contains("100"), err::toString);
        assertTrue(err.toString().contains("MB"), err::toString);
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "--steps 0",
                "--batch -1",
                "--language klingon",
                "--budget lots",
                "--learning-rate -1"
            })
    void train_badArgument_oneLineAndExitCode2(String bad) {
        int code = run("train --quiet --out " + directory + " " + bad);

        assertEquals(ExitCodes.USAGE, code);
        assertEquals(1, err.toString().lines().count(), err::toString);
    }

    @ParameterizedTest
    @CsvSource({"maskcoft, true", "ce, false", "lora, true"})
    void finetune_adapterOut_modelWithItIsTheTunedModel(String method, boolean half) {
        Path tuned = directory.resolve("tuned");
        Path adapter = directory.resolve("adapter");
        JsonObject report =
                figures(
                        "finetune --steps 4 --batch 2 --sequence 32 --rank 2 --language lv"
                                + method(method)
                                + (half ? " --half-experts" : ""),
                        "--model",
                        model,
                        "--out",
                        tuned,
                        "--adapter-out",
                        adapter);
        JsonObject moved = report.getAsJsonObject("moved");
        assertTrue(moved.get("adapters").getAsLong() > 0, moved::toString);
        assertTrue(moved.get("expert_weights").getAsLong() > 0, moved::toString);
        assertEquals(
                !method.equals("lora"),
                moved.get("router_weights").getAsLong() > 0,
                moved::toString);
        assertEquals(method.equals("maskcoft"), Files.exists(adapter.resolve(ExpertPrior.FILE)));

        String line = "evaluate --language lv --sequence 32 --rows 16";
        double merged =
                figures(line, "--model", model, "--adapter", adapter)
                        .get("perplexity")
                        .getAsDouble();
        double expected = figures(line, "--model", tuned).get("perplexity").getAsDouble();
        double base = figures(line, "--model", model).get("perplexity").getAsDouble();
        // Half experts were rounded before they were tuned.
        assertEquals(expected, merged, (half ? 1e-3 : 1e-6) * expected);
        assertTrue(Math.abs(base - merged) > 1e-2 * Math.abs(expected - merged));

        String generate = "generate --max-tokens 8 --temperature 0 --quiet";
        assertEquals(ExitCodes.OK, run(generate, "--model", tuned), err::toString);
        String text = out.toString().lines().findFirst().orElseThrow();
        out.getBuffer().setLength(0);
        assertEquals(
                ExitCodes.OK, run(generate, "--model", model, "--adapter", adapter), err::toString);
        assertEquals(text, out.toString().lines().findFirst().orElseThrow());
    }

    @Test
    void adapter_folderThatIsNone_oneLineAndExitCode2() {
        assertEquals(
                ExitCodes.USAGE, run("evaluate --quiet --model", model, "--adapter", directory));
        assertEquals(1, err.toString().lines().count(), err::toString);
        assertTrue(err.toString().contains("adapter_config.json"), err::toString);
        assertEquals(
                ExitCodes.USAGE,
                run("finetune --quiet --steps 1 --out", directory, "--adapter-out", directory));
        assertTrue(err.toString().contains("--adapter-out"), err::toString);
    }

    @ParameterizedTest
    @ValueSource(strings = {"maskcoft", "ce", "lora"})
    void finetune_everyMethod_savesAModelThatEvaluates(String method) throws IOException {
        Path tuned = directory.resolve(method);
        String line =
                "finetune --steps 2 --batch 2 --sequence 32 --rank 2 --language lv"
                        + method(method);
        JsonObject report = figures(line, "--model", model, "--out", tuned);

        assertEquals(method, report.get("method").getAsString());
        assertEquals(2, losses(report).size());
        ExpertPrior prior = ExpertPrior.load(tuned);
        assertEquals(method.equals("maskcoft"), prior != null);
        assertEquals(prior != null, report.has("beta") && !report.get("beta").isJsonNull());

        JsonObject evaluation =
                figures(
                        "evaluate --split validation --language lv --sequence 32 --rows 64",
                        "--model",
                        tuned);
        assertEquals(
                report.get("perplexity_after").getAsDouble(),
                evaluation.get("perplexity").getAsDouble(),
                1e-4 * report.get("perplexity_after").getAsDouble());
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "--estimator gumbel",
                "--estimator dense --excluded 2 --mask-weights kept",
                "--estimator plackett_luce --load-weight 0.2"
            })
    void finetune_estimatorAndKeptTotal_maskKeepsThatMany(String options) throws IOException {
        Path tuned = directory.resolve("tuned");
        String line =
                "finetune --steps 1 --batch 2 --sequence 32 --mask-steps 2 --rank 2 --language lv"
                        + " --kept-total 5 "
                        + options;
        figures(line, "--model", model, "--out", tuned);
        ExpertPrior prior = ExpertPrior.load(tuned);
        int total = 0;
        for (int l = 0; l < prior.mask().numLayers(); l++) {
            total += prior.mask().count(l);
        }
        assertEquals(5, total);
        assertEquals(prior.mask().numLayers(), ExpertPrior.loadTheta(tuned).length);
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void outputFolder_holdsAPriorOfAnEarlierRun_isNotApplied(boolean pretraining)
            throws IOException {
        Path tuned = directory.resolve("tuned");
        String finetune = "finetune --steps 1 --batch 2 --sequence 32 --rank 2 --language lv";
        figures(finetune + method("maskcoft"), "--model", model, "--out", tuned);
        assertTrue(Files.exists(tuned.resolve(ExpertPrior.FILE)));

        if (pretraining) {
            figures("train --steps 1 --batch 2 --language lv", "--out", tuned);
        } else {
            figures(finetune + method("ce"), "--model", model, "--out", tuned);
        }

        assertFalse(Files.exists(tuned.resolve(ExpertPrior.FILE)));
        JsonObject evaluation =
                figures("evaluate --language lv --sequence 32 --rows 2", "--model", tuned);
        assertTrue(
                !evaluation.has("prior") || evaluation.get("prior").isJsonNull(),
                evaluation::toString);
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "--learning-rate 0",
                "--learning-rate NaN",
                "--kept 0",
                "--kept 99",
                "--kept-total 3",
                "--kept-total 99",
                "--excluded 2",
                "--excluded 2 --estimator dense",
                "--excluded 3 --estimator dense --kept-total 5",
                "--estimator dense --kept 4",
                "--mask-steps 3 --kept-total 8",
                "--mask-steps 3 --method ce",
                "--estimator guess",
                "--load-weight -1",
                "--mask-weights some",
                "--language klingon"
            })
    void finetune_badArgument_oneLineBeforeAnyWork(String bad) {
        Path tuned = directory.resolve("tuned");
        int code = run("finetune --quiet " + bad, "--model", model, "--out", tuned);

        assertEquals(ExitCodes.USAGE, code);
        assertEquals(1, err.toString().lines().count(), err::toString);
        assertTrue(err.toString().contains(bad.split(" ")[0]), err::toString);
        assertFalse(Files.exists(tuned.resolve("model.safetensors")));
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "--method ce --kept 3",
                "--method lora --estimator gumbel",
                "--method ce --mask-weights kept",
                "--kept 3 --kept-total 6",
                "--estimator gumbel --load-weight 0.1",
                "--estimator gumbel --excluded 1",
                "--sequence 100000",
                "--learning-rate -1"
            })
    void finetune_badArgument_oneLineAndExitCode2(String bad) {
        assertEquals(
                ExitCodes.USAGE,
                run("finetune --quiet --language lv " + bad, "--model", model, "--out", directory));
        assertEquals(1, err.toString().lines().count(), err::toString);
    }

    @ParameterizedTest
    @CsvSource({
        "train, model.safetensors",
        "train, config.json",
        "finetune, maskcoft.json",
        "finetune, model-00001-of-00002.safetensors",
        "finetune, base/tokenizer.json",
        "demo --quick, maskcoft/model.safetensors",
        "demo --quick, report.html"
    })
    void json_isAFileThatTheCommandWrites_refusedBeforeAnyWork(String command, String name)
            throws IOException {
        Path json = directory.resolve(name);
        assertEquals(ExitCodes.USAGE, run(command + " --quiet --out", directory, "--json", json));
        assertEquals(1, err.toString().lines().count(), err::toString);
        assertTrue(err.toString().contains("--json"), err::toString);
        assertTrue(err.toString().contains(json.toString()), err::toString);
        assertFalse(Files.exists(json));
        assertFalse(Files.exists(directory.resolve("model.safetensors")));
        assertFalse(Files.exists(directory.resolve("base").resolve("model.safetensors")));
    }

    @Test
    void train_learningRateTooHigh_failsWithoutSavingAModel() {
        int code =
                run(
                        "train --quiet --language lv --steps 20 --batch 2 --learning-rate 1e9"
                                + " --out",
                        directory);

        assertEquals(ExitCodes.FAILURE, code);
        assertTrue(err.toString().contains("diverged"), err::toString);
        assertFalse(Files.exists(directory.resolve("model.safetensors")));
    }

    @Test
    void finetune_folderWithoutModel_oneLineAndExitCode2() {
        assertEquals(ExitCodes.USAGE, run("finetune --quiet --model", directory, "--out", shared));
        assertEquals(1, err.toString().lines().count(), err::toString);
    }

    @Test
    void demo_tinySettings_reportHasWhatIsPromised() throws IOException {
        DemoSettings settings =
                new DemoSettings(Language.of("lv"), 5, 2, 32, 2, 1, 2, 1e-3, 8, 8, 2);
        Demo demo = new Demo(settings, model, (label, step, steps, tokens, loss) -> {});
        Demo.Result result;
        PeakMeter.Reading peak;
        try (PeakMeter meter = PeakMeter.start()) {
            result = demo.run(LanguageModel.Chunks.DEFAULT, directory.resolve("tuned"));
            peak = meter.stop();
        }
        MemoryPlan plan =
                MemoryPlan.of(
                        result.config(),
                        PlanSettings.builder().setBatch(2).setSequence(32).build());
        DemoReport report = new DemoReport(settings, result, plan, peak, 1);
        Path json = directory.resolve("report.json");
        JsonOutput.write(report.json(), json.toString(), null);
        report.writeHtml(directory.resolve("report.html"));

        JsonObject read = JsonParser.parseString(Files.readString(json)).getAsJsonObject();
        for (String key : List.of("tokens_per_second", "peak_mb", "planned_peak_mb", "seed")) {
            assertTrue(read.get(key).getAsDouble() > 0, key);
        }
        for (String arm : List.of("base", "control", "maskcoft")) {
            JsonObject figures = read.getAsJsonObject(arm);
            assertTrue(figures.get("perplexity").getAsDouble() > 1, arm);
            JsonObject loads = figures.getAsJsonObject("loads_per_token");
            double belady = loads.get("belady").getAsDouble();
            for (String policy : List.of("lru", "lfu", "lfu_lifetime", "fifo")) {
                assertTrue(loads.get(policy).getAsDouble() >= belady, arm + " " + policy);
            }
        }
        assertTrue(Files.readString(directory.resolve("report.html")).contains("Memory peak"));
        assertTrue(report.text().contains("maskcoft"));
    }
}
