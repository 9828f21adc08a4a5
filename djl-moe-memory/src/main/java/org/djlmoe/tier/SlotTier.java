package org.djlmoe.tier;

import ai.djl.ndarray.NDArray;

/**
 * A place for arrays that are written once and read back a few times: activations on their way from
 * forward to backward.
 *
 * <p>Its unit is a slot, which is meant to be kept and written again and again: the first write of
 * a slot is many times dearer than any later one. A slot is used by one thread at a time; different
 * slots may be used by different threads.
 */
public interface SlotTier extends AutoCloseable {

    /**
     * Returns what a slot really takes.
     *
     * @param bytes the size of the largest array to be written to it
     * @return at least {@code bytes}
     */
    long sizeOf(long bytes);

    /**
     * Returns how much room there is for further slots.
     *
     * @return bytes, {@link Long#MAX_VALUE} if unknown
     */
    long available();

    /**
     * Makes a slot.
     *
     * @param bytes the size of the largest array to be written to it
     * @return the slot
     * @throws java.io.UncheckedIOException if there is no room
     */
    Slot newSlot(long bytes);

    /** Frees all slots. */
    @Override
    void close();

    /** Room for one array at a time. */
    interface Slot extends AutoCloseable {

        /**
         * Writes an array over what the slot held.
         *
         * @param source an array on any device, no larger than the slot
         * @throws java.io.UncheckedIOException if it cannot be written
         */
        void write(NDArray source);

        /**
         * Reads the array written last.
         *
         * @param target filled with it; of the same shape and type, contiguous, on any device
         * @throws java.io.UncheckedIOException if it cannot be read
         */
        void read(NDArray target);

        /** Frees the slot's room. */
        @Override
        void close();
    }
}
