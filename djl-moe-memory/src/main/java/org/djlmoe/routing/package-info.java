/**
 * Which experts a token goes to: router logits, kept sets and priors come in, expert ids and
 * combine weights go out.
 */
package org.djlmoe.routing;
