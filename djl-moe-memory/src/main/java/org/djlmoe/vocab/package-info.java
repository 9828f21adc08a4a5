/**
 * The vocabulary projection and its cross-entropy loss without a tensor of tokens times vocabulary.
 *
 * <p>Hidden states and labels come in; a loss, and through the tape its gradients, go out.
 */
package org.djlmoe.vocab;
