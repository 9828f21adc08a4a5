package org.djlmoe.cache;

import com.google.gson.annotations.SerializedName;
import java.util.Arrays;
import java.util.stream.Collectors;

/**
 * Decides which expert leaves a full cache: the state of one layer. Not thread safe.
 *
 * <p>{@link ExpertCache} drives it. For each token: {@link #requested} with all k ids, then {@link
 * #inserted} for each that was not resident, then {@link #victim} and {@link #evicted} until the
 * residents fit. Ids are below the number of experts that the policy was made for.
 */
public interface EvictionPolicy {

    /** The discount of {@link Type#DISCOUNTED} where none is set. */
    double DEFAULT_GAMMA = 0.95;

    /**
     * Hears what a token asks for, hits and misses alike.
     *
     * @param ids the token's k distinct ids, from {@code from} on; not kept
     * @param from where they begin
     * @param k how many
     */
    void requested(int[] ids, int from, int k);

    /**
     * Hears that an expert became resident.
     *
     * @param expert its id
     */
    void inserted(int expert);

    /**
     * Hears that an expert left.
     *
     * @param expert its id
     */
    void evicted(int expert);

    /**
     * Chooses who leaves.
     *
     * @param candidates ids, the first {@code n} count; not to be changed or kept
     * @param n how many, at least 1
     * @return one of them
     */
    int victim(int[] candidates, int n);

    /**
     * Returns whether the policy can say no to an expert that was just used, where the cache lets
     * it ({@link Admission#OPTIONAL}).
     *
     * @return whether a just used expert may be a candidate
     */
    boolean mayDecline();

    /** Whether an expert must occupy a slot of the cache to be used. */
    enum Admission {
        /**
         * It must. A token's k experts are residents when it is computed and never evict one
         * another; fast memory holds C experts and nothing else.
         */
        @SerializedName("always")
        ALWAYS,
        /**
         * It may pass through a staging buffer of k experts <em>beside</em> the C slots, so that a
         * policy can leave the residents as they are. Fast memory holds C + k experts.
         */
        @SerializedName("optional")
        OPTIONAL
    }

    /**
     * The policies by name. Of equal candidates the lower id is evicted.
     *
     * <p>A token is one tick: its k experts are used at the same time and count once each.
     */
    enum Type {
        /** Evicts the least recently used. */
        @SerializedName("lru")
        LRU("lru"),
        /** Evicts the least used since it came in; an evicted expert's count is forgotten. */
        @SerializedName("lfu")
        LFU("lfu"),
        /** Keeps the most frequent: evicts the least used since the cache was made. May decline. */
        @SerializedName("lfu_lifetime")
        LFU_LIFETIME("lfu_lifetime"),
        /** Evicts the longest resident. */
        @SerializedName("fifo")
        FIFO("fifo"),
        /** Evicts any, uniformly. */
        @SerializedName("random")
        RANDOM("random"),
        /**
         * Evicts the least gamma-discounted frequency: a use t tokens ago weighs gamma^t. May
         * decline.
         */
        @SerializedName("discounted")
        DISCOUNTED("discounted"),
        /**
         * Prefers a fixed set: others leave first, the least recently used of them ahead; a member
         * leaves only if no other candidate is there, and comes back when it is next asked for. May
         * decline.
         */
        @SerializedName("static")
        STATIC("static"),
        /**
         * The bound: evicts the farthest next use, which takes knowing the future. May decline.
         *
         * <p>Among the residents that the token does not use itself this is the fewest loads that
         * any policy can have (L. A. Belady, 1966, for requests of one item; the exchange argument
         * carries over to k at once, since experts that return with the same token cost the same).
         * So it is with {@link Admission#OPTIONAL} among residents and used ones together.
         */
        @SerializedName("belady")
        BELADY("belady");

        private final String jsonName;

        Type(String jsonName) {
            this.jsonName = jsonName;
        }

        /**
         * Returns the name in files and options.
         *
         * @return lower case with underscores
         */
        public String jsonName() {
            return jsonName;
        }

