package org.djlmoe.examples.cli;

/** A mistake of the user's: ends the command with {@link ExitCodes#USAGE} and the message alone. */
public final class UserError extends RuntimeException {
    private static final long serialVersionUID = 1L;

    /**
     * Creates the error.
     *
     * @param message what is wrong and what to do about it, in one line
     */
    public UserError(String message) {
        super(message);
    }

    /**
     * Creates the error.
     *
     * @param message what is wrong and what to do about it, in one line
     * @param cause where it was noticed
     */
    public UserError(String message, Throwable cause) {
        super(message, cause);
    }
}
