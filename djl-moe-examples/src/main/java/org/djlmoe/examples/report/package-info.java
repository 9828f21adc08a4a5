/**
 * Reports of a run: figures and texts come in, one self-contained HTML page goes out.
 *
 * <p>Nothing in here knows where the figures came from.
 */
package org.djlmoe.examples.report;
