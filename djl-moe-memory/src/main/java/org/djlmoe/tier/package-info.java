/**
 * Places outside device memory where arrays lie between their uses.
 *
 * <p>State: named sizes come in, arrays of that size go out. Activations: arrays come in to be
 * written to slots, and are read back. What lies in them is the caller's matter.
 */
package org.djlmoe.tier;
