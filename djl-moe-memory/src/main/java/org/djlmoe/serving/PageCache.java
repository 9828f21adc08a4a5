package org.djlmoe.serving;

import com.sun.jna.Library;
import com.sun.jna.Native;
import com.sun.jna.NativeLong;
import com.sun.jna.Platform;
import java.io.IOException;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;

/** Makes the operating system forget what it has read of a file (Linux, posix_fadvise). */
final class PageCache implements AutoCloseable {

    private static final int READ_ONLY = 0;
    private static final int DONT_NEED = 4;
    private static final int PAGE = 4096;

    private final Path file;
    private final CLibrary c;
    private final int descriptor;

    private PageCache(Path file, CLibrary c, int descriptor) {
        this.file = file;
        this.c = c;
        this.descriptor = descriptor;
    }

    /** The functions of the C library; named as there. */
    interface CLibrary extends Library {
        int open(String path, int flags);

        int close(int descriptor);

        int posix_fadvise(int descriptor, NativeLong offset, NativeLong length, int advice);
    }

    /**
     * Opens a file, if this system can drop its pages and does.
     *
     * @return null if it cannot
     */
    static PageCache open(Path file) throws IOException {
        if (!Platform.isLinux() || !Platform.is64Bit()) {
            return null;
        }
        CLibrary c;
        try {
            c = Native.load("c", CLibrary.class);
        } catch (UnsatisfiedLinkError e) {
            return null;
        }
        int descriptor = c.open(file.toAbsolutePath().toString(), READ_ONLY);
        if (descriptor < 0) {
            return null;
        }
        PageCache cache = new PageCache(file, c, descriptor);
        boolean works = false;
        try {
            // Some file systems take the advice and keep the pages.
            works = cache.drop() && !cache.holdsSome();
        } finally {
            if (!works) {
                cache.close();
            }
        }
        return works ? cache : null;
    }

    /** Drops all clean pages of the file; returns whether the system took the advice. */
    boolean drop() {
        NativeLong all = new NativeLong(0);
        return c.posix_fadvise(descriptor, all, all, DONT_NEED) == 0;
    }

    private boolean holdsSome() throws IOException {
        try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ)) {
            long size = channel.size();
            for (int i = 0; i < 4; i++) {
                long at = size / 4 * i / PAGE * PAGE;
                long length = Math.min(PAGE, size - at);
                if (length > 0
                        && channel.map(FileChannel.MapMode.READ_ONLY, at, length).isLoaded()) {
                    return true;
                }
            }
            return false;
        }
    }

    @Override
    public void close() {
        c.close(descriptor);
    }
}
