/**
 * The experts of a layer, stacked, low-rank adapters for them, and shared experts.
 *
 * <p>Rows with their chosen experts and combine weights come in; combined rows go out.
 */
package org.djlmoe.expert;
