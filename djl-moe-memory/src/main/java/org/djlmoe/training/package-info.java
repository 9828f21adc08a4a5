/**
 * A language model with its native memory, one training step of it, the saved states of a run, and
 * its evaluation.
 *
 * <p>Checkpoints and token batches come in; losses, perplexities and routing traces go out.
 */
package org.djlmoe.training;
