package org.djlmoe.examples.cli;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.IOException;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;

class MoeTest {
    @TempDir private Path directory;

    private final StringWriter out = new StringWriter();
    private final StringWriter err = new StringWriter();
    private final Probe probe = new Probe();

    @Test
    void run_successfulCommand_returnsZeroAndSaysNothingOnStderr() {
        assertEquals(ExitCodes.OK, run("probe"));
        assertEquals("seed 42\n", out.toString());
        assertEquals("", err.toString());
    }

    @Test
    void run_seedGiven_reachesTheCommand() {
        assertEquals(ExitCodes.OK, run("probe", "--seed", "-7"));
        assertEquals("seed -7\n", out.toString());
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            value = {
                "'' | moe: a command is missing (see moe --help)",
                "prob | moe: there is no command 'prob' (see moe --help)",
                "probe --wrong | moe probe: Unknown option: '--wrong' (see moe probe --help)",
                "probe --seed x | moe probe: Invalid value for option '--seed': 'x' is not a long (see moe probe --help)",
                "probe extra | moe probe: Unmatched argument at index 1: 'extra' (see moe probe --help)"
            })
    void run_wrongArguments_returnsTwoAndOneLineWithAHint(String line, String message) {
        String[] args = line.isEmpty() ? new String[0] : line.split(" ");

        assertEquals(ExitCodes.USAGE, run(args));
        assertEquals(message + "\n", err.toString());
        assertEquals("", out.toString());
    }

    @Test
    void run_userError_returnsTwoAndItsMessageOnOneLineEvenIfVerbose() {
        probe.failure = new UserError("no such model;\n  name one", new IOException("inner"));

        assertEquals(ExitCodes.USAGE, run("probe", "--verbose"));
        assertEquals("moe probe: no such model;; name one\n", err.toString());
    }

    @Test
    void run_illegalArgument_returnsTwoAndOneLine() {
        probe.failure = new IllegalArgumentException("topK 9 exceeds 8 experts");

        assertEquals(ExitCodes.USAGE, run("probe"));
        assertEquals("moe probe: topK 9 exceeds 8 experts\n", err.toString());
    }

    @Test
    void run_failure_returnsOneAndTheTraceOnlyIfVerbose() {
        probe.failure = new IOException("disk full");

        assertEquals(ExitCodes.FAILURE, run("probe"));
        assertEquals(
                "moe probe: failed: IOException: disk full (--verbose shows where)\n",
                err.toString());

        err.getBuffer().setLength(0);
        assertEquals(ExitCodes.FAILURE, run("probe", "--verbose"));
        assertTrue(err.toString().startsWith("moe probe: failed: IOException: disk full\n"));
        assertTrue(err.toString().contains("\tat org.djlmoe.examples.cli.MoeTest"), err::toString);
    }

    @Test
    void run_errorWithoutMessage_returnsOne() {
        probe.error = new OutOfMemoryError();

        assertEquals(ExitCodes.FAILURE, run("probe"));
        assertEquals(
                "moe probe: failed: OutOfMemoryError: no message (--verbose shows where)\n",
                err.toString());
    }

    @Test
    void run_helpAndVersion_goToStdoutAndReturnZero() {
        assertEquals(ExitCodes.OK, run("--version"));
        assertTrue(out.toString().matches("moe \\d+\\.\\d+\\.\\d+\\S*\\n"), out::toString);
        assertEquals(ExitCodes.OK, run("--help"));
        assertTrue(out.toString().contains("probe"), out::toString);
        assertEquals(ExitCodes.OK, run("probe", "--help"));
        assertTrue(out.toString().contains("--json"), out::toString);
        assertEquals("", err.toString());
    }

    @Test
    void run_jsonToFile_writesTheFiguresAndKeepsTheTableOnStdout() throws IOException {
        Path file = directory.resolve("new").resolve("figures.json");

        assertEquals(ExitCodes.OK, run("probe", "--json", file.toString()));
        assertEquals("{\n  \"seed\": 42\n}\n", Files.readString(file));
        assertEquals("seed 42\n", out.toString());
    }

    @Test
    void run_jsonToStdout_movesTheTableToStderr() {
        assertEquals(ExitCodes.OK, run("probe", "--json", "-"));
        assertEquals("{\n  \"seed\": 42\n}\n", out.toString());
        assertEquals("seed 42\n", err.toString());
    }

    @Test
    void run_jsonToADirectory_endsBeforeTheCommandRuns() {
        assertEquals(ExitCodes.USAGE, run("probe", "--json", directory.toString()));
        assertEquals(
                "moe probe: --json: " + directory + " is a directory; name a file in it\n",
                err.toString());
        assertFalse(probe.ran);
    }

    @Test
    void run_corpus_reportsTheSameFiguresTwice() {
        int code = Moe.run(new PrintWriter(out), new PrintWriter(err), "corpus", "--json", "-");

        assertEquals(ExitCodes.OK, code);
        JsonObject report = JsonParser.parseString(out.toString()).getAsJsonObject();
        assertEquals(17_597, report.get("documents").getAsInt());
        long bytes = 0;
        for (var row : report.getAsJsonArray("languages")) {
            long size = row.getAsJsonObject().get("bytes").getAsLong();
            String language = row.getAsJsonObject().get("language").getAsString();
            assertTrue(
                    err.toString()
                            .lines()
                            .anyMatch(
                                    line -> line.startsWith(language) && line.endsWith(" " + size)),
                    language);
            bytes += size;
        }
        assertEquals(bytes, report.get("bytes").getAsLong());
    }

    private int run(String... args) {
        return Moe.run(List.of(probe), new PrintWriter(out), new PrintWriter(err), args);
    }

    @Command(name = "probe", mixinStandardHelpOptions = true)
    static final class Probe implements Callable<Integer> {
        @Mixin private CommonOptions options;
        private Exception failure;
        private Error error;
        private boolean ran;

        @Override
        public Integer call() throws Exception {
            ran = true;
            if (failure != null) {
                throw failure;
            }
            if (error != null) {
                throw error;
            }
            options.text().printf("seed %d\n", options.seed());
            options.writeJson(Map.of("seed", options.seed()));
            return ExitCodes.OK;
        }
    }
}
