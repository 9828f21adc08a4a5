/**
 * Serving token by token: a model's weights and a prompt come in, tokens go out, with experts that
 * may stay in a slower tier and are loaded when the router asks for them.
 */
package org.djlmoe.serving;
