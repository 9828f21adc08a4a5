package org.djlmoe.examples.bench;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStreamWriter;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;

/**
 * A Java virtual machine that runs one case on request. It has this one's class path, a heap that
 * is touched beforehand so that it is no part of any peak, and a memory allocator that suits what
 * is measured.
 */
final class ChildJvm implements AutoCloseable {

    private static final int LINES_SHOWN = 12;
    private static final int LINES_KEPT = 100;

    /** How the C allocator of a child behaves: it reads its environment only at the start. */
    enum Allocator {
        /** Keeps what is freed: for times, since memory touched for the first time is dear. */
        POOLED(
                Map.of(
                        "MALLOC_ARENA_MAX", "1",
                        "MALLOC_MMAP_THRESHOLD_", "4294967296",
                        "MALLOC_TRIM_THRESHOLD_", "17179869184")),
        /** As a Java program has it that sets nothing. */
        DEFAULT(Map.of()),
        /** Gives back what is freed: for peaks, never for times. */
        EXACT(Map.of("MALLOC_ARENA_MAX", "1", "MALLOC_MMAP_THRESHOLD_", "1048576"));

        private final Map<String, String> environment;

        Allocator(Map<String, String> environment) {
            this.environment = environment;
        }
    }

    private final String name;
    private final Process process;
    private final Path log;
    private final Writer commands;
    private final BufferedReader answers;

    private ChildJvm(String name, Process process, Path log) {
        this.name = name;
        this.process = process;
        this.log = log;
        commands = new OutputStreamWriter(process.getOutputStream(), StandardCharsets.UTF_8);
        answers =
                new BufferedReader(
                        new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8));
    }

    /**
     * Starts a child and waits until its workload is there.
     *
     * @param target the case
     * @param options what the case is told
     * @param allocator what is going to be measured
     * @param folder where its log lies while it runs
     * @return the child
     * @throws BenchException if the workload cannot be created
     */
    static ChildJvm start(Case target, Map<String, ?> options, Allocator allocator, Path folder)
            throws IOException {
        List<String> command = new ArrayList<>();
        command.add(
                ProcessHandle.current()
                        .info()
                        .command()
                        .orElse(
                                Path.of(System.getProperty("java.home"), "bin", "java")
                                        .toString()));
        command.addAll(
                List.of(
                        "-Xms256m",
                        "-Xmx256m",
                        "-XX:+AlwaysPreTouch",
                        "-XX:+UseSerialGC",
                        "-Dfile.encoding=UTF-8",
                        "-cp",
                        System.getProperty("java.class.path"),
                        ChildMain.class.getName(),
                        target.workload().getName(),
                        target.name()));
        options.forEach((option, value) -> command.add(option + "=" + value));
        Path log = Files.createTempFile(folder, target.name(), ".log");
        ProcessBuilder builder = new ProcessBuilder(command).redirectError(log.toFile());
        builder.environment().keySet().removeIf(variable -> variable.startsWith("MALLOC_"));
        builder.environment().putAll(allocator.environment);
        builder.environment().putIfAbsent("OPT_OUT_TRACKING", "true");
        ChildJvm child = new ChildJvm(target.name(), builder.start(), log);
        try {
            child.answer();
        } catch (IOException | RuntimeException e) {
            child.close();
            throw e;
        }
        return child;
    }

    /** Runs the workload until its times can be measured. */
    void warmUp() throws IOException {
        ask("warm-up");
    }

    /** Runs the workload once. */
    void run() throws IOException {
        ask("run");
    }

    /** Runs the workload, more than once if it is short, and returns the seconds of a run. */
    double turn() throws IOException {
        return Double.parseDouble(ask("turn"));
    }

    /** Runs the workload once and returns by how many bytes the most memory exceeded the start. */
    double peak() throws IOException {
        return Double.parseDouble(ask("peak"));
    }

    /** Returns further figures of the last run. */
    Map<String, Double> figures() throws IOException {
        Map<String, Double> figures = new LinkedHashMap<>();
        for (String pair : ask("figures").split(" ")) {
            if (!pair.isEmpty()) {
                int sign = pair.indexOf('=');
                figures.put(pair.substring(0, sign), Double.valueOf(pair.substring(sign + 1)));
            }
        }
        return figures;
    }

    /** Has the results written to a file. */
    void write(Path file) throws IOException {
        ask("write " + file);
    }

    private String ask(String command) throws IOException {
        try {
            commands.write(command + "\n");
            commands.flush();
        } catch (IOException e) {
            throw failure(e);
        }
        return answer();
    }

    private String answer() throws IOException {
        String line = answers.readLine();
        while (line != null && !line.startsWith(ChildMain.ANSWER)) {
            line = answers.readLine();
        }
        if (line == null) {
            throw failure(null);
        }
        return line.substring(ChildMain.ANSWER.length());
    }

    private BenchException failure(IOException cause) throws IOException {
        List<String> lines = Files.readAllLines(log, StandardCharsets.UTF_8);
        int first = 0;
        for (int i = 0; i < lines.size(); i++) {
            if (lines.get(i).startsWith("Exception in thread")) {
                first = i;
            }
        }
        first = Math.max(first, lines.size() - LINES_KEPT);
        List<String> last = lines.subList(first, Math.min(lines.size(), first + LINES_SHOWN));
        // Where in the code it happened is for those who ask.
        String said =
                last.stream()
                        .filter(line -> !line.startsWith("\tat "))
                        .map(line -> line.replaceFirst("^Exception in thread \\S+ ", ""))
                        .collect(Collectors.joining("\n"));
        BenchException log = new BenchException(String.join("\n", last), cause);
        return new BenchException(
                "Case "
                        + name
                        + " ended with exit code "
                        + exitCode()
                        + (said.isEmpty() ? "" : ": " + said),
                log);
    }

    private int exitCode() {
        try {
            return process.waitFor();
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
            throw new BenchException("Interrupted while case " + name + " ended", e);
        }
    }

    /** Ends the child. */
    @Override
    public void close() throws IOException {
        try {
            // The end of its input ends a child that waits.
            commands.close();
        } catch (IOException e) {
            process.destroy();
        }
        try {
            if (!process.waitFor(30, TimeUnit.SECONDS)) {
                process.destroyForcibly().waitFor();
            }
        } catch (InterruptedException e) {
            process.destroyForcibly();
            Thread.currentThread().interrupt();
        }
        answers.close();
        Files.deleteIfExists(log);
    }
}
