package org.djlmoe.examples.cli;

import java.io.IOException;
import java.io.InputStream;
import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import picocli.CommandLine;
import picocli.CommandLine.Command;
import picocli.CommandLine.ExecutionException;
import picocli.CommandLine.IVersionProvider;
import picocli.CommandLine.Model.CommandSpec;
import picocli.CommandLine.ParameterException;
import picocli.CommandLine.ParseResult;
import picocli.CommandLine.Spec;
import picocli.CommandLine.UnmatchedArgumentException;

/** The command {@code moe}: finds the subcommand and turns its end into an exit code. */
@Command(
        name = "moe",
        description = "Mixture-of-Experts training in bounded memory, with the Deep Java Library.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        synopsisSubcommandLabel = "COMMAND",
        footer = {"", "Exit codes: 0 done, 1 failed, 2 asked for wrongly."})
public final class Moe implements Runnable {

    @Spec private CommandSpec spec;

    /** Every subcommand, in the order of the help text. */
    private static List<Object> commands() {
        return List.of(
                new DemoCommand(),
                new TrainCommand(),
                new FinetuneCommand(),
                new EvaluateCommand(),
                new ReplayCommand(),
                new GenerateCommand(),
                new StudyCommand(),
                new BenchCommand(),
                new CorpusCommand());
    }

    /**
     * Runs {@code moe} and ends the JVM with its exit code.
     *
     * @param args the command line
     */
    public static void main(String[] args) {
        if (Arrays.asList(args).contains("--verbose")) {
            // Before the first logger exists.
            System.setProperty("org.slf4j.simpleLogger.defaultLogLevel", "info");
        }
        // Whatever the locale: the texts are in languages that ASCII cannot write.
        PrintWriter out = new PrintWriter(System.out, true, StandardCharsets.UTF_8);
        PrintWriter err = new PrintWriter(System.err, true, StandardCharsets.UTF_8);
        int code = run(out, err, args);
        if (code == ExitCodes.OK && out.checkError()) {
            err.println("moe: standard output could not be written to");
            code = ExitCodes.FAILURE;
        }
        System.exit(code);
    }

    /**
     * Runs {@code moe}.
     *
     * @param out takes results and help
     * @param err takes messages and progress
     * @param args the command line
     * @return one of {@link ExitCodes}
     */
    public static int run(PrintWriter out, PrintWriter err, String... args) {
        return run(commands(), out, err, args);
    }

    static int run(List<Object> commands, PrintWriter out, PrintWriter err, String... args) {
        CommandLine root = new CommandLine(new Moe());
        commands.forEach(root::addSubcommand);
        root.setOut(out);
        root.setErr(err);
        root.setCaseInsensitiveEnumValuesAllowed(true);
        root.setExecutionStrategy(Moe::execute);
        root.setParameterExceptionHandler(Moe::explainUsage);
        root.setExecutionExceptionHandler((e, cmd, parsed) -> explain(e, cmd, parsed));
        try {
            return root.execute(args);
        } catch (Error e) {
            // The handler above is asked about exceptions only.
            ParseResult parsed = root.getParseResult();
            CommandLine cmd = root;
            while (parsed != null && parsed.hasSubcommand()) {
                parsed = parsed.subcommand();
                cmd = parsed.commandSpec().commandLine();
            }
            return explain(e, cmd, parsed);
        } finally {
            out.flush();
            err.flush();
        }
    }

    @Override
    public void run() {
        throw new ParameterException(spec.commandLine(), "a command is missing");
    }

    // A place that cannot be written to is better known before hours of training than after.
    private static int execute(ParseResult parsed) {
        for (ParseResult p = parsed; p != null; p = p.subcommand()) {
            for (CommandSpec mixin : p.commandSpec().mixins().values()) {
                if (mixin.userObject() instanceof CommonOptions options
                        && !p.isUsageHelpRequested()) {
                    try {
                        options.check();
                    } catch (UserError e) {
                        CommandLine cmd = p.commandSpec().commandLine();
                        throw new ExecutionException(cmd, e.getMessage(), e);
                    }
                }
            }
        }
        return new CommandLine.RunLast().execute(parsed);
    }

    private static int explainUsage(ParameterException e, String[] args) {
        CommandLine cmd = e.getCommandLine();
        String name = cmd.getCommandSpec().qualifiedName();
        String message = e.getMessage();
        if (e instanceof UnmatchedArgumentException unmatched
                && !unmatched.isUnknownOption()
                && !cmd.getSubcommands().isEmpty()) {
            message = "there is no command '" + unmatched.getUnmatched().get(0) + "'";
        }
        cmd.getErr().println(oneLine(name + ": " + message) + " (see " + name + " --help)");
        return ExitCodes.USAGE;
    }

    private static int explain(Throwable e, CommandLine cmd, ParseResult parsed) {
        boolean mistake = e instanceof UserError || e instanceof IllegalArgumentException;
        boolean verbose = isVerbose(parsed);
        StringBuilder line = new StringBuilder(cmd.getCommandSpec().qualifiedName()).append(": ");
        if (!mistake) {
            line.append("failed: ").append(e.getClass().getSimpleName()).append(": ");
        }
        line.append(e.getMessage() == null ? "no message" : e.getMessage());
        if (!mistake && !verbose) {
            line.append(" (--verbose shows where)");
        }
        cmd.getErr().println(oneLine(line.toString()));
        if (!(e instanceof UserError) && verbose) {
            e.printStackTrace(cmd.getErr());
        }
        return mistake ? ExitCodes.USAGE : ExitCodes.FAILURE;
    }

    private static boolean isVerbose(ParseResult parsed) {
        for (ParseResult p = parsed; p != null; p = p.subcommand()) {
            if (p.hasMatchedOption("--verbose")) {
                return true;
            }
        }
        return false;
    }

    private static String oneLine(String text) {
        return text.strip().replaceAll("\\s*\\R\\s*", "; ");
    }

    static final class Version implements IVersionProvider {
        @Override
        public String[] getVersion() throws IOException {
            Properties properties = new Properties();
            try (InputStream in = Moe.class.getResourceAsStream("version.properties")) {
                properties.load(in);
            }
            return new String[] {"moe " + properties.getProperty("version")};
        }
    }
}
