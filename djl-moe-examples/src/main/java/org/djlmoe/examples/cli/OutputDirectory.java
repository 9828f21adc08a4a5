package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import picocli.CommandLine.Option;

/** The option {@code --out DIR} of subcommands that write several files; a mixin. */
public final class OutputDirectory {
    @Option(
            names = "--out",
            paramLabel = "DIR",
            description =
                    "Directory for what the command writes; made if it does not exist (default:"
                            + " runs/${COMMAND-NAME}).")
    private Path directory;

    /** Returns whether the user named a directory. */
    public boolean isSet() {
        return directory != null;
    }

    /**
     * Returns the directory, made if it was not there.
     *
     * @param otherwise the directory to take when the user named none
     * @throws UserError if it cannot be made or written to
     */
    public Path create(Path otherwise) {
        Path chosen = directory == null ? otherwise : directory;
        try {
            Files.createDirectories(chosen);
        } catch (IOException e) {
            throw new UserError("--out: cannot make the directory " + chosen, e);
        }
        if (!Files.isWritable(chosen)) {
            throw new UserError("--out: no permission to write to " + chosen);
        }
        return chosen;
    }
}
