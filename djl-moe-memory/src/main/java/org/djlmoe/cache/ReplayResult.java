package org.djlmoe.cache;

import java.util.List;
import java.util.Locale;
import java.util.stream.Collectors;

/**
 * What a replay counted.
 *
 * @param policy the eviction policy
 * @param admission whether it could decline a used expert
 * @param capacity C, slots a layer
 * @param topK experts a token asks for in each layer
 * @param startedCold whether loads into an empty cache are among those counted: no experts were
 *     preloaded and no warm-up tokens left out
 * @param resetPerRequest whether each request began with a new cache
 * @param tokens how many tokens were counted
 * @param misses the loads of each layer over the counted tokens
 */
public record ReplayResult(
        EvictionPolicy.Type policy,
        EvictionPolicy.Admission admission,
        int capacity,
        int topK,
        boolean startedCold,
        boolean resetPerRequest,
        long tokens,
        List<Long> misses) {

    /** Copies the list. */
    public ReplayResult {
        misses = List.copyOf(misses);
    }

    /**
     * Returns the loads per token over all layers.
     *
     * @return misses / tokens, 0 to layers * topK
     */
    public double loadsPerToken() {
        return (double) misses.stream().mapToLong(Long::longValue).sum() / tokens;
    }

    /**
     * Returns the loads per token of one layer.
     *
     * @param layer the MoE layer
     * @return misses / tokens, 0 to topK
     */
    public double loadsPerToken(int layer) {
        return (double) misses.get(layer) / tokens;
    }

    /**
     * Returns the share of requested experts that were resident, over all layers.
     *
     * @return 0 to 1
     */
    public double hitRate() {
        return 1 - loadsPerToken() / ((double) topK * misses.size());
    }

    /**
     * Returns the share of requested experts that were resident in one layer.
     *
     * @param layer the MoE layer
     * @return 0 to 1
     */
    public double hitRate(int layer) {
        return 1 - loadsPerToken(layer) / topK;
    }

    @Override
    public String toString() {
        return String.format(
                Locale.ROOT,
                "%-12s C=%d top-%d  %.3f loads/token, hit rate %.1f %%, by layer %s (%d tokens, %s, %s%s)",
                policy.jsonName(),
                capacity,
                topK,
                loadsPerToken(),
                100 * hitRate(),
                misses.stream()
                        .map(m -> String.format(Locale.ROOT, "%.2f", (double) m / tokens))
                        .collect(Collectors.joining(" ", "[", "]")),
                tokens,
                startedCold ? "cold start" : "warm start",
                resetPerRequest ? "a new cache each request" : "one cache for all requests",
                admission == EvictionPolicy.Admission.OPTIONAL ? ", admission optional" : "");
    }
}
