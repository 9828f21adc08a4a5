package org.djlmoe.examples.serving;

import java.nio.file.Path;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.serving.Packing;
import org.djlmoe.serving.Prefetch;

/**
 * Where a model's experts are while it is served.
 *
 * @param expertCache C, experts a layer in fast memory; 0 for all of them, resident from the start
 * @param policy who leaves a full cache; the static one prefers the prior's experts
 * @param admission whether a policy may decline an expert that was just used
 * @param prefetch what is loaded ahead
 * @param tier where the experts are that are not in fast memory
 * @param cold whether every load comes from the disk and not from the system's page cache
 * @param packing element type and zero padding of the experts
 * @param store the packed file, made if it is not there or does not fit; null for a temporary one
 * @param seed decides the choices of the random policy
 */
public record ServingSettings(
        int expertCache,
        EvictionPolicy.Type policy,
        EvictionPolicy.Admission admission,
        Prefetch prefetch,
        Tier tier,
        boolean cold,
        Packing packing,
        Path store,
        long seed) {

    /** Where experts are loaded from. */
    public enum Tier {
        /** A packed file. */
        FILE,
        /** Host memory. */
        HOST
    }

    /** Checks what does not go together. */
    public ServingSettings {
        if (cold && (tier != Tier.FILE || expertCache == 0)) {
            throw new IllegalArgumentException(
                    "Cold reads need experts that are loaded from a file");
        }
    }

    /**
     * Returns the defaults for a cache size: keep the most used, from a file, without prefetch.
     *
     * @param expertCache C
     * @return the settings
     */
    public static ServingSettings offloaded(int expertCache) {
        return new ServingSettings(
                expertCache,
                EvictionPolicy.Type.LFU_LIFETIME,
                EvictionPolicy.Admission.ALWAYS,
                Prefetch.OFF,
                Tier.FILE,
                false,
                Packing.EXACT,
                null,
                0);
    }

    /**
     * Returns settings that keep all experts in fast memory.
     *
     * @param packing element type and zero padding
     * @return the settings
     */
    public static ServingSettings allResident(Packing packing) {
        return offloaded(0).withPacking(packing);
    }

    /**
     * Returns these settings with another policy.
     *
     * @param value who leaves a full cache
     * @return the settings
     */
    public ServingSettings withPolicy(EvictionPolicy.Type value) {
        return new ServingSettings(
                expertCache, value, admission, prefetch, tier, cold, packing, store, seed);
    }

    /**
     * Returns these settings with another packing.
     *
     * @param value element type and zero padding
     * @return the settings
     */
    public ServingSettings withPacking(Packing value) {
        return new ServingSettings(
                expertCache, policy, admission, prefetch, tier, cold, value, store, seed);
    }

    /**
     * Returns these settings with or without cold reads.
     *
     * @param value whether every load comes from the disk
     * @return the settings
     */
    public ServingSettings withCold(boolean value) {
        return new ServingSettings(
                expertCache, policy, admission, prefetch, tier, value, packing, store, seed);
    }

    /**
     * Returns these settings with another prefetch.
     *
     * @param value what is loaded ahead
     * @return the settings
     */
    public ServingSettings withPrefetch(Prefetch value) {
        return new ServingSettings(
                expertCache, policy, admission, value, tier, cold, packing, store, seed);
    }

    /**
     * Returns these settings with another tier.
     *
     * @param value where experts are loaded from
     * @return the settings
     */
    public ServingSettings withTier(Tier value) {
        return new ServingSettings(
                expertCache, policy, admission, prefetch, value, cold, packing, store, seed);
    }
}
