package org.djlmoe.maskcoft;

/** Checks of settings. */
final class Checks {

    private Checks() {}

    /** Refuses a setting, with a message that names it. */
    static void require(boolean holds, String message, Object... args) {
        if (!holds) {
            throw new IllegalArgumentException(message.formatted(args));
        }
    }
}
