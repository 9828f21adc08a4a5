package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.tasks.TaskFile;
import org.djlmoe.examples.tasks.TaskGenerator;
import org.djlmoe.examples.tasks.TaskItem;
import org.djlmoe.examples.text.Language;
import org.djlmoe.examples.text.TextData;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;
import picocli.CommandLine.Option;

/** {@code moe corpus tasks}: multiple-choice questions made of held-out transcripts. */
@Command(
        name = "tasks",
        description =
                "Make nine small multiple-choice tasks from held-out transcripts, for moe evaluate"
                        + " --tasks.",
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class TasksCommand implements Callable<Integer> {

    @Option(
            names = "--out",
            required = true,
            paramLabel = "FILE",
            description =
                    "The file of JSON lines: {\"task\", \"context\", \"choices\": [...],"
                            + " \"answer\"}.")
    private String out;

    @Option(
            names = "--language",
            paramLabel = "CODE",
            defaultValue = "de",
            description =
                    "Language of all tasks but the one about languages (default:"
                            + " ${DEFAULT-VALUE}).")
    private String language;

    @Option(
            names = "--split",
            paramLabel = "SPLIT",
            defaultValue = "test",
            description =
                    "Which held-out transcripts: validation or test (default: ${DEFAULT-VALUE}).")
    private HeldOutText.Split split;

    @Option(
            names = "--items",
            paramLabel = "N",
            defaultValue = "120",
            description = "Questions a task at most (default: ${DEFAULT-VALUE}).")
    private int items;

    @Mixin private CommonOptions options;

    @Override
    public Integer call() throws IOException {
        Arguments.positive("--items", items);
        Path file = Arguments.outputFile("--out", out);
        options.keepJsonOff("--out", file);
        Language only = Arguments.language(language);
        List<TaskItem> made =
                new TaskGenerator(
                                TextData.documents(TextData.Part.valueOf(split.name())),
                                only,
                                items,
                                options.seed())
                        .generate();
        TaskFile.write(file, made);
        Map<String, Integer> counts = new LinkedHashMap<>();
        made.forEach(item -> counts.merge(item.task(), 1, Integer::sum));
        counts.forEach((task, n) -> options.text().printf("%-16s %5d%n", task, n));
        options.text().printf("%d questions written to %s%n", made.size(), out);
        options.writeJson(new Report(out, only.code(), options.seed(), counts));
        return ExitCodes.OK;
    }

    record Report(String file, String language, long seed, Map<String, Integer> questions) {}
}
