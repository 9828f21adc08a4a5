package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.InvalidPathException;
import java.nio.file.Path;
import org.djlmoe.examples.text.Language;

/** Checks of arguments, with errors for people. */
final class Arguments {

    private Arguments() {}

    static void positive(String option, int value) {
        if (value < 1) {
            throw new UserError(option + " must be at least 1, not " + value);
        }
    }

    static void positive(String option, double value) {
        if (!(value > 0) || Double.isInfinite(value)) {
            throw new UserError(option + " must be a finite number above 0, not " + value);
        }
    }

    /** Fails unless a mask of that many experts a layer has enough for one token. */
    static void kept(int kept, int topK, int experts) {
        if (kept < topK || kept > experts) {
            throw new UserError(
                    "--kept must be from "
                            + topK
                            + ", the experts that a token uses, to "
                            + experts
                            + ", all of a layer, not "
                            + kept);
        }
    }

    /** Fails unless a cache of that size holds what one token uses at once. */
    static void cache(int size, int topK) {
        if (size < topK) {
            throw new UserError(
                    "--cache "
                            + size
                            + " is too small: a token uses "
                            + topK
                            + " experts of a layer at once; take "
                            + topK
                            + " or more");
        }
    }

    /**
     * Makes sure that a file can be written, without writing it; its directory is made if needed.
     *
     * @return the file's absolute path
     */
    static Path outputFile(String option, String target) {
        Path file;
        try {
            file = Path.of(target).toAbsolutePath();
        } catch (InvalidPathException e) {
            throw new UserError(option + ": " + target + " is no file name", e);
        }
        if (Files.isDirectory(file)) {
            throw new UserError(option + ": " + target + " is a directory; name a file in it");
        }
        Path directory = file.getParent();
        if (directory == null) {
            throw new UserError(option + ": " + target + " is no file name");
        }
        try {
            Files.createDirectories(directory);
        } catch (IOException e) {
            throw new UserError(option + ": cannot make the directory " + directory, e);
        }
        if (!Files.isWritable(directory)) {
            throw new UserError(option + ": no permission to write to " + directory);
        }
        return file;
    }

    /** Fails unless a file is there to be read. */
    static void inputFile(String option, Path file) {
        if (Files.isDirectory(file)) {
            throw new UserError(option + ": " + file + " is a directory; name a file");
        }
        if (!Files.exists(file)) {
            throw new UserError(option + ": there is no file " + file);
        }
        if (!Files.isReadable(file)) {
            throw new UserError(option + ": no permission to read " + file);
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
