package org.djlmoe.tier;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.index.NDIndex;
import com.sun.jna.Library;
import com.sun.jna.Native;
import com.sun.jna.NativeLong;
import com.sun.jna.Platform;
import com.sun.jna.Pointer;
import java.nio.ByteBuffer;

/**
 * What a program can tell, and ask, the operating system about mapped pages. On systems without
 * {@code madvise} nothing is told, and all pages count as being in memory.
 */
final class PageAdvice {

    private static final int WILL_NEED = 3;
    private static final int PAGE_OUT = 21;
    private static final int POPULATE_WRITE = 23;

    /** Pages are asked for in pieces, since Linux cuts a larger request short. */
    private static final long PIECE = 1L << 20;

    private static final int DROPS = 20;

    /** The C library; the names are its own. */
    private interface LibC extends Library {

        int madvise(Pointer address, NativeLong length, int advice);

        int mincore(Pointer address, NativeLong length, byte[] pages);

        int getpagesize();
    }

    private static final LibC LIB_C = load();

    /** 4 KiB on most machines, up to 64 KiB on some. */
    private static final long PAGE = LIB_C == null ? 1 : LIB_C.getpagesize();

    private final Pointer address;
    private final long bytes;

    /**
     * Looks after the pages of a mapped array, which must outlive this.
     *
     * @param mapped a contiguous array that begins at a page
     */
    PageAdvice(NDArray mapped) {
        bytes = mapped.size() * Float.BYTES;
        if (LIB_C == null) {
            address = null;
            return;
        }
        try (NDScope scope = new NDScope()) {
            // A buffer ends at 2 GiB, an address does not.
            NDArray head = mapped.get(new NDIndex().addSliceDim(0, 1));
            ByteBuffer buffer = head.toByteBuffer(true);
            address = buffer.isDirect() ? Native.getDirectBufferPointer(buffer) : null;
        }
    }

    private static LibC load() {
        if (!Platform.isLinux()) {
            return null;
        }
        try {
            return Native.load("c", LibC.class);
        } catch (UnsatisfiedLinkError e) {
            return null;
        }
    }

    /** Returns whether all pages are in memory, or it is not known. */
    boolean isResident() {
        if (address == null) {
            return true;
        }
        byte[] pages = new byte[(int) Math.min((bytes + PAGE - 1) / PAGE, PIECE)];
        for (long start = 0; start < bytes; start += pages.length * PAGE) {
            long length = Math.min(bytes - start, pages.length * PAGE);
            if (LIB_C.mincore(address.share(start), new NativeLong(length), pages) != 0) {
                return true;
            }
            for (int i = 0; i < (length + PAGE - 1) / PAGE; i++) {
                if ((pages[i] & 1) == 0) {
                    return false;
                }
            }
        }
        return true;
    }

    /** Reads the pages and makes them writable, so that the next use has no faults. */
    void populate() {
        if (address == null) {
            return;
        }
        for (long start = 0; start < bytes; start += PIECE) {
            long next = start + PIECE;
            if (next < bytes) {
                advise(next, PIECE, WILL_NEED);
            }
            advise(start, PIECE, POPULATE_WRITE);
        }
    }

    /**
     * Drops the pages from memory, where the system can. Those that another processor has just used
     * escape it, so it takes some tries.
     *
     * @return whether some are gone
     */
    boolean drop() {
        for (int tries = 0; address != null && tries < DROPS; tries++) {
            advise(0, bytes, PAGE_OUT);
            if (!isResident()) {
                return true;
            }
            Thread.yield();
        }
        return false;
    }

    private void advise(long start, long length, int advice) {
        // Advice: where it is unknown, the next use reads the pages just the same.
        LIB_C.madvise(
                address.share(start), new NativeLong(Math.min(length, bytes - start)), advice);
    }
}
