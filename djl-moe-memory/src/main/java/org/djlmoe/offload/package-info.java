/**
 * Selective checkpoint offload: where the inputs of segments lie from forward to backward.
 *
 * <p>The tape hands in what segments take and make; the same values come out when a backward, or a
 * late reader, asks for them. In between they lie in a {@code tier}, within a budget.
 */
package org.djlmoe.offload;
