package org.djlmoe.tier;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDScope;
import ai.djl.ndarray.index.NDIndex;
import java.io.EOFException;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.LinkedHashSet;
import java.util.Locale;
import java.util.Set;
import java.util.concurrent.atomic.AtomicLong;

/**
 * Slots in files on a real disk, one file a slot.
 *
 * <p>Bytes go straight between a tensor's memory and the file, at positions: a mapping would count
 * as memory of the process, and a buffer in between would be memory. A file has no name from the
 * moment it is opened (where the operating system allows it, as Linux does), so that nothing is
 * left behind however the process ends.
 *
 * <p>An interrupted thread must not use it: Java closes the file under its hands, which is reported
 * as an error.
 */
public final class FileTier implements SlotTier {

    /** File systems that keep their files in memory. */
    private static final Set<String> IN_MEMORY = Set.of("tmpfs", "ramfs", "devtmpfs", "hugetlbfs");

    private static final AtomicLong FILES = new AtomicLong();
    private static final int BLOCK = 4096;

    private final Path directory;
    private final long pieceBytes;
    private final Set<FileSlot> slots = new LinkedHashSet<>();

    /**
     * Creates a tier without files yet.
     *
     * @param directory an existing folder on a disk
     * @throws IllegalArgumentException if it does not exist, is not writable or lies in memory
     */
    public FileTier(Path directory) {
        // DJL's buffers end at 2 GiB.
        this(directory, 1 << 30);
    }

    FileTier(Path directory, long pieceBytes) {
        this.directory = directory;
        this.pieceBytes = pieceBytes;
        requireFolder(directory);
    }

    /** Refuses what is no writable folder on a disk. */
    static void requireFolder(Path directory) {
        if (!Files.isDirectory(directory)) {
            throw new IllegalArgumentException(
                    "The file tier needs an existing directory, and "
                            + directory
                            + " is none: create it or name another one");
        }
        try {
            requireDisk(directory, Files.getFileStore(directory).type());
            open(newFile(directory)).close();
        } catch (IOException e) {
            throw new IllegalArgumentException(
                    "The file tier cannot write to "
                            + directory
                            + ": make it writable or name another directory ("
                            + e
                            + ")",
                    e);
        }
    }

    static void requireDisk(Path directory, String type) {
        if (IN_MEMORY.contains(type.toLowerCase(Locale.ROOT))) {
            throw new IllegalArgumentException(
                    directory
                            + " lies in memory (a file system of type "
                            + type
                            + "), where a file tier frees none: name a directory on a disk, for"
                            + " instance with optFileTier(directory) of the builder of"
                            + " SelectiveCheckpointOffload or OffloadStreamAdamW");
        }
    }

    /** Returns a name that no other file in a directory has. */
    static Path newFile(Path directory) {
        return directory.resolve(
                "djl-moe-"
                        + ProcessHandle.current().pid()
                        + "-"
                        + FILES.incrementAndGet()
                        + ".slot");
    }

    private static FileChannel open(Path file) throws IOException {
        return FileChannel.open(
                file,
                StandardOpenOption.CREATE_NEW,
                StandardOpenOption.READ,
                StandardOpenOption.WRITE,
                StandardOpenOption.DELETE_ON_CLOSE);
    }

    @Override
    public long sizeOf(long bytes) {
        return (bytes + BLOCK - 1) / BLOCK * BLOCK;
    }

    @Override
    public long available() {
        try {
            return Files.getFileStore(directory).getUsableSpace();
        } catch (IOException e) {
            throw new UncheckedIOException("Cannot read the free space of " + directory, e);
        }
    }

    @Override
    public Slot newSlot(long bytes) {
        try {
            FileSlot slot = new FileSlot(open(newFile(directory)), bytes);
            synchronized (slots) {
                slots.add(slot);
            }
            return slot;
        } catch (IOException e) {
            throw new UncheckedIOException(
                    "Cannot make a file in "
                            + directory
                            + ": free room there or name another directory",
                    e);
        }
    }

    /** Number of open files. */
    int files() {
        synchronized (slots) {
            return slots.size();
        }
    }

    @Override
    public void close() {
        Set<FileSlot> open;
        synchronized (slots) {
            open = new LinkedHashSet<>(slots);
        }
        open.forEach(FileSlot::close);
    }

    /** Moves all bytes of a buffer, the first of them at a position of the file. */
    interface Transfer {
        int at(ByteBuffer buffer, long position) throws IOException;
    }

    /** Moves the first bytes of an array, at most {@code pieceBytes} at a time. */
    static void transfer(NDArray array, long size, long pieceBytes, Transfer transfer)
            throws IOException {
        int width = array.getDataType().getNumOfBytes();
        if (size <= pieceBytes && size == size(array)) {
            transfer(array.toByteBuffer(true), 0, transfer);
            return;
        }
        NDArray flat = array.reshape(-1);
        long elements = size / width;
        long step = Math.max(1, pieceBytes / width);
        for (long start = 0; start < elements; start += step) {
            try (NDScope piece = new NDScope()) {
                NDIndex range = new NDIndex().addSliceDim(start, Math.min(elements, start + step));
                transfer(flat.get(range).toByteBuffer(true), start * width, transfer);
            }
        }
    }

    private static void transfer(ByteBuffer buffer, long start, Transfer transfer)
            throws IOException {
        long position = start;
        while (buffer.hasRemaining()) {
            int moved = transfer.at(buffer, position);
            if (moved < 0) {
                throw new EOFException("The file ends at byte " + position);
            }
            position += moved;
        }
    }

    private final class FileSlot implements Slot {

        private final FileChannel file;
        private final long bytes;

        FileSlot(FileChannel file, long bytes) {
            this.file = file;
            this.bytes = bytes;
        }

        @Override
        public void write(NDArray source) {
            long size = size(source);
            if (size > bytes) {
                throw new IllegalArgumentException(
                        "An array of " + size + " bytes does not fit a slot of " + bytes);
            }
            try (NDScope scope = new NDScope()) {
                // On the device or with strides: toByteBuffer makes the copy, once.
                transfer(source, size, pieceBytes, file::write);
            } catch (IOException e) {
                throw new UncheckedIOException(
                        "Cannot write "
                                + size
                                + " bytes to the file tier in "
                                + directory
                                + ": free room there, set a smaller budget or name another directory",
                        e);
            }
        }

        @Override
        public void read(NDArray target) {
            try (NDScope scope = new NDScope()) {
                boolean inPlace = target.getDevice().equals(Device.cpu());
                NDArray buffer =
                        inPlace
                                ? target
                                : target.getManager()
                                        .create(
                                                target.getShape(),
                                                target.getDataType(),
                                                Device.cpu());
                transfer(buffer, size(target), pieceBytes, file::read);
                if (!inPlace) {
                    buffer.copyTo(target);
                }
            } catch (IOException e) {
                throw new UncheckedIOException("Cannot read from the file tier in " + directory, e);
            }
        }

        @Override
        public void close() {
            synchronized (slots) {
                slots.remove(this);
            }
            try {
                file.close();
            } catch (IOException e) {
                throw new UncheckedIOException("Cannot close a file in " + directory, e);
            }
        }
    }

    private static long size(NDArray array) {
        return array.size() * array.getDataType().getNumOfBytes();
    }
}
