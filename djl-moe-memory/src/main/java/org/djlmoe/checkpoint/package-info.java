/**
 * Checkpoints and adapters in Hugging Face's formats: a folder and named parameters come in, filled
 * parameters or a written folder go out.
 *
 * <p>Names of parameters are Hugging Face tensor names with the experts stacked; how the experts
 * lie on disk is this package's business alone.
 */
package org.djlmoe.checkpoint;
