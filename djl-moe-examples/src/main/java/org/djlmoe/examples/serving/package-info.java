/**
 * Checkpoint folders put to work: a folder, its prior and a tier for the experts come in, a decoder
 * or measured times per token go out.
 */
package org.djlmoe.examples.serving;
