/**
 * One language-model training program twice: as DJL code is written, and changed line by line to
 * bounded memory; and a transformer whose feed-forward blocks become Mixtures of Experts. Settings
 * come in, the losses of the steps go out.
 */
package org.djlmoe.examples.dropin;
