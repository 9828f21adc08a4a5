package org.djlmoe.examples.cli;

import java.io.PrintWriter;
import java.util.List;
import java.util.Locale;
import org.djlmoe.training.ChoiceEvaluation;

/** Accuracies of multiple-choice tasks as a file shows them. */
record TaskFigures(double mean, double[] interval, List<Row> tasks) {

    record Row(String task, int questions, double accuracy, double chance, double[] interval) {}

    static TaskFigures of(ChoiceEvaluation answered) {
        return answered == null
                ? null
                : new TaskFigures(
                        answered.mean(),
                        new double[] {answered.low(), answered.high()},
                        answered.tasks().stream()
                                .map(
                                        t ->
                                                new Row(
                                                        t.task(),
                                                        t.questions(),
                                                        t.accuracy(),
                                                        t.chance(),
                                                        new double[] {t.low(), t.high()}))
                                .toList());
    }

    void print(PrintWriter out) {
        String format = "%-16s %9s %9s %8s  %s%n";
        out.printf(format, "task", "questions", "accuracy", "chance", "95 % interval");
        for (Row row : tasks) {
            out.printf(
                    format,
                    row.task,
                    row.questions,
                    percent(row.accuracy),
                    percent(row.chance),
                    percent(row.interval[0]) + " to " + percent(row.interval[1]));
        }
        out.printf(
                format,
                "mean of tasks",
                "",
                percent(mean),
                percent(tasks.stream().mapToDouble(Row::chance).average().orElseThrow()),
                percent(interval[0]) + " to " + percent(interval[1]));
    }

    private static String percent(double share) {
        return String.format(Locale.ROOT, "%.1f %%", 100 * share);
    }
}
