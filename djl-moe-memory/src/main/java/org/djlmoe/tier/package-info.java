/**
 * Places outside device memory where state lies between its uses.
 *
 * <p>Named sizes come in, arrays of that size go out; what lies in them is the caller's matter.
 */
package org.djlmoe.tier;
