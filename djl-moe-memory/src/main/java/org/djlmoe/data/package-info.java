/**
 * Token streams for language-model training: documents as token ids come in, batches of inputs and
 * targets go out, the same ones for the same seed and step.
 *
 * <p>Nothing in here reads text or files; a tokenizer is the caller's.
 */
package org.djlmoe.data;
