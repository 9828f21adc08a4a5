package org.djlmoe.training;

import java.util.ArrayList;
import java.util.Collections;
import java.util.List;

/**
 * A question with several answers to choose from, in tokens.
 *
 * @param task the name of the task it belongs to
 * @param context what comes before the answer, at least one token; copied
 * @param choices the possible answers, at least two, each at least one token; copied
 * @param answer which of them is right, from 0
 */
public record ChoiceQuestion(String task, int[] context, List<int[]> choices, int answer) {

    /**
     * Copies and checks.
     *
     * @throws IllegalArgumentException if something is missing, empty or out of range
     */
    public ChoiceQuestion {
        if (task == null || task.isBlank()) {
            throw new IllegalArgumentException("A question needs the name of its task");
        }
        if (context.length == 0) {
            throw new IllegalArgumentException(
                    "A question needs a context of at least one token, such as end of text");
        }
        if (choices.size() < 2) {
            throw new IllegalArgumentException(
                    "A question needs two choices or more, not " + choices.size());
        }
        if (answer < 0 || answer >= choices.size()) {
            throw new IllegalArgumentException(
                    "The answer is %d: it must be from 0 to %d"
                            .formatted(answer, choices.size() - 1));
        }
        List<int[]> copies = new ArrayList<>();
        for (int[] choice : choices) {
            if (choice.length == 0) {
                throw new IllegalArgumentException(
                        "Choice " + copies.size() + " is empty: a choice has a token or more");
            }
            copies.add(choice.clone());
        }
        context = context.clone();
        choices = Collections.unmodifiableList(copies);
    }
}
