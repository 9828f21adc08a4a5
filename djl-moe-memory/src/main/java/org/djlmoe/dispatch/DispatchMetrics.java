package org.djlmoe.dispatch;

/**
 * What a rank's passes have cost.
 *
 * @param rowBytesSent bytes of rows and their gradients sent to other ranks
 * @param weightBytesSent bytes of expert weights and their gradients sent to other ranks
 * @param peakBufferBytes the most that a pass held at a time: rows sent and received, the experts'
 *     scratch, lent weights and their gradients, and index arrays
 */
public record DispatchMetrics(long rowBytesSent, long weightBytesSent, long peakBufferBytes) {}
