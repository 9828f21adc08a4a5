/**
 * Memory planning: what a training run will need, computed before anything is allocated, and what
 * it did need.
 *
 * <p>A model's configuration, the settings of a run and a budget come in; a plan, chunk sizes that
 * fit, or an error that names what would fit go out. Nothing here allocates an array.
 */
package org.djlmoe.plan;
