package org.djlmoe.checkpoint;

import java.io.IOException;

/** A checkpoint that does not fit the model; the message names file and tensor. */
public class CheckpointException extends IOException {

    private static final long serialVersionUID = 1L;

    /**
     * Creates the error.
     *
     * @param message what does not fit, naming file and tensor
     */
    public CheckpointException(String message) {
        super(message);
    }
}
