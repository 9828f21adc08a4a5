package org.djlmoe.examples.bench;

/** A case failed. */
public final class BenchException extends RuntimeException {

    private static final long serialVersionUID = 1L;

    /**
     * Creates the exception.
     *
     * @param message which case, and what it said last
     * @param cause how it was noticed, or null
     */
    public BenchException(String message, Throwable cause) {
        super(message, cause);
    }
}
