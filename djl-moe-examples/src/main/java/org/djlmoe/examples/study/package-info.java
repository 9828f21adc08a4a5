/**
 * The comparison of MaskCoFT with every alternative: arms and seeds come in; perplexities, loads
 * and accuracies, and the claims that they bear out or not, go out.
 */
package org.djlmoe.examples.study;
