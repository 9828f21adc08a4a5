package org.djlmoe.serving;

import ai.djl.ndarray.NDArray;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertCache;
import org.djlmoe.kernel.DecodeKernels;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.routing.ExpertMask;

/**
 * Experts in a slower tier, C a layer in fast memory.
 *
 * <p>The idea: an {@link ExpertCache} a layer says, token by token, which experts to load and which
 * to drop; a loader thread reads them into fixed slots while the resident ones are computed. The
 * order of the sum over a token's experts does not depend on who came first, so results are those
 * of {@link ResidentExperts}, bit for bit.
 *
 * <p>Bound: {@code layers * C + k + p} slots of one expert, made at the start; p is k with prefetch
 * and 0 without. The k spare slots let loads begin before anything is dropped.
 *
 * <p>What is counted as a miss is what {@code LoadReplay} predicts for the same routing. The tokens
 * of a prompt chunk are heard one by one, as the replay does, but each expert that several of them
 * miss is loaded once. A prefetch goes into a spare slot, evicts nobody and is unknown to the
 * policy; if the token wants it, it becomes the miss's load.
 *
 * <p>One thread uses it, with one {@link IncrementalDecoder}. Slots are in the CPU's memory. After
 * a failed load, or a step that ended between a layer's routing and its experts, nothing more can
 * be computed: close it and make a new one.
 *
 * <p>Do not use it where all experts fit: {@link ResidentExperts} has no waiting at all.
 */
public final class OffloadedExperts extends ServedExperts {

    private final ExpertStore store;
    private final ExpertLayout layout;
    private final int topK;
    private final int capacity;
    private final EvictionPolicy.Type policy;
    private final Prefetch prefetch;
    private final ExpertCache[] caches;
    private final long[][] uses;
    private final ExpertSlots slots;
    private final SlotTable table;
    private final ExpertLoader loader;
    private final int maxSpeculative;
    private final List<Speculation> speculations = new ArrayList<>();

    private RuntimeException broken;
    private boolean closed;

    // Between begin and compute.
    private boolean begun;
    private int layer;
    private Routes routes;
    private int[] resident;
    private int[] missing;
    private ExpertLoader.Load[] loads;
    private int submitted;

