package org.djlmoe.io;

import java.io.IOException;
import java.nio.file.Path;

/** A safetensors file or checkpoint folder that breaks the format; the message names the file. */
public class SafetensorsException extends IOException {

    private static final long serialVersionUID = 1L;

    /**
     * Creates the error.
     *
     * @param file the offending file or folder
     * @param detail what is wrong with it
     */
    public SafetensorsException(Path file, String detail) {
        super(file + ": " + detail);
    }

    /**
     * Creates the error with its cause.
     *
     * @param file the offending file or folder
     * @param detail what is wrong with it
     * @param cause what revealed it
     */
    public SafetensorsException(Path file, String detail, Throwable cause) {
        super(file + ": " + detail, cause);
    }
}
