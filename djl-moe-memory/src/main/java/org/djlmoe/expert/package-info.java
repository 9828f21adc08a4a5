/**
 * The experts of a layer, stacked, and low-rank adapters for them.
 *
 * <p>Rows with their chosen experts and combine weights come in; combined rows go out.
 */
package org.djlmoe.expert;
