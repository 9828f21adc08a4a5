package org.djlmoe.tier;

import ai.djl.ndarray.NDArray;

/** A place for state that the CPU can read and write where it lies. */
public interface Tier extends AutoCloseable {

    /**
     * Reserves room and fills it with zeros at once, so that no later use pays for the first touch.
     *
     * @param name what the room is for, unique in this tier
     * @param elements its size in 32-bit floats
     * @return an array of shape (elements) on the CPU; it belongs to the tier
     * @throws IllegalArgumentException if the name is in use
     */
    NDArray allocate(String name, long elements);

    /**
     * Frees an array of this tier.
     *
     * @param name the name that it was reserved under; nothing happens if there is none
     */
    void free(String name);

    /**
     * Returns whether arrays here may be out of memory, so that it pays to look after them on
     * another thread before they are used.
     *
     * @return false unless overridden
     */
    default boolean isBackedByFiles() {
        return false;
    }

    /**
     * Returns whether all of an array is in memory now. If not, it may be used all the same, but
     * {@link #read} and {@link #write} are faster.
     *
     * @param name the name that it was reserved under
     * @return true unless overridden
     */
    default boolean isInMemory(String name) {
        return true;
    }

    /**
     * Brings an array into memory and returns when it is there; it may be used without.
     *
     * @param name the name that it was reserved under
     */
    default void readAhead(String name) {}

    /**
     * Reads an array without bringing it into the memory of the process.
     *
     * @param name the name that it was reserved under
     * @param target filled from its first element on; flat, F32, on the CPU, at least as long
     * @throws java.io.UncheckedIOException if it cannot be read
     * @throws UnsupportedOperationException if the array is always in memory
     */
    default void read(String name, NDArray target) {
        throw new UnsupportedOperationException(name + " is in memory");
    }

    /**
     * Writes an array that was read with {@link #read}, as far as to the disk: memory is short
     * then.
     *
     * @param name the name that it was reserved under
     * @param source its values, from its first element on; flat, F32, on the CPU, at least as long
     * @throws java.io.UncheckedIOException if it cannot be written
     * @throws UnsupportedOperationException if the array is always in memory
     */
    default void write(String name, NDArray source) {
        throw new UnsupportedOperationException(name + " is in memory");
    }

    /**
     * Returns how much is reserved.
     *
     * @return the size of all arrays of this tier, in bytes
     */
    long bytes();

    /** Frees all arrays of this tier. */
    @Override
    void close();
}
