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
     * Returns whether arrays here may be out of memory, so that it pays to call {@link #readAhead}
     * on another thread before an array is used, and {@link #writeBehind} after it.
     *
     * @return false unless overridden
     */
    default boolean isBackedByFiles() {
        return false;
    }

    /**
     * Brings an array into memory and returns when it is there; it may be used without.
     *
     * @param name the name that it was reserved under
     */
    default void readAhead(String name) {}

    /**
     * Writes changes of an array to its file, where memory seems to be too short to keep it.
     *
     * @param name the name that it was reserved under
     * @throws java.io.UncheckedIOException if they cannot be written
     */
    default void writeBehind(String name) {}

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