        /**
         * Returns whether the policy can say no to an expert that was just used; for others {@link
         * Admission#OPTIONAL} is the same as {@link Admission#ALWAYS}.
         *
         * @return as {@link EvictionPolicy#mayDecline}
         */
        public boolean mayDecline() {
            return switch (this) {
                case LRU, LFU, FIFO, RANDOM -> false;
                case LFU_LIFETIME, DISCOUNTED, STATIC, BELADY -> true;
            };
        }

        /**
         * Finds a policy by its name in files and options.
         *
         * @param name as {@link #jsonName()}
         * @return the policy
         * @throws IllegalArgumentException if there is none, naming those there are
         */
        public static Type of(String name) {
            return Arrays.stream(values())
                    .filter(t -> t.jsonName.equals(name))
                    .findFirst()
                    .orElseThrow(
                            () ->
                                    new IllegalArgumentException(
                                            "No eviction policy '%s': choose one of %s"
                                                    .formatted(
                                                            name,
                                                            Arrays.stream(values())
                                                                    .map(Type::jsonName)
                                                                    .collect(
                                                                            Collectors.joining(
                                                                                    ", ")))));
        }
    }

    /**
     * Evicts the least recently used.
     *
     * @param experts the number of experts
     * @return the policy
     */
    static EvictionPolicy lru(int experts) {
        return new ScoredPolicies.Lru(experts);
    }

    /**
     * Evicts the least used since it came in.
     *
     * @param experts the number of experts
     * @return the policy
     */
    static EvictionPolicy lfu(int experts) {
        return new ScoredPolicies.Lfu(experts);
    }

    /**
     * Keeps the most frequent by lifetime counts.
     *
     * @param experts the number of experts
     * @return the policy
     */
    static EvictionPolicy lfuLifetime(int experts) {
        return new ScoredPolicies.Discounted(experts, 1);
    }

    /**
     * Evicts the longest resident.
     *
     * @param experts the number of experts
     * @return the policy
     */
    static EvictionPolicy fifo(int experts) {
        return new ScoredPolicies.Fifo(experts);
    }

    /**
     * Evicts any.
     *
     * @param seed decides every choice
     * @return the policy
     */
    static EvictionPolicy random(long seed) {
        return new RandomPolicy(seed);
    }

    /**
     * Evicts the least discounted frequency.
     *
     * @param experts the number of experts
     * @param gamma the weight of a use one token older, above 0, at most 1 (lifetime counts)
     * @return the policy
     */
    static EvictionPolicy discounted(int experts, double gamma) {
        return new ScoredPolicies.Discounted(experts, gamma);
    }

    /**
     * Prefers a fixed set.
     *
     * @param members whether an expert is in the set, [experts]
     * @return the policy
     */
    static EvictionPolicy fixed(boolean[] members) {
        return new ScoredPolicies.Fixed(members);
    }

    /**
     * Makes the policy of one layer.
     *
     * @param type which policy; not {@link Type#BELADY}, which takes knowing a trace
     * @param experts the number of experts
     * @param gamma the discount of {@link Type#DISCOUNTED}
     * @param members the set of {@link Type#STATIC}, [experts]; others do not look at it
     * @param seed decides the choices of {@link Type#RANDOM}, see {@link #layerSeed}
     * @return a fresh policy
     * @throws IllegalArgumentException for Belady's, and for a static policy without a set
     */
    static EvictionPolicy of(Type type, int experts, double gamma, boolean[] members, long seed) {
        return switch (type) {
            case LRU -> lru(experts);
            case LFU -> lfu(experts);
            case LFU_LIFETIME -> lfuLifetime(experts);
            case FIFO -> fifo(experts);
            case RANDOM -> random(seed);
            case DISCOUNTED -> discounted(experts, gamma);
            case STATIC -> {
                if (members == null) {
                    throw new IllegalArgumentException(
                            "The static policy needs its set: say which experts it prefers");
                }
                yield fixed(members);
            }
            case BELADY ->
                    throw new IllegalArgumentException(
                            "Belady's policy knows the future, which only a replayed trace has:"
                                    + " choose another one");
        };
    }

    /**
     * Gives every layer random choices of its own.
     *
     * @param seed the seed of all layers
     * @param layer the MoE layer
     * @param firstToken the token of the trace that the policy hears first
     * @return the seed of the layer's policy
     */
    static long layerSeed(long seed, int layer, int firstToken) {
        return (seed * 31 + layer) * 31 + firstToken;
    }
}
