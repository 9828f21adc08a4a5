package org.djlmoe.optimizer;

/**
 * What one step of an optimizer took. The stages overlap, so their times may add up to more than
 * the step's.
 *
 * @param fetchSeconds bringing state to where it is updated, reading it from files included
 * @param updateSeconds the update itself
 * @param writeBackSeconds bringing it back
 * @param stallSeconds how long the training thread waited for either
 * @param stagingBytes the size of all staging buffers; made by the first step that needs them
 */
public record OptimizerStatistics(
        double fetchSeconds,
        double updateSeconds,
        double writeBackSeconds,
        double stallSeconds,
        long stagingBytes) {}
