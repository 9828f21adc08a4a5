package org.djlmoe.optimizer;

/**
 * What one step of an optimizer took. The stages overlap, so their times may add up to more than
 * the step's.
 *
 * @param fetchSeconds bringing state to where it is updated; reading ahead, for files
 * @param updateSeconds the update itself
 * @param writeBackSeconds bringing state back, as far as it was done by the end of the step
 * @param stallSeconds how long the training thread waited for either
 * @param stagingBytes the size of all staging buffers; they are made in the first step
 */
public record OptimizerStatistics(
        double fetchSeconds,
        double updateSeconds,
        double writeBackSeconds,
        double stallSeconds,
        long stagingBytes) {}
