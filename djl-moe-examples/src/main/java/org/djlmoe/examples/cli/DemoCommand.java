package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.concurrent.Callable;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.examples.demo.BaseModel;
import org.djlmoe.examples.demo.Demo;
import org.djlmoe.examples.demo.DemoReport;
import org.djlmoe.examples.demo.DemoSettings;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.plan.MemoryPlan;
import org.djlmoe.plan.PeakMeter;
import org.djlmoe.plan.PlanSettings;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe demo}: what MaskCoFT buys, on real text. */
@Command(
        name = "demo",
        description =
                "Fine-tune the base model on German parliament transcripts with and without MaskCoFT,"
                        + " and report what that changes.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class DemoCommand implements Callable<Integer> {

    private static final String PAGE = "report.html";

    @Mixin private CommonOptions options;
    @Mixin private OutputDirectory out;
    @Mixin private Memory memory;

    @Option(
            names = "--quick",
            description = "A short run: less training, less text, the same report.")
    private boolean quick;

    @Option(
            names = "--from-scratch",
            description = "Train the base model first instead of using the one that comes along.")
    private boolean fromScratch;

    @Override
    public Integer call() throws IOException {
        long start = System.nanoTime();
        Path folder = out.create(Path.of("runs", "demo"));
        for (String model : new String[] {"base", "maskcoft"}) {
            options.keepJsonOutside(folder.resolve(model));
        }
        options.keepJsonOff("the report's page", folder.resolve(PAGE));
        DemoSettings settings = DemoSettings.of(quick, options.seed());
        Path base = base(folder.resolve("base"));
        MoeConfig config = MoeConfig.fromJson(base.resolve(HfCheckpoint.CONFIG_FILE));
        try (StageProgress progress = new StageProgress(options)) {
            Demo demo = new Demo(settings, base, progress::step);
            MemoryPlan plan =
                    memory.plan(
                            config,
                            PlanSettings.builder()
                                    .setBatch(settings.batch())
                                    .setSequence(settings.sequence())
                                    .optAdapters(DemoSettings.RANK));
            try (PeakMeter meter = PeakMeter.start()) {
                Demo.Result result = demo.run(Memory.chunks(plan), folder.resolve("maskcoft"));
                double seconds = (System.nanoTime() - start) / 1e9;
                write(new DemoReport(settings, result, plan, meter.stop(), seconds), folder);
            }
        }
        return ExitCodes.OK;
    }

    private void write(DemoReport report, Path folder) throws IOException {
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
            tokenizer.save(folder.resolve("maskcoft"));
        }
        Path json = folder.resolve("report.json");
        JsonOutput.write(report.json(), json.toString(), null);
        Path page = folder.resolve(PAGE);
        report.writeHtml(page);
        options.text().print(report.text());
        options.text().printf("report: %s%nfigures: %s%n", page, json);
        options.writeJson(report.json());
    }

    private Path base(Path folder) throws IOException {
        if (!fromScratch) {
            return BaseModel.extract(folder);
        }
        Preset preset = Preset.DEMO;
        new Pretraining(
                        preset,
                        preset.steps,
                        preset.batch,
                        Pretraining.LEARNING_RATE,
                        Pretraining.BALANCE)
                .run(null, folder, memory, new SavedStates(), options);
        return folder;
    }
}
