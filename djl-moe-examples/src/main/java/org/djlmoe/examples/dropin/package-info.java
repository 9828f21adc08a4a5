/**
 * One language-model training program twice: as DJL code is written, and changed line by line to
 * bounded memory. Settings come in, the losses of the steps go out.
 */
package org.djlmoe.examples.dropin;
