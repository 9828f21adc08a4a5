/**
 * Guice wiring: one settings object comes in; a model, its loss, its optimizer and its trainer,
 * made to fit each other, go out.
 */
package org.djlmoe.inject;
