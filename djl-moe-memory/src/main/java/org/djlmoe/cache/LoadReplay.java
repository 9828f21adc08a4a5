package org.djlmoe.cache;

import java.util.ArrayList;
import java.util.List;
import org.djlmoe.routing.ExpertMask;

/**
 * Replays a routing trace against a cache of C experts a layer and counts the loads.
 *
 * <p>Whole tokens only: see {@link ExpertCache}. Loads per token are the misses over all layers and
 * counted tokens, divided by the counted tokens. By default one cache a layer starts empty and
 * stays warm over all requests; its first loads count.
 *
 * <p>{@link EvictionPolicy.Type#BELADY} is the least of all, for every trace, setting and capacity.
 * It minimises what is counted: with warm-up tokens, the loads after them.
 *
 * <p>Counts say what a policy would load, not what that costs: a prefetched or overlapped load
 * costs less, and a batch of requests shares loads that are counted here for each.
 */
public final class LoadReplay {

    private final int capacity;
    private final EvictionPolicy.Admission admission;
    private final boolean resetPerRequest;
    private final int warmUpTokens;
    private final ExpertMask residents;
    private final ExpertMask fixed;
    private final double gamma;
    private final long seed;

    private LoadReplay(Builder b) {
        capacity = b.capacity;
        admission = b.admission;
        resetPerRequest = b.resetPerRequest;
        warmUpTokens = b.warmUpTokens;
        residents = b.residents;
        fixed = b.fixed;
        gamma = b.gamma;
        seed = b.seed;
    }

    /**
     * Starts the settings.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Replays a trace.
     *
     * @param trace the routing
     * @param policy who leaves a full cache
     * @return what was counted
     * @throws IllegalArgumentException if the capacity is below the trace's topK, the warm-up
     *     leaves no token, or a mask given here has another shape than the trace
     */
    public ReplayResult run(ExpertTrace trace, EvictionPolicy.Type policy) {
        ExpertCache.checkCapacity(capacity, trace.topK());
        check(trace, residents, "initial residents");
        if (policy == EvictionPolicy.Type.STATIC) {
            if (fixed == null) {
                throw new IllegalArgumentException(
                        "The static policy needs its set: call optStaticSet, for instance with"
                                + " ExpertMask.mostFrequent of another trace's usage");
            }
            check(trace, fixed, "static set");
        }
        List<ExpertTrace.Request> spans =
                resetPerRequest
                        ? trace.requests()
                        : List.of(new ExpertTrace.Request(0, trace.tokens()));
        long tokens = 0;
        for (ExpertTrace.Request span : spans) {
            tokens += Math.max(0, span.tokens() - warmUpTokens);
        }
        if (tokens == 0) {
            throw new IllegalArgumentException(
                    "%d warm-up tokens leave none of %s to count".formatted(warmUpTokens, trace));
        }
        List<Long> misses = new ArrayList<>();
        for (int l = 0; l < trace.numLayers(); l++) {
            long sum = 0;
            for (ExpertTrace.Request span : spans) {
                sum += replay(trace, l, span, policy);
            }
            misses.add(sum);
        }
        return new ReplayResult(
                policy,
                admission,
                capacity,
                trace.topK(),
                residents == null && warmUpTokens == 0,
                resetPerRequest,
                tokens,
                misses);
    }

    /**
     * Replays a trace under several policies.
     *
     * @param trace the routing
     * @param policies the policies
     * @return a result for each, in their order
     */
    public List<ReplayResult> run(ExpertTrace trace, List<EvictionPolicy.Type> policies) {
        return policies.stream().map(p -> run(trace, p)).toList();
    }

    private long replay(
            ExpertTrace trace, int layer, ExpertTrace.Request span, EvictionPolicy.Type type) {
        int k = trace.topK();
        int begin = span.firstToken();
        int end = begin + span.tokens();
        int counted = Math.min(end, begin + warmUpTokens);
        EvictionPolicy policy = policy(type, trace, layer, begin, counted, end);
        ExpertCache cache = new ExpertCache(trace.numExperts(), k, capacity, policy, admission);
        if (residents != null) {
            cache.preload(residents.experts(layer));
        }
        int[] ids = new int[k];
        long misses = 0;
        for (int t = begin; t < end; t++) {
            trace.experts(layer, t, ids);
            int missed = cache.request(ids, 0, k);
            misses += t >= counted ? missed : 0;
        }
        return misses;
    }

