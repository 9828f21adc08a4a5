/**
 * Hot computations as TorchScript text: arrays and numbers come in, arrays filled by the caller's
 * engine go out.
 *
 * <p>Nothing in here knows of blocks, parameters or tapes.
 */
package org.djlmoe.kernel;
