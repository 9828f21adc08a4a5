package org.djlmoe.examples.cli;

import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Path;
import picocli.CommandLine.Model.CommandSpec;
import picocli.CommandLine.Option;
import picocli.CommandLine.Spec;
import picocli.CommandLine.Spec.Target;

/**
 * The options that every subcommand has; a mixin.
 *
 * <p>A subcommand prints its table or report to {@link #text()}, shows how far it is with {@link
 * #progress}, and hands its figures to {@link #writeJson}.
 */
public final class CommonOptions {
    @Spec(Target.MIXEE)
    private CommandSpec command;

    @Option(
            names = "--seed",
            paramLabel = "N",
            defaultValue = "42",
            description = "Decides everything random (default: ${DEFAULT-VALUE}).")
    private long seed;

    @Option(
            names = "--json",
            paramLabel = "FILE",
            description = "Also write the figures as JSON; - is standard output.")
    private String json;

    @Option(names = "--quiet", description = "No progress on standard error.")
    private boolean quiet;

    @Option(names = "--verbose", description = "Log more, and show where a failure comes from.")
    private boolean verbose;

    /** Returns the number that decides everything random. */
    public long seed() {
        return seed;
    }

    /** Returns whether progress is off. */
    public boolean quiet() {
        return quiet;
    }

    /** Returns whether the user wants details. */
    public boolean verbose() {
        return verbose;
    }

    /**
     * Returns where a report for people goes: standard output, or standard error if the JSON takes
     * standard output.
     */
    public PrintWriter text() {
        return JsonOutput.STDOUT.equals(json)
                ? command.commandLine().getErr()
                : command.commandLine().getOut();
    }

    /**
     * Starts a progress bar on standard error; nothing is shown with {@code --quiet}.
     *
     * @param label what is going on, a word or two
     * @param total number of items to do
     * @return the builder, for the unit and what is done already
     */
    public ProgressBar.Builder progress(String label, long total) {
        return ProgressBar.builder(label, total)
                .optQuiet(quiet)
                .optOut(command.commandLine().getErr());
    }

    /**
     * Checks what can be checked before the command runs; {@link Moe} calls it.
     *
     * @throws UserError if the JSON file cannot be written
     */
    void check() {
        if (json != null) {
            JsonOutput.check(json);
        }
    }

    /**
     * Fails if one of these options was given, which nothing would look at.
     *
     * @param why ends the message, such as "has no effect with --all-resident"
     * @param names options of the command
     * @throws UserError if so
     */
    void refuse(String why, String... names) {
        for (String name : names) {
            if (command.commandLine().getParseResult().hasMatchedOption(name)) {
                throw new UserError(name + " " + why);
            }
        }
    }

    /**
     * Fails if the JSON would replace a file of a checkpoint that the command reads or writes.
     *
     * @param checkpoint the checkpoint's folder
     * @throws UserError if so
     */
    void keepJsonOutside(Path checkpoint) {
        if (hasJsonFile()) {
            Arguments.outside("--json", Path.of(json), checkpoint);
        }
    }

    /**
     * Fails if the JSON would replace another file that the command reads or writes.
     *
     * @param other what names that file
     * @param file the file
     * @throws UserError if so
     */
    void keepJsonOff(String other, Path file) {
        if (hasJsonFile()) {
            Arguments.distinct("--json", Path.of(json), other, file);
        }
    }

    private boolean hasJsonFile() {
        return json != null && !json.equals(JsonOutput.STDOUT);
    }

    /**
     * Writes the figures if {@code --json} asks for them.
     *
     * @param figures a record, map or list
     * @throws UserError if the file cannot be written
     * @throws IOException if writing fails half-way
     */
    public void writeJson(Object figures) throws IOException {
        if (json != null) {
            JsonOutput.write(figures, json, command.commandLine().getOut());
        }
    }
}
