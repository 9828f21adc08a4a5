package org.djlmoe.cache;

import java.util.Arrays;

/**
 * Which experts of one layer are in fast memory: C slots and a policy, ids only.
 *
 * <p>A token asks for its k experts at once. Hits are judged against the residents before the
 * token; then all k are residents (or, where the policy may decline them, see {@link
 * EvictionPolicy.Admission}, at least used) and others leave until C remain. So one token's experts
 * never evict one another, which takes C &gt;= k. Asking for the k one by one instead would let
 * them, and would make recency policies look far worse than they are.
 *
 * <p>Not thread safe. A token costs O(k C).
 */
public final class ExpertCache {

    private final int capacity;
    private final EvictionPolicy policy;
    private final boolean decline;

    /** Residents in no particular order, then the experts just loaded. */
    private final int[] residents;

    private int size;

    /** Where an expert lies in {@link #residents}, or -1. */
    private final int[] slot;

    private final int[] candidates;
    private final int[] loads;
    private int numLoads;
    private final int[] evictions;
    private int numEvictions;

    /**
     * Makes an empty cache.
     *
     * @param experts the number of experts of the layer
     * @param topK the most experts a token asks for
     * @param capacity C, the number of slots, at least topK; more than {@code experts} is the same
     *     as {@code experts}
     * @param policy a fresh policy that nothing else drives
     * @param admission whether a policy may decline
     */
    public ExpertCache(
            int experts,
            int topK,
            int capacity,
            EvictionPolicy policy,
            EvictionPolicy.Admission admission) {
        checkCapacity(capacity, topK);
        this.capacity = Math.min(capacity, experts);
        this.policy = policy;
        this.decline = admission == EvictionPolicy.Admission.OPTIONAL && policy.mayDecline();
        residents = new int[this.capacity + topK];
        candidates = new int[this.capacity + topK];
        loads = new int[topK];
        evictions = new int[topK];
        slot = new int[experts];
        Arrays.fill(slot, -1);
    }

    /**
     * Makes sure that a cache can hold what one token uses.
     *
     * @param capacity C
     * @param topK the most experts a token asks for
     * @throws IllegalArgumentException if it cannot, naming the capacity that could
     */
    public static void checkCapacity(int capacity, int topK) {
        if (capacity < topK) {
            throw new IllegalArgumentException(
                    "A cache of %d experts cannot hold the %d that one token uses at once: set a capacity of at least %d"
                            .formatted(capacity, topK, topK));
        }
    }

    /**
     * Puts experts in before the first token, without a load.
     *
     * @param ids distinct ids that are not resident
     * @throws IllegalArgumentException if they do not fit
     */
    public void preload(int... ids) {
        if (size + ids.length > capacity) {
            throw new IllegalArgumentException(
                    "Cannot preload %d experts into %d free slots of %d"
                            .formatted(ids.length, capacity - size, capacity));
        }
        for (int e : ids) {
            if (slot[e] >= 0) {
                throw new IllegalArgumentException("Expert " + e + " is resident already");
            }
            insert(e);
        }
    }

    /**
     * Serves one token.
     *
     * @param ids the token's distinct expert ids, from {@code from} on
     * @param from where they begin
     * @param k how many, at most topK
     * @return the number of misses, which are the loads to be made
     * @throws IllegalArgumentException if there are more than topK, or one is there twice
     */
    public int request(int[] ids, int from, int k) {
        checkDistinct(ids, from, k);
        numLoads = 0;
        numEvictions = 0;
        policy.requested(ids, from, k);
        int hits = 0;
        for (int i = from; i < from + k; i++) {
            int e = ids[i];
            if (slot[e] >= 0) {
                // Hits gather in front, so that what may leave is a contiguous rest.
                swap(hits++, slot[e]);
            } else {
                loads[numLoads++] = e;
            }
        }
        int before = size;
        for (int i = 0; i < numLoads; i++) {
            insert(loads[i]);
        }
        if (size > capacity) {
            int first = decline ? 0 : hits;
            int n = (decline ? size : before) - first;
            System.arraycopy(residents, first, candidates, 0, n);
            while (size > capacity) {
                int e = policy.victim(candidates, n);
                remove(e);
                int at = 0;
                while (candidates[at] != e) {
                    at++;
                }
                candidates[at] = candidates[--n];
                evictions[numEvictions++] = e;
            }
        }
        return numLoads;
    }

    /**
     * Returns what the last token missed.
     *
     * @return the ids to load, in the order of the request; a copy
     */
    public int[] loads() {
        return Arrays.copyOf(loads, numLoads);
    }

    /**
     * Returns what left after the last token, just loaded experts that the policy declined
     * included.
     *
     * @return the ids; a copy
     */
    public int[] evictions() {
        return Arrays.copyOf(evictions, numEvictions);
    }

    /**
     * Returns whether an expert is in fast memory.
     *
     * @param expert its id
     * @return whether it is resident
     */
    public boolean isResident(int expert) {
        return slot[expert] >= 0;
    }

    /**
     * Returns all residents.
     *
     * @return the ids, ascending; a copy
     */
    public int[] residents() {
        int[] ids = Arrays.copyOf(residents, size);
        Arrays.sort(ids);
        return ids;
    }

    /**
     * Returns the number of slots.
     *
     * @return C, at most the number of experts
     */
    public int capacity() {
        return capacity;
    }

    private void checkDistinct(int[] ids, int from, int k) {
        if (k > loads.length) {
            throw new IllegalArgumentException(
                    "A token asks for %d experts of a cache made for top-%d"
                            .formatted(k, loads.length));
        }
        for (int i = from; i < from + k; i++) {
            for (int j = from; j < i; j++) {
                if (ids[i] == ids[j]) {
                    throw new IllegalArgumentException(
                            "A token asks for expert " + ids[i] + " twice");
                }
            }
        }
    }

    private void insert(int e) {
        residents[size] = e;
        slot[e] = size++;
        policy.inserted(e);
    }

    private void remove(int e) {
        swap(slot[e], size - 1);
        size--;
        slot[e] = -1;
        policy.evicted(e);
    }

    private void swap(int i, int j) {
        int e = residents[i];
        int f = residents[j];
        residents[i] = f;
        residents[j] = e;
        slot[f] = i;
        slot[e] = j;
    }
}
