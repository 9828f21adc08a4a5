package org.djlmoe.training;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.model.MoeConfig;
import org.junit.jupiter.api.Test;

class ChoiceEvaluationTest {

    private static final int VOCAB = 19;

    private static LanguageModel model() {
        MoeConfig config =
                MoeConfig.builder()
                        .setVocabSize(VOCAB)
                        .setHiddenSize(16)
                        .setIntermediateSize(12)
                        .setNumLayers(2)
                        .setNumHeads(2)
                        .setNumExperts(4)
                        .setTopK(2)
                        .optMaxPositionEmbeddings(24)
                        .optInitializerRange(0.3)
                        .build();
        return LanguageModel.create(config, LanguageModel.Chunks.DEFAULT, 11);
    }

    private static List<ChoiceQuestion> questions(int count) {
        Random random = new Random(3);
        List<ChoiceQuestion> questions = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            List<int[]> choices = new ArrayList<>();
            for (int c = 0; c < 2 + i % 3; c++) {
                choices.add(random.ints(1 + random.nextInt(5), 0, VOCAB).toArray());
            }
            int[] context = random.ints(1 + random.nextInt(12), 0, VOCAB).toArray();
            questions.add(
                    new ChoiceQuestion("task " + i % 2, context, choices, i % choices.size()));
        }
        return questions;
    }

    /** Row by row, as many forward passes as tokens: the mean loss of one target at a time. */
    private static double naive(LanguageModel model, int[] context, int[] choice) {
        double sum = 0;
        List<Integer> seen = new ArrayList<>();
        for (int id : context) {
            seen.add(id);
        }
        for (int id : choice) {
            int[] inputs = seen.stream().mapToInt(v -> v).toArray();
            int[] targets = inputs.clone();
            targets[targets.length - 1] = id;
            float[] losses = model.tokenLosses(new TokenBatch(1, inputs.length, inputs, targets));
            sum -= losses[losses.length - 1];
            seen.add(id);
        }
        return sum / choice.length;
    }

    @Test
    void scores_batchedAndPadded_meanLogLikelihoodsOfSinglePasses() {
        try (LanguageModel model = model()) {
            List<ChoiceQuestion> questions = questions(9);
            double[][] scores = ChoiceEvaluation.scores(model, questions, done -> {});
            for (int q = 0; q < questions.size(); q++) {
                for (int c = 0; c < scores[q].length; c++) {
                    ChoiceQuestion question = questions.get(q);
                    double expected = naive(model, question.context(), question.choices().get(c));
                    assertEquals(expected, scores[q][c], 1e-5);
                }
            }
        }
    }

    @Test
    void tokenLosses_someIgnored_theirMeanIsTheLossOfTheOthers() {
        try (LanguageModel model = model()) {
            int[] ids = {1, 2, 3, 4, 5, 6};
            int[] targets = {2, 3, 4, 5, 6, 7};
            double all = model.loss(new TokenBatch(2, 3, ids, targets));
            float[] each = model.tokenLosses(new TokenBatch(2, 3, ids, targets));
            double sum = 0;
            for (float loss : each) {
                sum += loss;
            }
            assertEquals(all, sum / 6, 1e-6);
            targets[1] = LanguageModel.IGNORED;
            float[] some = model.tokenLosses(new TokenBatch(2, 3, ids, targets));
            assertEquals(0, some[1]);
            each[1] = 0;
            assertArrayEquals(each, some, 1e-6f);
        }
    }

    @Test
    void of_questions_accuracyOfTheBestScoresByTaskAndMeanOfTasks() {
        try (LanguageModel model = model()) {
            List<ChoiceQuestion> questions = questions(31);
            double[][] scores = ChoiceEvaluation.scores(model, questions, done -> {});
            double[] right = new double[2];
            double[] chance = new double[2];
            for (int q = 0; q < 31; q++) {
                boolean best = true;
                for (double score : scores[q]) {
                    best &= scores[q][questions.get(q).answer()] >= score;
                }
                right[q % 2] += best ? 1 : 0;
                chance[q % 2] += 1.0 / scores[q].length;
            }
            long[] last = {0};
            ChoiceEvaluation result =
                    ChoiceEvaluation.of(model, questions, 1, done -> last[0] = done);
            assertEquals(right[0] / 16, result.tasks().get(0).accuracy(), 1e-12);
            assertEquals(right[1] / 15, result.tasks().get(1).accuracy(), 1e-12);
            assertEquals(chance[0] / 16, result.tasks().get(0).chance(), 1e-12);
            assertEquals("task 1", result.tasks().get(1).task());
            assertEquals((right[0] / 16 + right[1] / 15) / 2, result.mean(), 1e-12);
            assertTrue(result.low() <= result.mean() && result.mean() <= result.high());
            assertEquals(31, result.chosen().length);
            assertEquals(questions.stream().mapToInt(q -> q.choices().size()).sum(), last[0]);
        }
    }

    @Test
    void scores_contextTooLong_losesItsBeginning() {
        try (LanguageModel model = model()) {
            int[] context = new Random(1).ints(40, 0, VOCAB).toArray();
            int[] end = java.util.Arrays.copyOfRange(context, 40 - 23, 40);
            List<int[]> choices = List.of(new int[] {1, 2}, new int[] {3, 4});
            double[][] scores =
                    ChoiceEvaluation.scores(
                            model,
                            List.of(
                                    new ChoiceQuestion("t", context, choices, 0),
                                    new ChoiceQuestion("t", end, choices, 0)),
                            done -> {});
            assertArrayEquals(scores[1], scores[0]);
            List<int[]> tooLong = List.of(new int[25], new int[1]);
            String message =
                    assertThrows(
                                    IllegalArgumentException.class,
                                    () ->
                                            ChoiceEvaluation.scores(
                                                    model,
                                                    List.of(
                                                            new ChoiceQuestion(
                                                                    "t", end, tooLong, 0)),
                                                    done -> {}))
                            .getMessage();
            assertTrue(message.contains("25 tokens"), message);
            assertThrows(
                    IllegalArgumentException.class,
                    () -> ChoiceEvaluation.of(model, List.of(), 0, done -> {}));
        }
    }

    @Test
    void question_incomplete_refused() {
        List<int[]> two = List.of(new int[] {1}, new int[] {2});
        int[] one = {1};
        assertRefused("name of its task", () -> new ChoiceQuestion(" ", one, two, 0));
        assertRefused("context", () -> new ChoiceQuestion("t", new int[0], two, 0));
        assertRefused("two choices", () -> new ChoiceQuestion("t", one, List.of(one), 0));
        assertRefused("answer is 2", () -> new ChoiceQuestion("t", one, two, 2));
        assertRefused(
                "Choice 1 is empty",
                () -> new ChoiceQuestion("t", one, List.of(one, new int[0]), 0));
    }

    private static void assertRefused(
            String part, org.junit.jupiter.api.function.Executable action) {
        String message = assertThrows(IllegalArgumentException.class, action).getMessage();
        assertTrue(message.contains(part), message);
    }
}
