package org.djlmoe.examples.cli;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

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
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.examples.demo.BaseModel;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class GenerateCommandTest {

    @TempDir private static Path shared;
    private static Path model;

    @TempDir private Path directory;

    private final StringWriter out = new StringWriter();
    private final StringWriter err = new StringWriter();

    @BeforeAll
    static void extract() throws IOException {
        model = BaseModel.extract(shared.resolve("base"));
    }

    private int run(Object... args) {
        List<String> line = new ArrayList<>(List.of("generate"));
        Stream.of(args).map(Object::toString).forEach(line::add);
        out.getBuffer().setLength(0);
        err.getBuffer().setLength(0);
        return Moe.run(new PrintWriter(out), new PrintWriter(err), line.toArray(String[]::new));
    }

    private JsonObject runs(int index, Object... args) {
        Object[] all = Stream.of(new Object[] {"--json", "-"}, args).flatMap(Stream::of).toArray();
        assertEquals(ExitCodes.OK, run(all), err::toString);
        return JsonParser.parseString(out.toString())
                .getAsJsonObject()
                .getAsJsonArray("runs")
                .get(index)
                .getAsJsonObject();
    }

    @Test
    void generate_baseModel_textOnStdoutAndFiguresBehind() {
        assertEquals(ExitCodes.OK, run("--prompt", "Herr Präsident", "--max-tokens", "20"));
        assertTrue(out.toString().startsWith("Herr Präsident"), out::toString);
        assertTrue(out.toString().contains("ms per output token"), out::toString);
        assertTrue(out.toString().contains("4 of 8 experts a layer resident"), out::toString);
        assertEquals("", err.toString());
    }

    @Test
    void generate_compareWithAllResident_sameTextAndNoLoadsThere() {
        Object[] args = {
            "--checkpoint", model, "--max-tokens", "24", "--compare", "all-resident", "--cold"
        };
        JsonObject offloaded = runs(0, args);
        JsonObject resident = runs(1, args);
        assertTrue(err.toString().contains("the same text"), err::toString);
        assertEquals(offloaded.get("text"), resident.get("text"));
        assertTrue(offloaded.get("loads_per_token").getAsDouble() > 0);
        assertEquals(0, resident.get("loads_per_token").getAsDouble());
        String experts = offloaded.get("experts").getAsString();
        assertTrue(experts.contains("page cache dropped") || experts.contains("bypassed"), experts);
    }

    @Test
    void generate_traceOfARun_replaysToItsLoads() throws IOException {
        Path trace = directory.resolve("trace.json");
        JsonObject run =
                runs(
                        0,
                        "--checkpoint",
                        model,
                        "--max-tokens",
                        "30",
                        "--policy",
                        "lru",
                        "--expert-cache",
                        "3",
                        "--trace",
                        trace);
        double replayed =
                LoadReplay.builder()
                        .setCapacity(3)
                        .optWarmUpTokens(run.get("prompt_tokens").getAsInt())
                        .build()
                        .run(ExpertTrace.read(trace), EvictionPolicy.Type.LRU)
                        .loadsPerToken();
        assertEquals(replayed, run.get("loads_per_token").getAsDouble(), 1e-12);
    }

    @Test
    void generate_paddedAndStored_sameTextMoreBytesAndTheStoreIsKept() throws IOException {
        Path store = directory.resolve("experts");
        Object[] args = {"--checkpoint", model, "--max-tokens", "20", "--prefetch", "off"};
        JsonObject plain = runs(0, args);
        Object[] padded =
                Stream.of(args, new Object[] {"--pad-inner", "4x", "--store", store})
                        .flatMap(Stream::of)
                        .toArray();
        JsonObject first = runs(0, padded);
        long size = Files.size(store);
        JsonObject second = runs(0, padded);
        assertEquals(size, Files.size(store));
        assertEquals(plain.get("text"), first.get("text"));
        assertEquals(plain.get("text"), second.get("text"));
        assertEquals(
                4 * plain.get("bytes_loaded").getAsLong(), first.get("bytes_loaded").getAsLong());
    }

    @Test
    void generate_stopAndGreedy_endBeforeIt() {
        Object[] args = {"--checkpoint", model, "--max-tokens", "60", "--temperature", "0"};
        String all = runs(0, args).get("text").getAsString();
        String stop = all.substring(10, 12);
        Object[] stopping =
                Stream.of(args, new Object[] {"--stop", stop}).flatMap(Stream::of).toArray();
        JsonObject cut = runs(0, stopping);
        assertEquals(all.substring(0, all.indexOf(stop)), cut.get("text").getAsString());
        assertEquals("stop string", cut.get("stopped_by").getAsString());
    }

    @Test
    void generate_wrongOptions_oneLineThatSaysWhatToDo() {
        assertMistake("--expert-cache 1 is too small", "--expert-cache", "1");
        assertMistake("--pad-inner must be a factor", "--pad-inner", "0x");
        assertMistake("choose another one", "--policy", "belady");
        assertMistake("No eviction policy", "--policy", "mru");
        assertMistake("No way to prefetch", "--prefetch", "always");
        assertMistake("needs its set", "--policy", "static");
        assertMistake("--expert-cache 9 is too large: a layer has 8", "--expert-cache", "9");
        for (String option :
                List.of(
                        "--expert-cache=4",
                        "--policy=lru",
                        "--admission=optional",
                        "--prefetch=off",
                        "--cold",
                        "--tier=file",
                        "--store=" + directory.resolve("store"))) {
            String name = option.split("=")[0];
            assertMistake(name + " has no effect with --all-resident", "--all-resident", option);
        }
        assertMistake("declines no expert", "--policy", "lru", "--admission", "optional");
        for (String option : List.of("--top-k=3", "--top-p=0.95")) {
            String name = option.split("=")[0];
            assertMistake(
                    name + " has no effect with --temperature 0", "--temperature", "0", option);
        }
        assertMistake("needs experts in a file", "--tier", "host", "--cold");
        assertMistake("compares nothing", "--all-resident", "--compare", "all-resident");
        assertMistake("there is no folder", "--compare", directory.resolve("nowhere"));
        assertMistake("--prompt is empty", "--prompt", "");
        assertMistake("topP is 2.0", "--top-p", "2");
        assertMistake("positions", "--max-tokens", "100000");
    }

    @Test
    void generate_outputsThatWouldReplaceEachOtherOrAModel_refusedAndNothingChanged()
            throws IOException {
        for (String option : List.of("--json", "--trace", "--store")) {
            for (String file : List.of("config.json", "model.safetensors")) {
                assertMistake("is a file of the model in", option, model.resolve(file));
            }
        }
        Path other = BaseModel.extract(directory.resolve("other"));
        Path config = other.resolve("config.json");
        String before = Files.readString(config);
        assertMistake("is a file of the model in " + other, "--compare", other, "--json", config);
        assertEquals(before, Files.readString(config));
        Path file = directory.resolve("file");
        assertMistake("--json and --trace are the same file", "--json", file, "--trace", file);
        assertMistake("--json and --store are the same file", "--json", file, "--store", file);
        assertMistake("--trace and --store are the same file", "--trace", file, "--store", file);
        assertMistake("--compare: there is no folder", "--compare", file);
    }

    private void assertMistake(String part, Object... args) {
        Object[] all =
                Stream.of(new Object[] {"--checkpoint", model}, args).flatMap(Stream::of).toArray();
        assertEquals(ExitCodes.USAGE, run(all), out::toString);
        assertTrue(err.toString().startsWith("moe generate: "), err::toString);
        assertTrue(err.toString().contains(part), err::toString);
        assertEquals(1, err.toString().lines().count(), err::toString);
    }
}
