package org.djlmoe.examples.cli;

import picocli.CommandLine.Command;
import picocli.CommandLine.Model.CommandSpec;
import picocli.CommandLine.ParameterException;
import picocli.CommandLine.Spec;

/**
 * {@code moe bench}: time, memory and exactness of the operators beside what DJL does by itself.
 */
@Command(
        name = "bench",
        description =
                "Measure an operator beside what DJL code does without it, every case in a Java"
                        + " virtual machine of its own.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        synopsisSubcommandLabel = "BENCH",
        subcommands = {
            VocabBench.class,
            DispatchBench.class,
            CheckpointBench.class,
            OptimizerBench.class,
            DropInBench.class
        })
final class BenchCommand implements Runnable {

    @Spec private CommandSpec spec;

    @Override
    public void run() {
        throw new ParameterException(spec.commandLine(), "a benchmark is missing");
    }
}
