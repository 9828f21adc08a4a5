package org.djlmoe.training;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.LongConsumer;
import org.djlmoe.data.TokenBatch;

/**
 * How often a model prefers the right answer: of a question's choices it takes the one of the
 * highest mean log-likelihood a token, given the context; of equals the first.
 *
 * <p>Choices run in batches of rows of like length, padded on the right, which a causal model does
 * not see. A {@link org.djlmoe.routing.TokenSelector} of the routers does see it: its caches go
 * through all choices and their padding, in an order of this class's making.
 *
 * @param tasks the score of every task, in the order in which tasks first appear
 * @param mean the mean of the tasks' accuracies, each task counted once
 * @param low lower end of the mean's 95 % bootstrap interval over questions
 * @param high its upper end
 * @param chosen the choice taken for every question, in their order
 */
public record ChoiceEvaluation(
        List<TaskScore> tasks, double mean, double low, double high, int[] chosen) {

    private static final int BATCH_TOKENS = 4096;
    private static final int RESAMPLES = 2000;
    private static final double LEVEL = 0.95;

    /**
     * One task.
     *
     * @param task its name
     * @param questions how many questions it has
     * @param accuracy the share answered right
     * @param chance the share that guessing gets right
     * @param low lower end of the accuracy's 95 % bootstrap interval
     * @param high its upper end
     */
    public record TaskScore(
            String task, int questions, double accuracy, double chance, double low, double high) {}

    /** A choice behind its context. */
    private record Row(int question, int choice, int[] tokens, int scored) {}

    /**
     * Asks a model, with whatever mask or prior its routers have.
     *
     * @param model the model
     * @param questions at least one
     * @param seed decides the bootstrap
     * @param progress is told the number of choices done
     * @return accuracies and intervals
     * @throws IllegalArgumentException if there is no question, or a choice is longer than the
     *     model's positions; a context that is too long loses its beginning
     */
    public static ChoiceEvaluation of(
            LanguageModel model, List<ChoiceQuestion> questions, long seed, LongConsumer progress) {
        if (questions.isEmpty()) {
            throw new IllegalArgumentException("There is no question to ask");
        }
        double[][] scores = scores(model, questions, progress);
        int[] chosen = new int[questions.size()];
        Map<String, List<Integer>> tasks = new LinkedHashMap<>();
        for (int q = 0; q < chosen.length; q++) {
            for (int c = 1; c < scores[q].length; c++) {
                chosen[q] = scores[q][c] > scores[q][chosen[q]] ? c : chosen[q];
            }
            tasks.computeIfAbsent(questions.get(q).task(), t -> new ArrayList<>()).add(q);
        }
        List<TaskScore> results = new ArrayList<>();
        List<double[]> groups = new ArrayList<>();
        tasks.forEach(
                (task, members) -> {
                    double[] right =
                            members.stream()
                                    .mapToDouble(
                                            q -> chosen[q] == questions.get(q).answer() ? 1 : 0)
                                    .toArray();
                    double chance =
                            members.stream()
                                    .mapToDouble(q -> 1.0 / questions.get(q).choices().size())
                                    .average()
                                    .orElseThrow();
                    groups.add(right);
                    Bootstrap.Interval interval =
                            Bootstrap.ofMeans(List.of(right), RESAMPLES, LEVEL, seed);
                    results.add(
                            new TaskScore(
                                    task,
                                    right.length,
                                    Arrays.stream(right).average().orElseThrow(),
                                    chance,
                                    interval.low(),
                                    interval.high()));
                });
        Bootstrap.Interval interval = Bootstrap.ofMeans(groups, RESAMPLES, LEVEL, seed);
        return new ChoiceEvaluation(
                List.copyOf(results),
                results.stream().mapToDouble(TaskScore::accuracy).average().orElseThrow(),
                interval.low(),
                interval.high(),
                chosen);
    }

    /**
     * Scores every choice.
     *
     * @param model the model
     * @param questions the questions
     * @param progress is told the number of choices done
     * @return mean log-likelihood a token, in nats, [questions][choices]
     */
    public static double[][] scores(
            LanguageModel model, List<ChoiceQuestion> questions, LongConsumer progress) {
        int positions = model.decoder().config().maxPositionEmbeddings();
        double[][] scores = new double[questions.size()][];
        List<Row> rows = new ArrayList<>();
        for (int q = 0; q < scores.length; q++) {
            ChoiceQuestion question = questions.get(q);
            scores[q] = new double[question.choices().size()];
            for (int c = 0; c < scores[q].length; c++) {
                rows.add(row(question, q, c, positions));
            }
        }
        // Stable, so that the batches are the same every time.
        rows.sort(Comparator.comparingInt(r -> r.tokens.length));
        for (int from = 0; from < rows.size(); ) {
            int to = from + 1;
            while (to < rows.size()
                    && (to + 1 - from) * rows.get(to).tokens.length <= BATCH_TOKENS) {
                to++;
            }
            List<Row> batch = rows.subList(from, to);
            float[] losses = model.tokenLosses(batch(batch));
            int length = losses.length / batch.size();
            for (int i = 0; i < batch.size(); i++) {
                Row row = batch.get(i);
                double sum = 0;
                for (int t = 0; t < length; t++) {
                    sum += losses[i * length + t];
                }
                scores[row.question][row.choice] = -sum / row.scored;
            }
            progress.accept(to);
            from = to;
        }
        return scores;
    }

    private static Row row(ChoiceQuestion question, int q, int c, int positions) {
        int[] context = question.context();
        int[] choice = question.choices().get(c);
        // The last token of a row is only predicted, so a row has one token more than positions.
        int room = positions + 1 - choice.length;
        if (room < 1) {
            throw new IllegalArgumentException(
                    "Choice %d of question %d (task %s) has %d tokens, the model has %d positions"
                            .formatted(c, q, question.task(), choice.length, positions));
        }
        int kept = Math.min(context.length, room);
        int[] tokens = new int[kept + choice.length];
        System.arraycopy(context, context.length - kept, tokens, 0, kept);
        System.arraycopy(choice, 0, tokens, kept, choice.length);
        return new Row(q, c, tokens, choice.length);
    }

    private static TokenBatch batch(List<Row> rows) {
        int length = rows.get(rows.size() - 1).tokens.length - 1;
        int[] inputs = new int[rows.size() * length];
        int[] targets = new int[inputs.length];
        Arrays.fill(targets, LanguageModel.IGNORED);
        for (int i = 0; i < rows.size(); i++) {
            Row row = rows.get(i);
            int n = row.tokens.length - 1;
            System.arraycopy(row.tokens, 0, inputs, i * length, n);
            int first = n - row.scored;
            System.arraycopy(row.tokens, first + 1, targets, i * length + first, row.scored);
        }
        return new TokenBatch(rows.size(), length, inputs, targets);
    }
}
