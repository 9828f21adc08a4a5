package org.djlmoe.plan;

import java.io.IOException;
import java.io.RandomAccessFile;
import java.lang.management.ManagementFactory;
import java.lang.management.MemoryMXBean;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;

/**
 * Measures how much memory the process holds while something runs.
 *
 * <p>What counts is memory that cannot be dropped and read again: {@code RssAnon + RssShmem} of
 * {@code /proc/self/status}, sampled every 10 ms by a daemon thread. Pages of mapped files (program
 * code, an optimizer's state in the file tier) do not count. A peak shorter than the interval can
 * escape the samples, but not the kernel's own high-water mark {@code VmHWM}, which is set back at
 * the start where the system allows it. The mark counts mapped files; what it exceeds their largest
 * size by was certainly held, so the peak is at least that.
 *
 * <p>Where there is no {@code /proc}, the figure is what the Java virtual machine has committed for
 * itself, and {@link Reading#complete()} is false: native arrays are missing from it.
 *
 * <p>Memory that an allocator keeps after it was freed counts, as the process holds it. For the
 * peak of live arrays alone, run with {@code MALLOC_MMAP_THRESHOLD_=1048576 MALLOC_ARENA_MAX=1} in
 * the environment.
 */
public final class PeakMeter implements AutoCloseable {

    private static final Path STATUS = Path.of("/proc/self/status");
    private static final long INTERVAL_MILLIS = 10;

    private final Source source;
    private final boolean markReset;
    private final long base;
    private final CountDownLatch stop = new CountDownLatch(1);
    private final Thread sampler;
    private volatile long peak;
    private Reading reading;

    /** Where samples come from. */
    interface Source {

        /** Bytes held now. */
        long held();

        /** Bytes that were certainly held at some time since the mark was set back, or -1. */
        long marked();

        /** Whether native memory is part of the figures. */
        boolean complete();
    }

    /**
     * What was measured.
     *
     * @param baseBytes held at the start
     * @param peakBytes the most that was held
     * @param complete false if memory of native arrays is missing from the figures
     */
    public record Reading(long baseBytes, long peakBytes, boolean complete) {

        /**
         * Returns how far the peak was above the start.
         *
         * @return bytes, at least 0
         */
        public long aboveBase() {
            return peakBytes - baseBytes;
        }

        @Override
        public String toString() {
            return String.format(
                    "peak %s MB, %s MB above the start%s",
                    Megabytes.of(peakBytes),
                    Megabytes.of(aboveBase()),
                    complete
                            ? ""
                            : " (Java virtual machine only: no /proc, native arrays missing)");
        }
    }

    private PeakMeter(Source source, boolean markReset) {
        this.source = source;
        this.markReset = markReset;
        this.base = source.held();
        this.peak = base;
        this.sampler = new Thread(this::sample, "peak-meter");
        sampler.setDaemon(true);
        sampler.start();
    }

    /**
     * Starts measuring.
     *
     * @return the meter, to be stopped
     */
    public static PeakMeter start() {
        boolean proc = Files.isReadable(STATUS);
        return start(proc ? new ProcStatus() : new VirtualMachine(), proc && resetHighWater());
    }

    static PeakMeter start(Source source, boolean markReset) {
        return new PeakMeter(source, markReset);
    }

    private static boolean resetHighWater() {
        try {
            Files.writeString(Path.of("/proc/self/clear_refs"), "5", StandardCharsets.US_ASCII);
            return true;
        } catch (IOException e) {
            return false;
        }
    }

    private void sample() {
        try {
            do {
                peak = Math.max(peak, source.held());
            } while (!stop.await(INTERVAL_MILLIS, TimeUnit.MILLISECONDS));
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
    }

    /**
     * Stops measuring; later calls return the same reading.
     *
     * @return what was measured
     */
    public synchronized Reading stop() {
        if (reading == null) {
            stop.countDown();
            try {
                sampler.join();
            } catch (InterruptedException e) {
                Thread.currentThread().interrupt();
            }
            long highest = Math.max(peak, source.held());
            if (markReset) {
                highest = Math.max(highest, source.marked());
            }
            reading = new Reading(base, highest, source.complete());
        }
        return reading;
    }

    /** Stops measuring. */
    @Override
    public void close() {
        stop();
    }

    /**
     * Reads numbers out of the status file without making garbage: it is read 100 times a second.
     */
    static final class ProcStatus implements Source {

        private static final byte[] ANON = "RssAnon:".getBytes(StandardCharsets.US_ASCII);
        private static final byte[] SHMEM = "RssShmem:".getBytes(StandardCharsets.US_ASCII);
        private static final byte[] FILE = "RssFile:".getBytes(StandardCharsets.US_ASCII);
        private static final byte[] MARK = "VmHWM:".getBytes(StandardCharsets.US_ASCII);

        private final byte[] text = new byte[8192];
        private long mostFile;

        @Override
        public synchronized long held() {
            int length = read();
            long anon = kilobytes(text, length, ANON);
            long shmem = kilobytes(text, length, SHMEM);
            mostFile = Math.max(mostFile, kilobytes(text, length, FILE));
            if (anon < 0) {
                throw new IllegalStateException(STATUS + " has no line RssAnon");
            }
            return 1024 * (anon + Math.max(0, shmem));
        }

        @Override
        public synchronized long marked() {
            long mark = kilobytes(text, read(), MARK);
            return mark < 0 ? -1 : 1024 * (mark - mostFile);
        }

        @Override
        public boolean complete() {
            return true;
        }

        private int read() {
            try (RandomAccessFile file = new RandomAccessFile(STATUS.toFile(), "r")) {
                int length = 0;
                int got = 0;
                while (length < text.length && got >= 0) {
                    length += got;
                    got = file.read(text, length, text.length - length);
                }
                return length;
            } catch (IOException e) {
                throw new IllegalStateException("Cannot read " + STATUS, e);
            }
        }

        /** The number after a key at the start of a line, or -1. */
        static long kilobytes(byte[] text, int length, byte[] key) {
            for (int line = 0; line + key.length <= length; line++) {
                int i = 0;
                while (i < key.length && text[line + i] == key[i]) {
                    i++;
                }
                if (i == key.length && (line == 0 || text[line - 1] == '\n')) {
                    long number = 0;
                    for (int at = line + i; at < length && text[at] != '\n'; at++) {
                        if (text[at] >= '0' && text[at] <= '9') {
                            number = 10 * number + text[at] - '0';
                        }
                    }
                    return number;
                }
            }
            return -1;
        }
    }

    /** What the Java virtual machine itself has committed. */
    static final class VirtualMachine implements Source {

        private final MemoryMXBean memory = ManagementFactory.getMemoryMXBean();

        @Override
        public long held() {
            return memory.getHeapMemoryUsage().getCommitted()
                    + memory.getNonHeapMemoryUsage().getCommitted();
        }

        @Override
        public long marked() {
            return -1;
        }

        @Override
        public boolean complete() {
            return false;
        }
    }
}
