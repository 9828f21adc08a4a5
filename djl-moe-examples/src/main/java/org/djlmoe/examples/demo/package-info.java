/**
 * The demonstration: a base model, the ways of fine-tuning it that are compared, and the report.
 */
package org.djlmoe.examples.demo;
