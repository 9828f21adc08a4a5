package org.djlmoe.plan;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.jupiter.api.Test;

class PeakMeterTest {

    private static final long MB = 1 << 20;

    @Test
    void stop_nativeArrayFreedMeanwhile_peakHasIt() {
        assumeTrue(Files.exists(Path.of("/proc/self/status")));
        try (NDManager manager = NDManager.newBaseManager();
                PeakMeter meter = PeakMeter.start()) {
            manager.ones(new Shape(96 * MB / 4)).close();
            PeakMeter.Reading reading = meter.stop();
            assertTrue(reading.complete());
            assertTrue(reading.aboveBase() > 80 * MB, reading::toString);
            assertTrue(reading.aboveBase() < 250 * MB, reading::toString);
        }
    }

    /** A source whose peak is at one sample in the middle. */
    @Test
    void stop_peakBetweenStartAndStop_isTheHighestSample() throws InterruptedException {
        AtomicLong held = new AtomicLong(100);
        AtomicLong samples = new AtomicLong();
        PeakMeter.Source source =
                new PeakMeter.Source() {
                    @Override
                    public long held() {
                        samples.incrementAndGet();
                        return held.get();
                    }

                    @Override
                    public long marked() {
                        return 7777;
                    }

                    @Override
                    public boolean complete() {
                        return true;
                    }
                };
        try (PeakMeter meter = PeakMeter.start(source, false)) {
            held.set(5000);
            long before = samples.get();
            while (samples.get() < before + 2) {
                Thread.sleep(1);
            }
            held.set(10);
            PeakMeter.Reading reading = meter.stop();
            assertEquals(new PeakMeter.Reading(100, 5000, true), reading);
            held.set(9000);
            assertSame(reading, meter.stop());
        }
    }

    @Test
    void stop_peakThatNoSampleSaw_isInTheMark() {
        PeakMeter.Source source =
                new PeakMeter.Source() {
                    @Override
                    public long held() {
                        return 100;
                    }

                    @Override
                    public long marked() {
                        return 7777;
                    }

                    @Override
                    public boolean complete() {
                        return true;
                    }
                };
        try (PeakMeter meter = PeakMeter.start(source, true)) {
            assertEquals(7677, meter.stop().aboveBase());
        }
    }

    @Test
    void virtualMachine_withoutProc_saysThatFiguresAreMissing() {
        try (PeakMeter meter = PeakMeter.start(new PeakMeter.VirtualMachine(), false)) {
            PeakMeter.Reading reading = meter.stop();
            assertFalse(reading.complete());
            assertTrue(reading.peakBytes() > 0);
            assertTrue(reading.toString().contains("missing"), reading::toString);
        }
    }

    @Test
    void kilobytes_keyInsideAnotherLine_isNotFound() {
        byte[] text = "XRssAnon:\t1 kB\nRssAnon:\t  23 kB\n".getBytes(StandardCharsets.US_ASCII);
        byte[] key = "RssAnon:".getBytes(StandardCharsets.US_ASCII);
        assertEquals(23, PeakMeter.ProcStatus.kilobytes(text, text.length, key));
        assertEquals(-1, PeakMeter.ProcStatus.kilobytes(text, 10, key));
    }
}
