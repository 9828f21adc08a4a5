package org.djlmoe.offload;

/**
 * What one session, a gradient collector's life, moved.
 *
 * @param bytesOut bytes written to the tier
 * @param bytesBack bytes read from it, late reads of callers included
 * @param waitSeconds how long the training thread waited for either
 * @param peakBytes the most that boundaries took on the device at once
 */
public record OffloadStatistics(
        long bytesOut, long bytesBack, double waitSeconds, long peakBytes) {}
