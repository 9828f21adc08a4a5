package org.djlmoe.serving;

/**
 * What serving some tokens asked of the experts' slower tier.
 *
 * @param tokens tokens served
 * @param requests experts asked for, over all layers: tokens times layers times k
 * @param misses of these, not resident when asked for, token by token: what {@code LoadReplay}
 *     predicts, whether a prefetch had brought it meanwhile or not
 * @param loads experts read because a token waited for them. While decoding, misses without
 *     prefetch hits; over a prompt less, since its tokens share loads
 * @param prefetches experts read ahead, wanted or not
 * @param prefetchHits misses that a prefetch served
 * @param bytes read, prefetches included
 * @param waitNanos time that the computation stood still for loads
 * @param loadNanos time that the loader thread was reading
 */
public record ExpertTraffic(
        long tokens,
        long requests,
        long misses,
        long loads,
        long prefetches,
        long prefetchHits,
        long bytes,
        long waitNanos,
        long loadNanos) {

    /** Nothing yet. */
    public static final ExpertTraffic NONE = new ExpertTraffic(0, 0, 0, 0, 0, 0, 0, 0, 0);

    /**
     * Returns what came between two moments.
     *
     * @param before the earlier one
     * @return the difference
     */
    public ExpertTraffic minus(ExpertTraffic before) {
        return new ExpertTraffic(
                tokens - before.tokens,
                requests - before.requests,
                misses - before.misses,
                loads - before.loads,
                prefetches - before.prefetches,
                prefetchHits - before.prefetchHits,
                bytes - before.bytes,
                waitNanos - before.waitNanos,
                loadNanos - before.loadNanos);
    }

    /**
     * Returns the sum of two spans.
     *
     * @param other the other one
     * @return the sum
     */
    public ExpertTraffic plus(ExpertTraffic other) {
        return new ExpertTraffic(
                tokens + other.tokens,
                requests + other.requests,
                misses + other.misses,
                loads + other.loads,
                prefetches + other.prefetches,
                prefetchHits + other.prefetchHits,
                bytes + other.bytes,
                waitNanos + other.waitNanos,
                loadNanos + other.loadNanos);
    }

    /**
     * Returns the misses per token, over all layers.
     *
     * @return 0 to layers times k; 0 without tokens
     */
    public double loadsPerToken() {
        return tokens == 0 ? 0 : (double) misses / tokens;
    }

    /**
     * Returns the share of experts that were resident when asked for.
     *
     * @return 0 to 1; 1 without requests
     */
    public double hitRate() {
        return requests == 0 ? 1 : 1 - (double) misses / requests;
    }
}
