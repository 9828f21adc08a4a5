package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import java.util.concurrent.locks.LockSupport;
import org.djlmoe.tier.SlotTier;

/**
 * A tier that takes at least a given time for each array, as a slower disk would. What it costs
 * shows whether transfers really overlap with computation.
 */
final class SlowedTier implements SlotTier {

    private final SlotTier tier;
    private volatile double writeSeconds;
    private volatile double readSeconds;

    SlowedTier(SlotTier tier) {
        this.tier = tier;
    }

    /** Sets the least time of a write and of a read. */
    void slowDown(double write, double read) {
        writeSeconds = write;
        readSeconds = read;
    }

    private static void fill(long start, double seconds) {
        long end = start + (long) (seconds * 1e9);
        for (long left = end - System.nanoTime(); left > 0; left = end - System.nanoTime()) {
            LockSupport.parkNanos(left);
            if (Thread.interrupted()) {
                Thread.currentThread().interrupt();
                return;
            }
        }
    }

    @Override
    public long sizeOf(long bytes) {
        return tier.sizeOf(bytes);
    }

    @Override
    public long available() {
        return tier.available();
    }

    @Override
    public Slot newSlot(long bytes) {
        Slot slot = tier.newSlot(bytes);
        return new Slot() {
            @Override
            public void write(NDArray source) {
                long start = System.nanoTime();
                slot.write(source);
                fill(start, writeSeconds);
            }

            @Override
            public void read(NDArray target) {
                long start = System.nanoTime();
                slot.read(target);
                fill(start, readSeconds);
            }

            @Override
            public void close() {
                slot.close();
            }
        };
    }

    @Override
    public void close() {
        tier.close();
    }
}
