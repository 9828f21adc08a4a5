package org.djlmoe.io;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.List;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class AtomicFoldersTest {

    @TempDir Path parent;

    private List<String> names() throws IOException {
        try (Stream<Path> entries = Files.list(parent)) {
            return entries.map(entry -> entry.getFileName().toString()).sorted().toList();
        }
    }

    @Test
    void write_new_hasItsNameOnlyWhenItIsComplete() throws IOException {
        Path folder = parent.resolve("a");
        AtomicFolders.write(
                folder,
                partial -> {
                    AtomicFiles.writeString(partial.resolve("one"), "1");
                    assertFalse(Files.exists(folder));
                    Files.createDirectory(partial.resolve("in"));
                    AtomicFiles.writeString(partial.resolve("in").resolve("two"), "2");
                });
        assertEquals("1", Files.readString(folder.resolve("one")));
        assertEquals("2", Files.readString(folder.resolve("in").resolve("two")));
        assertEquals(List.of("a"), names());
    }

    @Test
    void write_existingFolder_isRefusedAndUntouched() throws IOException {
        Path folder = Files.createDirectory(parent.resolve("a"));
        Files.writeString(folder.resolve("one"), "1");
        assertThrows(
                FileAlreadyExistsException.class, () -> AtomicFolders.write(folder, partial -> {}));
        assertEquals("1", Files.readString(folder.resolve("one")));
        assertEquals(List.of("a"), names());
    }

    @Test
    void write_contentsFail_nothingIsLeft() throws IOException {
        IOException full = new IOException("disk full");
        IOException e =
                assertThrows(
                        IOException.class,
                        () ->
                                AtomicFolders.write(
                                        parent.resolve("a"),
                                        partial -> {
                                            Files.writeString(partial.resolve("one"), "1");
                                            throw full;
                                        }));
        assertEquals(full, e);
        assertEquals(List.of(), names());
    }

    /** A link in a folder goes; what it points to stays. */
    @Test
    void delete_folderWithALink_deletesNoOtherFiles() throws IOException {
        Path other = Files.createDirectory(parent.resolve("other"));
        Files.writeString(other.resolve("kept"), "1");
        Path folder = Files.createDirectory(parent.resolve("a"));
        Files.createSymbolicLink(folder.resolve("link"), other);
        AtomicFolders.delete(folder);
        assertEquals(List.of("other"), names());
        assertTrue(Files.exists(other.resolve("kept")));
        assertThrows(NoSuchFileException.class, () -> AtomicFolders.delete(folder));
    }

    @Test
    void deleteLeftovers_ofAKilledProcess_leavesEverythingElse() throws IOException {
        for (String name : List.of(".a.partial", "a.partial", ".hidden", "b")) {
            Path folder = Files.createDirectory(parent.resolve(name));
            Files.writeString(folder.resolve("one"), "1");
        }
        AtomicFolders.deleteLeftovers(parent);
        assertEquals(List.of(".hidden", "a.partial", "b"), names());
        // A leftover of the same name is no hindrance either.
        Files.createDirectory(parent.resolve(".c.partial"));
        Files.writeString(parent.resolve(".c.partial").resolve("old"), "1");
        AtomicFolders.write(parent.resolve("c"), partial -> {});
        assertFalse(Files.exists(parent.resolve("c").resolve("old")));
    }
}
