/**
 * The optimizer whose state lies outside device memory, in buckets.
 *
 * <p>Weights and gradients come in and are updated in place; the state can be read and written by
 * parameter path.
 *
 * <p>A step of {@code OffloadStreamAdamW}: {@code StepPolicy} decides what holds for all of it,
 * {@code ParameterGroups} with what each parameter is updated, {@code UpdatePlan} which runs of
 * elements that makes in which bucket; {@code BucketPipeline} brings one bucket after the other to
 * where {@code AdamWKernels} updates it. {@code StateBuckets} knows where whose state lies. Under
 * DJL's trainer {@code GradientSequence} finds out where a step begins.
 */
package org.djlmoe.optimizer;
