package org.djlmoe.parallel;

/** A group of processes cannot go on: a rank failed, left, or called something else. */
public class ProcessGroupException extends RuntimeException {

    private static final long serialVersionUID = 1L;

    /**
     * Creates the exception.
     *
     * @param message which rank, and what happened
     * @param cause the failure of that rank, or null
     */
    public ProcessGroupException(String message, Throwable cause) {
        super(message, cause);
    }
}
