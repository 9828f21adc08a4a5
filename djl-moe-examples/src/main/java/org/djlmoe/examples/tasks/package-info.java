/**
 * Small multiple-choice tasks: held-out transcripts come in, questions go out, as JSON lines or as
 * tokens for {@link org.djlmoe.training.ChoiceEvaluation}.
 */
package org.djlmoe.examples.tasks;
