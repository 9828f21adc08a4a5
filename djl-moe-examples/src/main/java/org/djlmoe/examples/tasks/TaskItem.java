package org.djlmoe.examples.tasks;

import java.util.List;

/**
 * A multiple-choice question as text. A choice follows the context directly: where a space belongs
 * between them, the choice begins with it.
 *
 * @param task the name of the task
 * @param context what comes before the answer; may be empty
 * @param choices the possible answers, two or more, none empty
 * @param answer which of them is right, from 0
 */
public record TaskItem(String task, String context, List<String> choices, int answer) {

    /**
     * Copies and checks.
     *
     * @throws IllegalArgumentException naming the field that is missing or out of range
     */
    public TaskItem {
        if (task == null || task.isBlank()) {
            throw new IllegalArgumentException("\"task\" is missing or blank");
        }
        if (context == null) {
            throw new IllegalArgumentException("\"context\" is missing");
        }
        if (choices == null || choices.size() < 2) {
            throw new IllegalArgumentException("\"choices\" must list two texts or more");
        }
        for (int c = 0; c < choices.size(); c++) {
            if (choices.get(c) == null || choices.get(c).isEmpty()) {
                throw new IllegalArgumentException("\"choices\"[" + c + "] is missing or empty");
            }
        }
        choices = List.copyOf(choices);
        if (answer < 0 || answer >= choices.size()) {
            throw new IllegalArgumentException(
                    "\"answer\" is %d: it must be from 0 to %d"
                            .formatted(answer, choices.size() - 1));
        }
    }
}
