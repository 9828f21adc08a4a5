package org.djlmoe.integration;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.TimeUnit;
import org.djlmoe.training.TrainingCheckpoints;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledOnOs;
import org.junit.jupiter.api.condition.OS;
import org.junit.jupiter.api.io.TempDir;

/**
 * A training run whose process is killed twenty times, ten of them inside a save, is in the end the
 * run that nobody killed: the same losses, weights, optimizer state, to the bit.
 *
 * <p>{@code mvn -pl integration-tests -am test -Dtest=ResumeAfterKillTest
 * -Dsurefire.failIfNoSpecifiedTests=false}; more kills with {@code -DargLine=-Dmoe.kills=100}.
 */
@EnabledOnOs(OS.LINUX)
class ResumeAfterKillTest {

    private static final int KILLS = Integer.getInteger("moe.kills", 20);
    private static final int STEPS = 10 * KILLS;

    @TempDir Path directory;

    /** The bits of the loss of each step, as the run without kills has them. */
    private final Map<String, String> expected = new HashMap<>();

    private final Random random = new Random(7);
    private long saveMicros;

    /** How a process is to end. */
    private enum Kill {
        NEVER,
        DURING_A_SAVE,
        ANYWHERE
    }

    @Test
    @Timeout(value = 20, unit = TimeUnit.MINUTES)
    void run_killedAgainAndAgain_isTheUninterruptedOneToTheBit() throws Exception {
        Path whole = directory.resolve("whole");
        Path killed = directory.resolve("killed");
        run(whole, Kill.NEVER);
        assertEquals(STEPS, expected.size());

        int kills = 0;
        int inSave = 0;
        for (int attempt = 0; kills < KILLS || inSave < KILLS / 2; attempt++) {
            assertTrue(attempt < 3 * KILLS, inSave + " of " + kills + " kills hit a save");
            boolean aimed = attempt % 2 == 0 || kills >= KILLS;
            List<String> lines = run(killed, aimed ? Kill.DURING_A_SAVE : Kill.ANYWHERE);
            kills++;
            boolean hit = !lines.isEmpty() && lines.get(lines.size() - 1).startsWith("saving");
            inSave += hit ? 1 : 0;
        }
        run(killed, Kill.NEVER);

        Path one = new TrainingCheckpoints(whole, 1).latest().orElseThrow().folder();
        Path two = new TrainingCheckpoints(killed, 1).latest().orElseThrow().folder();
        List<String> names = names(one);
        assertEquals(names, names(two));
        assertEquals(4, names.size(), names::toString);
        for (String name : names) {
            assertEquals(-1, Files.mismatch(one.resolve(name), two.resolve(name)), name);
        }
    }

    private static List<String> names(Path folder) throws IOException {
        try (var files = Files.list(folder)) {
            return files.map(file -> file.getFileName().toString()).sorted().toList();
        }
    }

    /** Starts a process, kills it as asked, and returns what it said. */
    private List<String> run(Path folder, Kill kill) throws Exception {
        Path errors = directory.resolve("err.txt");
        Process process = start(folder, errors);
        List<String> lines = new ArrayList<>();
        // A save in the process, or a step, counted from the first; each after some microseconds.
        int wanted = random.nextInt(kill == Kill.ANYWHERE ? 5 : 2);
        double part = random.nextDouble();
        long began = 0;
        boolean dead = false;
        try (BufferedReader out =
                new BufferedReader(
                        new InputStreamReader(
                                process.getInputStream(), StandardCharsets.US_ASCII))) {
            for (String line = out.readLine(); line != null; line = out.readLine()) {
                lines.add(line);
                check(line, kill);
                if (line.startsWith("saving")) {
                    began = System.nanoTime();
                } else if (line.startsWith("saved") && kill == Kill.NEVER) {
                    saveMicros = (9 * saveMicros + (System.nanoTime() - began) / 1000) / 10;
                }
                String sign = kill == Kill.DURING_A_SAVE ? "saving" : "step";
                if (kill != Kill.NEVER && !dead && line.startsWith(sign) && wanted-- == 0) {
                    TimeUnit.MICROSECONDS.sleep((long) (part * saveMicros));
                    // Not by the process itself: that would close its output, and what it said
                    // last.
                    process.toHandle().destroyForcibly();
                    dead = true;
                }
            }
        }
        int code = process.waitFor();
        String said = String.join("\n", lines) + "\n" + Files.readString(errors);
        assertEquals(kill == Kill.NEVER ? 0 : 128 + 9, code, said);
        return lines;
    }

    private void check(String line, Kill kill) {
        String[] words = line.split(" ");
        if (words[0].equals("step")) {
            String before = expected.putIfAbsent(words[1], words[2]);
            assertEquals(before == null ? words[2] : before, words[2], "loss of step " + words[1]);
            assertTrue(before != null || kill == Kill.NEVER, "step " + words[1]);
        }
    }

    private static Process start(Path folder, Path errors) throws IOException {
        ProcessBuilder builder =
                new ProcessBuilder(
                        Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                        "-Xms64m",
                        "-Xmx64m",
                        "-XX:+UseSerialGC",
                        "-XX:TieredStopAtLevel=1",
                        "-cp",
                        System.getProperty("java.class.path"),
                        KilledRun.class.getName(),
                        folder.toString(),
                        Integer.toString(STEPS));
        builder.environment().put("OMP_NUM_THREADS", "1");
        builder.redirectError(errors.toFile());
        return builder.start();
    }
}
