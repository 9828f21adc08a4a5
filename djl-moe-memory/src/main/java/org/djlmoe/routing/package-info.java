/**
 * Which experts a token goes to: router logits, kept sets and priors come in, expert ids and
 * combine weights go out, and statistics of the load.
 */
package org.djlmoe.routing;
