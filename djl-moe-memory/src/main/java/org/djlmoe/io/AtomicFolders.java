package org.djlmoe.io;

import java.io.IOException;
import java.nio.file.DirectoryStream;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.LinkOption;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;

/**
 * Folders that appear whole or not at all, and go in the same way: filled under a hidden temporary
 * name beside the final one, then renamed in one step; renamed to a hidden name, then deleted.
 *
 * <p>A process that is killed meanwhile leaves a hidden folder behind, which {@link
 * #deleteLeftovers} deletes. Only one process at a time may work on the folders of one parent.
 */
public final class AtomicFolders {

    private static final String PREFIX = ".";
    private static final String SUFFIX = ".partial";

    private AtomicFolders() {}

    /** Fills a folder. */
    @FunctionalInterface
    public interface Contents {

        /**
         * Writes all files, each forced to the disk, as {@link AtomicFiles} and the writers of this
         * package do.
         *
         * @param folder an empty folder
         * @throws IOException if writing fails
         */
        void writeTo(Path folder) throws IOException;
    }

    /**
     * Makes a folder with its files in one step.
     *
     * @param folder the folder, not there yet; its parent must exist
     * @param contents fills it
     * @throws FileAlreadyExistsException if the folder exists
     * @throws IOException if writing fails; then nothing is left
     */
    public static void write(Path folder, Contents contents) throws IOException {
        Path target = folder.toAbsolutePath();
        if (Files.exists(target, LinkOption.NOFOLLOW_LINKS)) {
            throw new FileAlreadyExistsException(target.toString());
        }
        Path partial = partial(target);
        deleteTree(partial);
        Files.createDirectory(partial);
        boolean done = false;
        try {
            contents.writeTo(partial);
            AtomicFiles.forceFolder(partial);
            Files.move(partial, target, StandardCopyOption.ATOMIC_MOVE);
            done = true;
        } finally {
            if (!done) {
                deleteTree(partial);
            }
        }
        AtomicFiles.forceFolder(target.getParent());
    }

    /**
     * Deletes a folder with all that is in it; from the first moment it no longer has its name.
     *
     * @param folder the folder
     * @throws IOException if that fails
     */
    public static void delete(Path folder) throws IOException {
        Path target = folder.toAbsolutePath();
        Path partial = partial(target);
        deleteTree(partial);
        Files.move(target, partial, StandardCopyOption.ATOMIC_MOVE);
        deleteTree(partial);
    }

    /**
     * Deletes what a killed process has left half-written or half-deleted.
     *
     * @param parent the folder of the folders
     * @throws IOException if that fails
     */
    public static void deleteLeftovers(Path parent) throws IOException {
        try (DirectoryStream<Path> entries =
                Files.newDirectoryStream(parent, PREFIX + "*" + SUFFIX)) {
            for (Path entry : entries) {
                deleteTree(entry);
            }
        }
    }

    private static Path partial(Path folder) {
        return folder.resolveSibling(PREFIX + folder.getFileName() + SUFFIX);
    }

    private static void deleteTree(Path root) throws IOException {
        if (Files.isDirectory(root, LinkOption.NOFOLLOW_LINKS)) {
            try (DirectoryStream<Path> entries = Files.newDirectoryStream(root)) {
                for (Path entry : entries) {
                    deleteTree(entry);
                }
            }
        }
        Files.deleteIfExists(root);
    }
}
