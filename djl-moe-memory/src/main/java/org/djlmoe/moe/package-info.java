/**
 * The Mixture-of-Experts layer as a block: hidden states come in and go out, memory bounded by the
 * chunk.
 *
 * <p>What the routers did goes out as statistics and DJL metrics.
 */
package org.djlmoe.moe;
