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

    /** Fails unless a cache of that size holds what one token uses at once, and can be filled. */
    static void cache(String option, int size, int topK, int experts) {
        if (size < topK) {
            throw new UserError(
                    option
                            + " "
                            + size
                            + " is too small: a token uses "
                            + topK
                            + " experts of a layer at once; take "
                            + topK
                            + " or more");
        }
        if (size > experts) {
            throw new UserError(
                    option
                            + " "
                            + size
                            + " is too large: a layer has "
                            + experts
                            + " experts; take "
                            + experts
                            + " or fewer");
        }
    }

    /**
     * Makes sure that a file can be written, without writing it; its directory is made if needed.
     *
     * @return the file's absolute path
     */
    static Path outputFile(String option, String target) {
        Path file = fileName(option, target);
        try {
            Files.createDirectories(file.getParent());
        } catch (IOException e) {
            throw new UserError(option + ": cannot make the directory " + file.getParent(), e);
        }
        return writable(option, file);
    }

    /**
     * Makes sure that a file can be written into a directory that is there.
     *
     * @return the file's absolute path
     */
    static Path outputFileInPlace(String option, String target) {
        Path file = fileName(option, target);
        if (!Files.isDirectory(file.getParent())) {
            throw new UserError(
                    option
                            + ": there is no directory "
                            + file.getParent()
                            + "; make it or name a file elsewhere");
        }
        return writable(option, file);
    }

    /** Returns where a file lies, whatever links lead there and whether or not it exists. */
    static Path place(Path file) {
        Path absolute = file.toAbsolutePath().normalize();
        Path directory = absolute.getParent();
        while (directory != null) {
            try {
                return directory.toRealPath().resolve(directory.relativize(absolute));
            } catch (IOException e) {
                directory = directory.getParent();
            }
        }
        return absolute;
    }

    /** Fails if a file to be written is another one that the command reads or writes. */
    static void distinct(String option, Path file, String other, Path taken) {
        if (place(file).equals(place(taken))) {
            throw new UserError(
                    option + " and " + other + " are the same file, " + file + ": name two");
        }
    }

    /** Fails if a file to be written is one of the checkpoint in a folder. */
    static void outside(String option, Path file, Path checkpoint) {
        Path place = place(file);
        if (place.getParent().equals(place(checkpoint.resolve("file")).getParent())
                && CheckpointFolder.holds(place.getFileName().toString())) {
            throw new UserError(
                    option
                            + ": "
                            + file
                            + " is a file of the model in "
                            + checkpoint
                            + ", which it would replace; name another file");
        }
    }

    private static Path fileName(String option, String target) {
        Path file;
        try {
            file = Path.of(target).toAbsolutePath();
        } catch (InvalidPathException e) {
            throw new UserError(option + ": " + target + " is no file name", e);
        }
        if (Files.isDirectory(file)) {
            throw new UserError(option + ": " + target + " is a directory; name a file in it");
        }
        if (file.getParent() == null) {
            throw new UserError(option + ": " + target + " is no file name");
        }
        return file;
    }

    private static Path writable(String option, Path file) {
        if (Files.exists(file) && !Files.isRegularFile(file)) {
            // A device or a pipe is written to, not replaced.
            if (!Files.isWritable(file)) {
                throw new UserError(option + ": no permission to write to " + file);
            }
            return file;
        }
        if (!Files.isWritable(file.getParent())) {
            throw new UserError(option + ": no permission to write to " + file.getParent());
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
