package org.djlmoe.examples.cli;

import org.djlmoe.examples.text.Language;

/** Checks of arguments, with errors for people. */
final class Arguments {

    private Arguments() {}

    static void positive(String option, int value) {
        if (value < 1) {
            throw new UserError(option + " must be at least 1, not " + value);
        }
    }

    /** Returns the language of a code or name, or null for null. */
    static Language language(String text) {
        if (text == null) {
            return null;
        }
        try {
            return Language.of(text);
        } catch (IllegalArgumentException e) {
            throw new UserError("--language: " + e.getMessage(), e);
        }
    }
}
