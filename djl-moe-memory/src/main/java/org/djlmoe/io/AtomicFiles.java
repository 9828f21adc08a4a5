package org.djlmoe.io;

import java.io.IOException;
import java.io.OutputStream;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.AtomicMoveNotSupportedException;
import java.nio.file.FileSystemException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.nio.file.StandardOpenOption;

/**
 * Files that appear whole or not at all: written under a temporary name in the same folder, forced
 * to the disk, then renamed over the final name in one step.
 */
public final class AtomicFiles {

    private AtomicFiles() {}

    /** Writes a file's contents. */
    @FunctionalInterface
    public interface Contents {

        /**
         * Writes everything.
         *
         * @param out takes the contents, unbuffered; left open
         * @throws IOException if writing fails
         */
        void writeTo(OutputStream out) throws IOException;
    }

    /**
     * Writes a file in one step. What is not a regular file, such as a device or a pipe, is written
     * to as it is; a link is followed.
     *
     * @param file the file, replaced if it exists
     * @param contents writes what is to be in it
     * @throws IOException if writing fails, naming the file; then the old file is untouched
     */
    public static void write(Path file, Contents contents) throws IOException {
        Path target = Files.exists(file) ? file.toRealPath() : file;
        if (Files.exists(target) && !Files.isRegularFile(target)) {
            try (FileChannel channel = FileChannel.open(target, StandardOpenOption.WRITE)) {
                contents.writeTo(Channels.newOutputStream(target, channel));
            }
            return;
        }
        Path temporary = temporaryFor(target);
        try {
            try (FileChannel channel = FileChannel.open(temporary, StandardOpenOption.WRITE)) {
                contents.writeTo(Channels.newOutputStream(target, channel));
                Channels.force(target, channel);
            }
            publish(temporary, target);
        } finally {
            Files.deleteIfExists(temporary);
        }
    }

    /**
     * Writes a small text file (UTF-8) in one step.
     *
     * @param file the file, replaced if it exists
     * @param text its contents
     * @throws IOException if writing fails; then the old file is untouched
     */
    public static void writeString(Path file, String text) throws IOException {
        write(file, out -> out.write(text.getBytes(StandardCharsets.UTF_8)));
    }

    /** Creates an empty file beside {@code file}, hidden and of a name that no reader looks for. */
    static Path temporaryFor(Path file) throws IOException {
        Path absolute = file.toAbsolutePath();
        Path temporary =
                absolute.resolveSibling(
                        "."
                                + absolute.getFileName()
                                + "."
                                + ProcessHandle.current().pid()
                                + ".tmp");
        // Not Files.createTempFile: it would make the final file readable by its owner alone.
        Files.deleteIfExists(temporary);
        try {
            return Files.createFile(temporary);
        } catch (FileSystemException e) {
            // Those with a class of their own say what is wrong; this one is a full disk.
            throw e.getClass() == FileSystemException.class ? Channels.failure(file, e) : e;
        }
    }

    /** Renames a finished temporary file to its final name. */
    static void publish(Path temporary, Path file) throws IOException {
        Path target = file.toAbsolutePath();
        try {
            Files.move(
                    temporary,
                    target,
                    StandardCopyOption.ATOMIC_MOVE,
                    StandardCopyOption.REPLACE_EXISTING);
        } catch (AtomicMoveNotSupportedException e) {
            Files.move(temporary, target, StandardCopyOption.REPLACE_EXISTING);
        }
        forceFolder(target.getParent());
    }

    /** Has a rename that happened in a folder survive a loss of power. */
    static void forceFolder(Path folder) {
        try (FileChannel channel = FileChannel.open(folder, StandardOpenOption.READ)) {
            channel.force(true);
        } catch (IOException e) {
            // Some systems cannot force a folder; the rename itself has happened.
        }
    }
}