    private OffloadedExperts(Builder builder) {
        store = builder.store;
        layout = store.layout();
        topK = builder.topK;
        policy = builder.policy;
        prefetch = builder.prefetch;
        caches = new ExpertCache[layout.layers()];
        for (int l = 0; l < caches.length; l++) {
            boolean[] members = builder.fixed == null ? null : builder.fixed.kept(l);
            caches[l] =
                    new ExpertCache(
                            layout.experts(),
                            topK,
                            builder.capacity,
                            EvictionPolicy.of(
                                    policy,
                                    layout.experts(),
                                    builder.gamma,
                                    members,
                                    EvictionPolicy.layerSeed(builder.seed, l, 0)),
                            builder.admission);
        }
        capacity = caches[0].capacity();
        uses = new long[layout.layers()][layout.experts()];
        maxSpeculative = prefetch == Prefetch.OFF ? 0 : topK;
        int total = layout.layers() * capacity + topK + maxSpeculative;
        table = new SlotTable(layout.layers(), layout.experts(), total);
        slots = new ExpertSlots(layout, total);
        loader = new ExpertLoader(store);
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
     * A load ahead of its layer, or, once that has passed, a slot that is still being read into.
     */
    private static final class Speculation {
        final ExpertLoader.Load load;
        final int slot;
        boolean passed;

        Speculation(ExpertLoader.Load load, int slot) {
            this.load = load;
            this.slot = slot;
        }
    }

    @Override
    void requireFor(MoeConfig config) {
        layout.requireFor(config);
        if (config.topK() != topK) {
            throw new IllegalArgumentException(
                    "These experts are set up for top-%d, the model uses top-%d"
                            .formatted(topK, config.topK()));
        }
    }

    @Override
    void begin(int layer, long[] ids, boolean decoding) {
        requireUsable();
        if (begun) {
            broken = new IllegalStateException("A layer was begun and never computed");
            requireUsable();
        }
        begun = true;
        this.layer = layer;
        countAs(decoding);
        long misses = hear(layer, ids);
        routes = new Routes(ids, layout.experts());
        dropUnused(layer);
        split();
        long hits = useSpeculations();
        long tokens = layer == 0 ? ids.length / topK : 0;
        count(new ExpertTraffic(tokens, ids.length, misses, 0, 0, hits, 0, 0, 0));
        submit();
    }

    /** Tells the policy token by token, as a replay would; returns the misses. */
    private long hear(int layer, long[] ids) {
        int[] token = new int[topK];
        long misses = 0;
        for (int i = 0; i < ids.length; i += topK) {
            for (int j = 0; j < topK; j++) {
                token[j] = (int) ids[i + j];
                uses[layer][token[j]]++;
            }
            misses += caches[layer].request(token, 0, topK);
        }
        return misses;
    }

    /** Frees the slots of experts that have left the cache and that no token here uses. */
    private void dropUnused(int layer) {
        for (int e = 0; e < layout.experts(); e++) {
            if (table.slot(layer, e) >= 0 && !caches[layer].isResident(e) && !routes.has(e)) {
                table.release(layer, e);
            }
        }
    }

    /** Those that are there, and those to load; of these the ones that do not stay come first. */
    private void split() {
        int[] experts = routes.experts();
        resident = Arrays.stream(experts).filter(e -> table.slot(layer, e) >= 0).toArray();
        int[] absent = Arrays.stream(experts).filter(e -> table.slot(layer, e) < 0).toArray();
        missing = new int[absent.length];
        int n = 0;
        for (boolean stays : new boolean[] {false, true}) {
            for (int e : absent) {
                if (caches[layer].isResident(e) == stays) {
                    missing[n++] = e;
                }
            }
        }
        loads = new ExpertLoader.Load[n];
        submitted = 0;
    }

    /** Turns prefetches of this layer into loads where they were right; returns how often. */
    private long useSpeculations() {
        long hits = 0;
        for (Iterator<Speculation> all = speculations.iterator(); all.hasNext(); ) {
            Speculation s = all.next();
            if (s.passed || s.load.layer() != layer) {
                continue;
            }
            int at = 0;
            while (at < missing.length && missing[at] != s.load.expert()) {
                at++;
            }
            if (at < missing.length) {
                loader.promote(s.load);
                table.assign(layer, missing[at], s.slot);
                loads[at] = s.load;
                hits++;
                all.remove();
            } else if (loader.cancel(s.load)) {
                table.giveBack(s.slot);
                count(new ExpertTraffic(0, 0, 0, 0, -1, 0, -layout.bytes(), 0, 0));
                all.remove();
            } else {
                s.passed = true;
            }
        }
        return hits;
    }

    /** Asks for what is missing, as far as slots are free. */
    private void submit() {
        while (submitted < missing.length) {
            if (loads[submitted] == null) {
                if (table.free() == 0) {
                    return;
                }
                int slot = table.take();
                int e = missing[submitted];
                table.assign(layer, e, slot);
                loads[submitted] = loader.demand(layer, e, slots.memory(slot));
                count(new ExpertTraffic(0, 0, 0, 1, 0, 0, layout.bytes(), 0, 0));
            }
            submitted++;
        }
    }

    @Override
    boolean wantsForecast() {
        return prefetch == Prefetch.ROUTER;
    }

    @Override
    void prefetch(int next, long[] ids) {
        if (prefetch == Prefetch.OFF) {
            return;
        }
        reclaim();
        int[] wanted =
                prefetch == Prefetch.ROUTER
                        ? Arrays.stream(ids).mapToInt(id -> (int) id).toArray()
                        : mostUsedAbsent(next);
        for (int e : wanted) {
            if (speculations.size() < maxSpeculative
                    && table.free() > 0
                    && table.slot(next, e) < 0) {
                int slot = table.take();
                speculations.add(
                        new Speculation(loader.speculate(next, e, slots.memory(slot)), slot));
                count(new ExpertTraffic(0, 0, 0, 0, 1, 0, layout.bytes(), 0, 0));
            }
        }
    }

    private int[] mostUsedAbsent(int next) {
        int[] absent = new int[topK];
        int n = 0;
        boolean[] taken = new boolean[layout.experts()];
        while (n < topK) {
            int best = -1;
            for (int e = 0; e < taken.length; e++) {
                if (!taken[e]
                        && table.slot(next, e) < 0
                        && uses[next][e] > (best < 0 ? 0 : uses[next][best])) {
                    best = e;
                }
            }
            if (best < 0) {
                break;
            }
            taken[best] = true;
            absent[n++] = best;
        }
        return Arrays.copyOf(absent, n);
    }

    /** Frees slots whose unwanted reads have ended. */
    private void reclaim() {
        for (Iterator<Speculation> all = speculations.iterator(); all.hasNext(); ) {
            Speculation s = all.next();
            if (s.passed && loader.hasEnded(s.load)) {
                table.giveBack(s.slot);
                count(new ExpertTraffic(0, 0, 0, 0, 0, 0, 0, 0, loader.nanos(s.load)));
                all.remove();
            }
        }
    }

    @Override
    void compute(NDArray h, NDArray out) {
        requireUsable();
        try {
            for (int e : resident) {
                run(e, h, out);
            }
            for (int i = 0; i < missing.length; i++) {
                long waited = loader.await(loads[i]);
                long read = loader.nanos(loads[i]);
                count(new ExpertTraffic(0, 0, 0, 0, 0, 0, 0, waited, read));
                run(missing[i], h, out);
            }
            begun = false;
        } catch (RuntimeException e) {
            broken = e;
            throw e;
        }
    }

    private void run(int e, NDArray h, NDArray out) {
        int slot = table.slot(layer, e);
        DecodeKernels.expert(h, slots.gateUp(slot), slots.down(slot), routes.of(e), topK, out);
        if (!caches[layer].isResident(e)) {
            table.release(layer, e);
            submit();
        }
    }

    private void requireUsable() {
        if (closed) {
            throw new IllegalStateException("The experts are closed");
        }
        if (broken != null) {
            throw new IllegalStateException(
                    "A load or a step has failed before, so that the slots are no longer what the"
                            + " cache says: close these experts and make new ones",
                    broken);
        }
    }

    @Override
    public long residentBytes() {
        return slots.bytes();
    }

    /**
     * Returns which experts of a layer are in fast memory.
     *
     * @param layer the MoE layer
     * @return the ids, ascending
     */
    public int[] residents(int layer) {
        return caches[layer].residents();
    }

    /** Returns the number of free slots. */
    int freeSlots() {
        return table.free();
    }

    /** Returns the number of slots. */
    int totalSlots() {
        return slots.count();
    }

    @Override
    public String describe() {
        return "%d of %d experts a layer resident, %s, prefetch %s, from %s"
                .formatted(
                        capacity, layout.experts(), policy.jsonName(), prefetch, store.describe());
    }

    /** Waits for a running read, then frees the slots. The store stays open. */
    @Override
    public void close() {
        if (!closed) {
            closed = true;
            // The slots are written to until the loader has ended.
            loader.close();
            slots.close();
        }
    }

    /** Settings of offloaded experts. */
    public static final class Builder {

        private ExpertStore store;
        private int capacity;
        private int topK;
        private EvictionPolicy.Type policy = EvictionPolicy.Type.LFU_LIFETIME;
        private EvictionPolicy.Admission admission = EvictionPolicy.Admission.ALWAYS;
        private Prefetch prefetch = Prefetch.OFF;
        private double gamma = EvictionPolicy.DEFAULT_GAMMA;
        private ExpertMask fixed;
        private long seed;

        private Builder() {}

        /**
         * Sets the slower tier.
         *
         * @param value the store; it must outlive the experts and serve nobody else meanwhile
         * @return this builder
         */
        public Builder setStore(ExpertStore value) {
            store = value;
            return this;
        }

        /**
         * Sets the cache size.
         *
         * @param experts C, slots a layer, at least k
         * @return this builder
         */
        public Builder setCapacity(int experts) {
            capacity = experts;
            return this;
        }

        /**
         * Sets k.
         *
         * @param value experts a token, as in the model's configuration
         * @return this builder
         */
        public Builder setTopK(int value) {
            topK = value;
            return this;
        }

        /**
         * Sets who leaves a full cache; default: the least used since the start.
         *
         * @param value any policy but Belady's
         * @return this builder
         */
        public Builder optPolicy(EvictionPolicy.Type value) {
            policy = value;
            return this;
        }

        /**
         * Sets whether a policy may decline an expert that was just used; default: it may not.
         *
         * @param value the admission
         * @return this builder
         */
        public Builder optAdmission(EvictionPolicy.Admission value) {
            admission = value;
            return this;
        }

        /**
         * Sets what is loaded ahead; default: nothing.
         *
         * @param value the way
         * @return this builder
         */
        public Builder optPrefetch(Prefetch value) {
            prefetch = value;
            return this;
        }

        /**
         * Sets the discount of the discounted policy; default: 0.95.
         *
         * @param value above 0, at most 1
         * @return this builder
         */
        public Builder optGamma(double value) {
            gamma = value;
            return this;
        }

        /**
         * Sets what the static policy prefers.
         *
         * @param mask at most C experts a layer
         * @return this builder
         */
        public Builder optStaticSet(ExpertMask mask) {
            fixed = mask;
            return this;
        }

        /**
         * Sets what decides the choices of the random policy; default: 0.
         *
         * @param value the seed
         * @return this builder
         */
        public Builder optSeed(long value) {
            seed = value;
            return this;
        }

        /**
         * Makes the slots and starts the loader thread.
         *
         * @return the experts, none of them resident yet
         * @throws IllegalArgumentException if C is below k, or the policy cannot serve
         */
        public OffloadedExperts build() {
            if (store == null) {
                throw new IllegalArgumentException("Offloaded experts need a store: call setStore");
            }
            ExpertLayout layout = store.layout();
            if (topK < 1 || topK > layout.experts()) {
                throw new IllegalArgumentException(
                        "topK is %d: set the model's, 1 to %d".formatted(topK, layout.experts()));
            }
            ExpertCache.checkCapacity(capacity, topK);
            if (fixed != null) {
                if (fixed.numLayers() != layout.layers()
                        || fixed.numExperts() != layout.experts()) {
                    throw new IllegalArgumentException(
                            "The static set is for %d layers of %d experts, the store has %d of %d"
                                    .formatted(
                                            fixed.numLayers(),
                                            fixed.numExperts(),
                                            layout.layers(),
                                            layout.experts()));
                }
                for (int l = 0; l < fixed.numLayers(); l++) {
                    if (fixed.count(l) > capacity) {
                        throw new IllegalArgumentException(
                                "The static set of layer %d counts %d, more than the capacity of %d"
                                        .formatted(l, fixed.count(l), capacity));
                    }
                }
            }
            return new OffloadedExperts(this);
        }
    }
}
