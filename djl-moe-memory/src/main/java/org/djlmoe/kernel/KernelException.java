package org.djlmoe.kernel;

/** A kernel is missing, does not compile, or failed while it ran. */
public final class KernelException extends RuntimeException {

    private static final long serialVersionUID = 1L;

    /**
     * Creates the exception.
     *
     * @param message what failed and what to do about it
     */
    public KernelException(String message) {
        super(message);
    }

    /**
     * Creates the exception.
     *
     * @param message what failed
     * @param cause the engine's own error
     */
    public KernelException(String message, Throwable cause) {
        super(message, cause);
    }
}
