/**
 * Which rank computes which route of a mixture-of-experts layer, and in which chunk: routing counts
 * of a group of ranks come in, plans in pure integers go out.
 *
 * <p>Every rank computes the same plan from the same counts, so a plan is never sent. Nothing here
 * holds weights or activations.
 */
package org.djlmoe.dispatch;
