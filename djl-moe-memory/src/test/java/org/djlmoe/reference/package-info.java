/**
 * What the kernels are compared with: the same computations, number by number, in double precision.
 */
package org.djlmoe.reference;
