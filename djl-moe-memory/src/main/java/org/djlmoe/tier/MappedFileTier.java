package org.djlmoe.tier;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.NDScope;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.kernel.TorchKernels;

/**
 * State in files on a real disk, one file an array, mapped so that it can be used where it lies.
 *
 * <p>The idea: pages of a mapped file are no memory of the process that it must keep. The operating
 * system holds them as long as nobody else needs the room, and drops and reads them again when
 * memory is short. While all are held, nothing is read or written here and a use costs what it
 * costs in memory. When some were dropped ({@link #isInMemory} tells), {@link #read} and {@link
 * #write} move an array at the speed of the disk, where each page of a mapping would be a fault.
 *
 * <p>A file is filled when it is reserved, so that a disk that is full is an error then and not a
 * crash in the middle of an update, and used for ever. It has no name from then on (where the
 * operating system allows it, as Linux does): nothing is left behind however the process ends.
 *
 * <p>When not to use it: on file systems that write to another place each time, such as btrfs with
 * snapshots, a full disk can still end the process; and the state of a run that fits memory gains
 * nothing.
 */
public final class MappedFileTier implements Tier {

    private static final TorchKernels KERNELS =
            TorchKernels.load(MappedFileTier.class, "mapped.py");

    /** Direct memory is freed late, so there is one for all. */
    private static final ByteBuffer ZEROS = ByteBuffer.allocateDirect(1 << 16);

    /** Bytes moved at a time; DJL's buffers end at 2 GiB. */
    private static final long PIECE = 1 << 30;

    /** One array: its file, open for as long as it is mapped. */
    private static final class Region {

        final NDArray array;
        final FileChannel file;
        final PageAdvice pages;

        /** Where the system could not remove the name of an open file. */
        final Path remains;

        /** Whether the pages were written since, which makes the next change of each a fault. */
        volatile boolean clean;

        Region(NDArray array, FileChannel file, Path remains) {
            this.array = array;
            this.file = file;
            this.remains = remains;
            pages = new PageAdvice(array);
        }
    }

    private final Path directory;
    private final Map<String, Region> regions = new LinkedHashMap<>();
    private NDManager manager;
    private long bytes;
    private boolean closed;

    /**
     * Creates a tier without files yet.
     *
     * @param directory an existing folder on a disk
     * @throws IllegalArgumentException if it does not exist, is not writable or lies in memory
     */
    public MappedFileTier(Path directory) {
        FileTier.requireFolder(directory);
        this.directory = directory;
    }

    /**
     * Reserves a file of zeros and maps it.
     *
     * @throws java.io.UncheckedIOException if there is no room for it, or the folder is gone
     * @throws IllegalStateException if the tier is closed
     */
    @Override
    public synchronized NDArray allocate(String name, long elements) {
        if (closed) {
            throw new IllegalStateException("The file tier in " + directory + " is closed");
        }
        if (regions.containsKey(name)) {
            throw new IllegalArgumentException(
                    "This tier holds " + name + " already: give each optimizer a tier of its own");
        }
        Region region;
        try {
            region = create(elements);
        } catch (IOException e) {
            throw new UncheckedIOException(
                    "Cannot make a file of "
                            + elements * Float.BYTES
                            + " bytes for "
                            + name
                            + " in "
                            + directory
                            + ": free room there or name another directory with optFileTier",
                    e);
        }
        regions.put(name, region);
        bytes += elements * Float.BYTES;
        return region.array;
    }

    private Region create(long elements) throws IOException {
        long size = elements * Float.BYTES;
        long room = Files.getFileStore(directory).getUsableSpace();
        if (room < size) {
            throw new IOException("There is room for " + room + " bytes");
        }
        Path path = FileTier.newFile(directory);
        FileChannel file =
                FileChannel.open(
                        path,
                        StandardOpenOption.CREATE_NEW,
                        StandardOpenOption.READ,
                        StandardOpenOption.WRITE);
        boolean done = false;
        try {
            // Room that was never written could be missing when a mapped page needs it.
            ByteBuffer zeros = ZEROS.duplicate();
            for (long written = 0; written < size; ) {
                zeros.clear().limit((int) Math.min(zeros.capacity(), size - written));
                written += file.write(zeros, written);
            }
            if (manager == null) {
                manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
            }
            NDArray array = KERNELS.call(manager, "map", path.toString(), elements).head();
            NDScope.unregister(array);
            done = true;
            return new Region(array, file, unlinked(path) ? null : path);
        } finally {
            if (!done) {
                file.close();
                Files.deleteIfExists(path);
            }
        }
    }

    private static boolean unlinked(Path path) {
        try {
            Files.delete(path);
            return true;
        } catch (IOException e) {
            path.toFile().deleteOnExit();
            return false;
        }
    }

    private synchronized Region region(String name) {
        Region region = regions.get(name);
        if (region == null) {
            throw new IllegalArgumentException("There is no " + name + " in this tier");
        }
        return region;
    }

    @Override
    public boolean isBackedByFiles() {
        return true;
    }

    @Override
    public boolean isInMemory(String name) {
        return region(name).pages.isResident();
    }

    @Override
    public void readAhead(String name) {
        Region region = region(name);
        if (region.clean || !region.pages.isResident()) {
            region.pages.populate();
            region.clean = false;
        }
    }

    @Override
    public void read(String name, NDArray target) {
        Region region = region(name);
        try (NDScope scope = new NDScope()) {
            FileTier.transfer(target, region.array.size() * Float.BYTES, PIECE, region.file::read);
        } catch (IOException e) {
            throw new UncheckedIOException(
                    "Cannot read the optimizer's state from " + directory, e);
        }
    }

    @Override
    public void write(String name, NDArray source) {
        Region region = region(name);
        try (NDScope scope = new NDScope()) {
            FileTier.transfer(source, region.array.size() * Float.BYTES, PIECE, region.file::write);
        } catch (IOException e) {
            throw failure(e);
        }
        flush(region);
    }

    private UncheckedIOException failure(IOException e) {
        return new UncheckedIOException("Cannot write the optimizer's state to " + directory, e);
    }

    private void flush(Region region) {
        try {
            region.file.force(false);
            region.clean = true;
        } catch (IOException e) {
            throw failure(e);
        }
    }

    /**
     * Writes all changes to the disk. Nothing needs this to be right: it is for measuring, and for
     * giving the operating system clean pages before something else needs much memory.
     *
     * @throws java.io.UncheckedIOException if they cannot be written
     */
    public synchronized void flush() {
        regions.values().forEach(this::flush);
    }

    /**
     * Writes all changes and drops pages from memory. The next use reads them. Linux may keep pages
     * that were used a moment ago.
     *
     * @return whether some of each array are gone, which not every operating system allows
     */
    public synchronized boolean drop() {
        flush();
        boolean gone = true;
        for (Region region : regions.values()) {
            gone &= region.pages.drop();
        }
        return gone;
    }

    @Override
    public synchronized void free(String name) {
        Region region = regions.remove(name);
        if (region != null) {
            bytes -= region.array.size() * Float.BYTES;
            release(region);
        }
    }

    @Override
    public synchronized long bytes() {
        return bytes;
    }

    private void release(Region region) {
        region.array.close();
        try {
            region.file.close();
            if (region.remains != null) {
                Files.deleteIfExists(region.remains);
            }
        } catch (IOException e) {
            throw new UncheckedIOException("Cannot close a file in " + directory, e);
        }
    }

    @Override
    public synchronized void close() {
        closed = true;
        regions.values().forEach(this::release);
        regions.clear();
        bytes = 0;
        if (manager != null) {
            manager.close();
            manager = null;
        }
    }
}
