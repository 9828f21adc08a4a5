/**
 * The decoder and its configuration: token ids come in, hidden states and a loss go out.
 *
 * <p>Shapes and constants of a model are one immutable {@link org.djlmoe.model.MoeConfig}.
 */
package org.djlmoe.model;