    private EvictionPolicy policy(
            EvictionPolicy.Type type,
            ExpertTrace trace,
            int layer,
            int begin,
            int counted,
            int end) {
        if (type == EvictionPolicy.Type.BELADY) {
            return new ScoredPolicies.Belady(trace, layer, begin, counted, end);
        }
        boolean[] members = fixed == null ? null : fixed.kept(layer);
        long own = EvictionPolicy.layerSeed(seed, layer, begin);
        return EvictionPolicy.of(type, trace.numExperts(), gamma, members, own);
    }

    private void check(ExpertTrace trace, ExpertMask mask, String what) {
        if (mask == null) {
            return;
        }
        if (mask.numLayers() != trace.numLayers() || mask.numExperts() != trace.numExperts()) {
            throw new IllegalArgumentException(
                    "The %s are for %d layers of %d experts, the trace has %d of %d"
                            .formatted(
                                    what,
                                    mask.numLayers(),
                                    mask.numExperts(),
                                    trace.numLayers(),
                                    trace.numExperts()));
        }
        for (int l = 0; l < mask.numLayers(); l++) {
            if (mask.count(l) > capacity) {
                throw new IllegalArgumentException(
                        "The %s of layer %d count %d, more than the capacity of %d"
                                .formatted(what, l, mask.count(l), capacity));
            }
        }
    }

    /** Settings of a replay. */
    public static final class Builder {

        private int capacity;
        private EvictionPolicy.Admission admission = EvictionPolicy.Admission.ALWAYS;
        private boolean resetPerRequest;
        private int warmUpTokens;
        private ExpertMask residents;
        private ExpertMask fixed;
        private double gamma = EvictionPolicy.DEFAULT_GAMMA;
        private long seed;

        private Builder() {}

        /**
         * Sets the cache size.
         *
         * @param experts C, slots a layer, at least the topK of the traces
         * @return this builder
         */
        public Builder setCapacity(int experts) {
            capacity = experts;
            return this;
        }

        /**
         * Sets whether policies may decline an expert that was just used; default: they may not.
         *
         * @param value the admission
         * @return this builder
         */
        public Builder optAdmission(EvictionPolicy.Admission value) {
            admission = value;
            return this;
        }

        /**
         * Sets whether each request begins with a new cache and a policy that has seen nothing;
         * default: one cache for all requests.
         *
         * @param reset whether to begin anew
         * @return this builder
         */
        public Builder optResetPerRequest(boolean reset) {
            resetPerRequest = reset;
            return this;
        }

        /**
         * Sets how many tokens are replayed but not counted, from the beginning of the trace, or of
         * each request where those begin anew; default: none.
         *
         * @param tokens at least 0
         * @return this builder
         */
        public Builder optWarmUpTokens(int tokens) {
            warmUpTokens = tokens;
            return this;
        }

        /**
         * Sets what is resident before the first token, loaded for nothing; default: nothing.
         *
         * @param mask at most C experts a layer
         * @return this builder
         */
        public Builder optInitialResidents(ExpertMask mask) {
            residents = mask;
            return this;
        }

        /**
         * Sets what the static policy prefers. It is not resident at the start unless {@link
         * #optInitialResidents} says so too.
         *
         * @param mask at most C experts a layer
         * @return this builder
         */
        public Builder optStaticSet(ExpertMask mask) {
            fixed = mask;
            return this;
        }

        /**
         * Sets the discount of {@link EvictionPolicy.Type#DISCOUNTED}; default: 0.95.
         *
         * @param value above 0, at most 1
         * @return this builder
         */
        public Builder optGamma(double value) {
            gamma = value;
            return this;
        }

        /**
         * Sets what decides the choices of {@link EvictionPolicy.Type#RANDOM}; default: 0.
         *
         * @param value the seed
         * @return this builder
         */
        public Builder optSeed(long value) {
            seed = value;
            return this;
        }

        /**
         * Checks the settings.
         *
         * @return the replay, which can be used for any number of traces
         */
        public LoadReplay build() {
            if (capacity < 1) {
                throw new IllegalArgumentException("capacity is " + capacity + ": set 1 or more");
            }
            if (admission == null) {
                throw new IllegalArgumentException("admission is null");
            }
            if (warmUpTokens < 0) {
                throw new IllegalArgumentException(
                        "warmUpTokens is " + warmUpTokens + ": set 0 or more");
            }
            if (!(gamma > 0 && gamma <= 1)) {
                throw new IllegalArgumentException(
                        "gamma is " + gamma + ": it must be above 0 and at most 1");
            }
            return new LoadReplay(this);
        }
    }
}
