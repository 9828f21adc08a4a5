/**
 * Masked co-adaptive fine-tuning: losses and gradients of a model under sampled expert masks come
 * in, a learned mask and a model co-adapted to it go out.
 */
package org.djlmoe.maskcoft;
