package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.bench.Benches;
import org.djlmoe.examples.bench.OptimizerWorkload;
import org.djlmoe.tier.MappedFileTier;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe bench optimizer}. */
@Command(
        name = "optimizer",
        description =
                "A step of AdamW: OffloadStreamAdamW with its state in memory and in files beside"
                        + " DJL's AdamW and PyTorch's fused kernel.",
        footer =
                "%nCases: djl-adamw; djl-adamw-default (the C library's default allocator);"
                        + " fused (PyTorch's kernel alone) and fused-zero (then gradients set to zero, as"
                        + " all but fused do); memory-tier and staged (state in memory, updated in place"
                        + " or in buffers); file-tier (in files, warm) and memory-beside-file (run in turn"
                        + " with it); file-tier-cold (read from and written to the disk) and raw-file (the"
                        + " same bytes, without an update).",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class OptimizerBench implements Callable<Integer> {

    @Mixin private CommonOptions options;
    @Mixin private BenchOptions bench;

    @Option(
            names = "--parameters",
            paramLabel = "N",
            defaultValue = "100000000",
            description = "Elements in all (default: ${DEFAULT-VALUE}).")
    private int parameters;

    @Option(
            names = "--array",
            paramLabel = "N",
            defaultValue = "25000000",
            description =
                    "Elements of one weight, such as a stack of experts (default: ${DEFAULT-VALUE}).")
    private int array;

    @Option(
            names = "--bucket",
            paramLabel = "N",
            description = "Elements of a bucket (default: the optimizer's own).")
    private Integer bucket;

    @Option(
            names = "--tier",
            paramLabel = "DIR",
            defaultValue = "${sys:java.io.tmpdir}",
            description = "Where state is stored, on a disk (default: ${DEFAULT-VALUE}).")
    private Path tier;

    @Override
    public Integer call() throws IOException {
        Map<String, Object> settings =
                BenchOptions.settings(OptimizerWorkload.MEMORY, OptimizerWorkload.DJL, options);
        // Known before the first case has run, not after minutes.
        new MappedFileTier(tier).close();
        settings.put("parameters", parameters);
        settings.put("array", array);
        if (bucket != null) {
            settings.put("bucket", bucket);
        }
        settings.put("tier", tier.toString());
        settings.put("pairs", Benches.optimizerPairs());
        return bench.run("optimizer", settings, Benches.optimizer(), options);
    }
}
