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
     * Returns how much is reserved.
     *
     * @return the size of all arrays of this tier, in bytes
     */
    long bytes();

    /** Frees all arrays of this tier. */
    @Override
    void close();
}
