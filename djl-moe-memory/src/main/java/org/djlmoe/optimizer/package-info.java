/**
 * The optimizer whose state lies outside device memory, in buckets.
 *
 * <p>Weights and gradients come in and are updated in place; the state can be read and written by
 * parameter path.
 */
package org.djlmoe.optimizer;
