package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import java.util.Map;

/**
 * What one case does. A class that implements it has a public constructor that takes a {@link
 * CaseSettings}; it allocates what is resident: inputs and weights.
 */
public interface Workload extends AutoCloseable {

    /** Does what comes before a run and is no part of its time. */
    default void prepare() {}

    /** Runs once. The first run is not measured, and brings gradients into being. */
    void run();

    /** Runs before times are measured: as often as it takes until they are what they will be. */
    default void warmUp() {
        run();
    }

    /**
     * Returns what the first run, or every run alike, computed: the array {@code loss} and one
     * array for each gradient, F32 or F64.
     *
     * @return arrays by name; they may be closed
     */
    Map<String, NDArray> results();

    /**
     * Returns how much of what a run makes is resident by its nature, such as its output, and so no
     * part of its peak.
     *
     * @return bytes
     */
    default long residentBytes() {
        return 0;
    }

    /**
     * Returns figures of the last run beside its time and its peak.
     *
     * @return numbers by the names that they have in JSON
     */
    default Map<String, Double> figures() {
        return Map.of();
    }

    @Override
    void close();
}
