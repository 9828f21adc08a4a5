package org.djlmoe.examples.bench;

/**
 * One line of a benchmark.
 *
 * @param name its name, unique in the benchmark
 * @param workload what it does
 * @param reference what its loss and gradients are compared with, or null if it is a reference
 *     itself
 */
public record Case(String name, Class<? extends Workload> workload, Case reference) {}
