package org.djlmoe.examples.bench;

/**
 * One line of a benchmark.
 *
 * @param name its name, unique in the benchmark
 * @param workload what it does
 * @param reference what its loss and gradients are compared with, or null if it is a reference
 *     itself
 * @param defaultAllocator whether times are taken with the C allocator as it is, and not with one
 *     that keeps what is freed
 * @param round cases of the same round take turns when times are taken; those of a later one begin
 *     when all of the earlier have ended
 */
public record Case(
        String name,
        Class<? extends Workload> workload,
        Case reference,
        boolean defaultAllocator,
        int round) {

    /**
     * Creates a case whose times are taken with an allocator that keeps what is freed.
     *
     * @param name its name
     * @param workload what it does
     * @param reference what it is compared with, or null
     */
    public Case(String name, Class<? extends Workload> workload, Case reference) {
        this(name, workload, reference, false, 0);
    }
}
