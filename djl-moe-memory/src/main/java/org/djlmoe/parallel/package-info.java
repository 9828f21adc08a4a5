/**
 * What processes that train one model together say to each other: counts, rows and tensors come in
 * on one rank and go out on others.
 *
 * <p>A rank is one process of a group. Nothing in here knows what the numbers mean, and no caller
 * asks whether there are other processes: a single one is a {@link org.djlmoe.parallel.SoloGroup}.
 */
package org.djlmoe.parallel;
