package org.djlmoe.testing;

import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * Runs a program that measures its own memory in a Java virtual machine of its own, whose resident
 * set grows with what is allocated and with nothing else: the heap is touched at the start, and the
 * allocator gives large blocks back at once.
 */
public final class MeasuredJvm {

    private MeasuredJvm() {}

    /**
     * Runs a program to its end.
     *
     * @param folder where its output is kept
     * @param options further options of the virtual machine
     * @param environment further variables
     * @param main its class, found on this test's class path
     * @param arguments its arguments
     * @return what it printed, without white space around it
     */
    public static String run(
            Path folder,
            List<String> options,
            Map<String, String> environment,
            Class<?> main,
            List<String> arguments)
            throws Exception {
        List<String> command = new ArrayList<>();
        command.add(Path.of(System.getProperty("java.home"), "bin", "java").toString());
        command.addAll(List.of("-Xms64m", "-Xmx64m", "-XX:+UseSerialGC", "-XX:+AlwaysPreTouch"));
        command.addAll(options);
        command.addAll(List.of("-cp", System.getProperty("java.class.path"), main.getName()));
        command.addAll(arguments);
        Path out = folder.resolve("out.txt");
        Path err = folder.resolve("err.txt");
        ProcessBuilder builder =
                new ProcessBuilder(command)
                        .redirectOutput(out.toFile())
                        .redirectError(err.toFile());
        builder.environment().put("MALLOC_MMAP_THRESHOLD_", "1048576");
        builder.environment().put("MALLOC_ARENA_MAX", "1");
        builder.environment().remove("MALLOC_TRIM_THRESHOLD_");
        builder.environment().putAll(environment);
        Process process = builder.start();
        try {
            boolean ended = process.waitFor(5, TimeUnit.MINUTES);
            String text = Files.readString(out, StandardCharsets.UTF_8);
            String errors = Files.readString(err, StandardCharsets.UTF_8);
            assertTrue(ended && process.exitValue() == 0, text + errors);
            return text.strip();
        } finally {
            process.destroyForcibly();
        }
    }
}
