/**
 * Which rank computes which route of a mixture-of-experts layer, in which chunk, and the exchange
 * that makes it so: tokens and their routing come in on every rank, what the experts make of them
 * goes out on the same rank.
 *
 * <p>Plans and schedules are pure integers; every rank computes the same ones from the same counts,
 * so a plan is never sent. {@link org.djlmoe.dispatch.PipelinedDispatch} carries them out. It knows
 * arrays, not blocks, parameters or tapes.
 */
package org.djlmoe.dispatch;
