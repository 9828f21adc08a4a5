package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.EnumSet;
import java.util.List;
import java.util.Set;
import java.util.concurrent.Callable;
import org.djlmoe.examples.demo.BaseModel;
import org.djlmoe.examples.study.Arm;
import org.djlmoe.examples.study.StudyReport;
import org.djlmoe.examples.study.StudyRun;
import org.djlmoe.examples.study.StudySettings;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe study}: MaskCoFT against every alternative, over several seeds. */
@Command(
        name = "study",
        description = {
            "Compare MaskCoFT with the base, a fine-tuned control, other masks and the cache prior,"
                    + " over several seeds; say which claims hold.",
            "A study that was stopped goes on where it was when it is run again into the same"
                    + " folder."
        },
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class StudyCommand implements Callable<Integer> {

    /** What {@code --arms} can name; the base and the control always run. */
    enum Choice {
        RANDOM,
        FREQUENT,
        MASKCOFT,
        CACHE
    }

    @Mixin private CommonOptions options;
    @Mixin private OutputDirectory out;

    @Option(names = "--quick", description = "A few minutes; its figures carry little weight.")
    private boolean quick;

    @Option(
            names = "--seeds",
            paramLabel = "N",
            description =
                    "How many seeds, from --seed on; all arms run on each (default: 5, quick: 1).")
    private Integer seeds;

    @Option(
            names = "--steps",
            paramLabel = "N",
            description = "Training steps of every arm (default: 200, quick: 20).")
    private Integer steps;

    @Option(
            names = "--arms",
            split = ",",
            paramLabel = "ARM",
            description =
                    "Arms beside the base and the control: ${COMPLETION-CANDIDATES} (default: all).")
    private List<Choice> arms = List.of(Choice.values());

    @Override
    public Integer call() throws IOException {
        int seedCount = seeds == null ? quick ? 1 : 5 : seeds;
        int stepCount = steps == null ? quick ? 20 : 200 : steps;
        Arguments.positive("--seeds", seedCount);
        Arguments.positive("--steps", stepCount);
        Path folder = out.create(Path.of("runs", "study"));
        Path page = folder.resolve("report.html");
        options.keepJsonOff("the report's page", page);
        options.keepJsonOutside(folder.resolve("base"));
        Path base = BaseModel.extract(folder.resolve("base"));
        StudySettings settings = StudySettings.of(quick, options.seed(), seedCount, stepCount);
        StudyRun run = new StudyRun(settings, chosen(), base, folder.resolve("units"));
        StudyReport report;
        try (ProgressBar bar = options.progress("study", run.work()).optUnit("tokens").build()) {
            report =
                    run.run(
                            (label, work, resumed) -> {
                                bar.note(label);
                                bar.advance(work, resumed ? 0 : work);
                            });
        }
        Path json = folder.resolve("report.json");
        JsonOutput.write(report.json(), json.toString(), null);
        report.writeHtml(page);
        options.text().print(report.text());
        options.text().printf("report: %s%nfigures: %s%n", page, json);
        options.writeJson(report.json());
        return ExitCodes.OK;
    }

    private Set<Arm> chosen() {
        Set<Arm> chosen = EnumSet.noneOf(Arm.class);
        for (Choice choice : arms) {
            switch (choice) {
                case RANDOM -> chosen.add(Arm.RANDOM);
                case FREQUENT -> chosen.add(Arm.FREQUENT);
                case MASKCOFT -> chosen.add(Arm.MASKCOFT);
                case CACHE -> {
                    chosen.add(Arm.BASE_CACHE);
                    chosen.add(Arm.CONTROL_CACHE);
                    chosen.add(Arm.MASKCOFT_CACHE);
                }
            }
        }
        return chosen;
    }
}
