/**
 * The Mixture-of-Experts layer as a block: hidden states come in and go out, memory bounded by the
 * chunk.
 */
package org.djlmoe.moe;
