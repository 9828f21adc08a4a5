package org.djlmoe.examples.bench;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import java.io.EOFException;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/**
 * Reads a file as large as AdamW's state and writes the same bytes back, piece by piece, until they
 * are on the disk. Before each run the file is dropped from the page cache, by {@code dd} with
 * {@code nocache}, which calls {@code posix_fadvise}.
 */
public final class RawFileWorkload implements Workload {

    private static final int PIECE = 1 << 25;

    private final NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
    private final ByteBuffer buffer = ByteBuffer.allocateDirect(PIECE);
    private final long size;
    private final Path path;
    private final FileChannel file;
    private boolean dropped;

    /**
     * Creates the workload.
     *
     * @param settings parameters, and the directory {@code tier}
     */
    public RawFileWorkload(CaseSettings settings) {
        size = 8L * settings.number("parameters");
        try {
            path = Files.createTempFile(Path.of(settings.options().get("tier")), "raw", ".state");
            path.toFile().deleteOnExit();
            file = FileChannel.open(path, StandardOpenOption.READ, StandardOpenOption.WRITE);
            for (long at = 0; at < size; at += PIECE) {
                limit(at);
                write(at);
            }
            file.force(false);
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
    }

    private void limit(long at) {
        buffer.clear().limit((int) Math.min(PIECE, size - at));
    }

    private void write(long at) throws IOException {
        long position = at;
        while (buffer.hasRemaining()) {
            position += file.write(buffer, position);
        }
    }

    @Override
    public void prepare() {
        try {
            Process dd =
                    new ProcessBuilder(
                                    "dd",
                                    "of=" + path,
                                    "oflag=nocache",
                                    "conv=notrunc,fdatasync",
                                    "count=0")
                            .redirectErrorStream(true)
                            .redirectOutput(ProcessBuilder.Redirect.DISCARD)
                            .start();
            dropped = dd.waitFor(1, TimeUnit.MINUTES) && dd.exitValue() == 0;
        } catch (IOException e) {
            // No dd, or one that knows no nocache: the figure says so.
            dropped = false;
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
            dropped = false;
        }
    }

    @Override
    public void run() {
        try {
            for (long at = 0; at < size; at += PIECE) {
                limit(at);
                long position = at;
                while (buffer.hasRemaining()) {
                    int read = file.read(buffer, position);
                    if (read < 0) {
                        throw new EOFException(path + " ends at byte " + position);
                    }
                    position += read;
                }
                buffer.flip();
                write(at);
            }
            file.force(false);
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
    }

    @Override
    public Map<String, Double> figures() {
        return Map.of("dropped", dropped ? 1.0 : 0.0);
    }

    @Override
    public Map<String, NDArray> results() {
        return Map.of("loss", manager.create(0f));
    }

    @Override
    public void close() {
        manager.close();
        try {
            file.close();
            Files.deleteIfExists(path);
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
    }
}
