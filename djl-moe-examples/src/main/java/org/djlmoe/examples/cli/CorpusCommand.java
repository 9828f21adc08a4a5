package org.djlmoe.examples.cli;

import java.io.IOException;
import java.io.PrintWriter;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import org.djlmoe.examples.text.EuroparlCorpus;
import org.djlmoe.examples.text.EuroparlCorpus.Count;
import org.djlmoe.examples.text.Language;
import picocli.CommandLine.Command;
import picocli.CommandLine.Mixin;

/** {@code moe corpus}: how much text of which language there is to train on. */
@Command(
        name = "corpus",
        description = "Show the languages, documents and bytes of the parliament transcripts.",
        subcommands = TasksCommand.class,
        mixinStandardHelpOptions = true,
        versionProvider = Moe.Version.class,
        sortOptions = false)
final class CorpusCommand implements Callable<Integer> {
    @Mixin private CommonOptions options;

    @Override
    public Integer call() throws IOException {
        List<Row> rows = new ArrayList<>();
        int documents = 0;
        long bytes = 0;
        for (Map.Entry<Language, Count> entry : EuroparlCorpus.load().counts().entrySet()) {
            Count count = entry.getValue();
            Language language = entry.getKey();
            rows.add(new Row(language.label(), language.code(), count.documents(), count.bytes()));
            documents += count.documents();
            bytes += count.bytes();
        }
        print(rows, documents, bytes);
        options.writeJson(new Report(rows, documents, bytes));
        return ExitCodes.OK;
    }

    private void print(List<Row> rows, int documents, long bytes) {
        PrintWriter out = options.text();
        String format = "%-12s %4s %10s %12s%n";
        out.printf(format, "language", "code", "documents", "bytes");
        for (Row row : rows) {
            out.printf(format, row.language(), row.code(), row.documents(), row.bytes());
        }
        out.printf(format, "all", "", documents, bytes);
    }

    record Row(String language, String code, int documents, long bytes) {}

    record Report(List<Row> languages, int documents, long bytes) {}
}
