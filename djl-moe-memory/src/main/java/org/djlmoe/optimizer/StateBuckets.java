package org.djlmoe.optimizer;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.optimizer.BucketLayout.Slab;
import org.djlmoe.tier.Tier;

/**
 * The state of all parameters seen so far. A parameter that comes later gets buckets of its own, so
 * that what lies already never moves. Parameters with a master lie in other buckets than those
 * without.
 */
final class StateBuckets {

    /** One array in the tier. */
    static final class Bucket {

        final int number;
        final String name;
        final BucketState state;

        Bucket(int number, String name, BucketState state) {
            this.number = number;
            this.name = name;
            this.state = state;
        }
    }

    /** A part of a parameter, and the bucket that its state lies in. */
    record Place(Bucket bucket, Slab slab) {}

    /** What a parameter needs room for. */
    record Need(Shape shape, boolean master) {}

    /** What is known of a parameter: its slabs in the order of its elements, and its counts. */
    static final class Entry {

        final Shape shape;
        final boolean master;
        final List<Place> places = new ArrayList<>();

        /** Elements of the master that were written, those that were so twice counted twice. */
        long masterWritten;

        /** Whether the master holds a weight, and not the zeros that it was made of. */
        boolean hasWholeMaster() {
            return master && masterWritten >= shape.size();
        }

        /** How often it was updated: one number, or one an expert. */
        private long[] steps = {0};

        Entry(Need need) {
            shape = need.shape;
            master = need.master;
        }

        long[] steps() {
            return steps;
        }

        void setSteps(long[] counts) {
            steps = counts.clone();
        }

        /** From now on each expert of a stacked parameter has a count of its own. */
        void countByExpert(int experts) {
            if (steps.length == 1 && experts != 1) {
                long common = steps[0];
                steps = new long[experts];
                Arrays.fill(steps, common);
            }
        }
    }

    private final Tier tier;
    private final long bucketElements;
    private final List<Bucket> buckets = new ArrayList<>();
    private final Map<String, Entry> entries = new LinkedHashMap<>();

    /**
     * Creates buckets for no parameter yet.
     *
     * @param tier where they lie
     * @param bucketElements the largest size of a bucket
     */
    StateBuckets(Tier tier, long bucketElements) {
        this.tier = tier;
        this.bucketElements = bucketElements;
    }

    /**
     * Makes room, filled with zeros, for the parameters that have none; all of them or, if it
     * fails, none.
     *
     * @throws IllegalStateException if there is state of another shape for one of them, or with a
     *     master where none is needed, or the other way round
     */
    void ensure(Map<String, Need> parameters) {
        ensure(List.of(parameters));
    }

    /** The same for several groups that share no bucket: room for all of them, or for none. */
    void ensure(List<Map<String, Need>> groups) {
        groups.forEach(group -> group.forEach(this::check));
        Map<String, Entry> added = new LinkedHashMap<>();
        List<Bucket> made = new ArrayList<>();
        try {
            for (Map<String, Need> group : groups) {
                for (boolean master : new boolean[] {false, true}) {
                    Map<String, Long> sizes = new LinkedHashMap<>();
                    group.forEach(
                            (path, need) -> {
                                if (need.master == master && !entries.containsKey(path)) {
                                    added.put(path, new Entry(need));
                                    sizes.put(path, need.shape.size());
                                }
                            });
                    for (List<Slab> slabs : BucketLayout.pack(sizes, bucketElements)) {
                        Bucket bucket = allocate(buckets.size() + made.size(), slabs, master);
                        made.add(bucket);
                        slabs.forEach(
                                slab -> added.get(slab.path()).places.add(new Place(bucket, slab)));
                    }
                }
            }
        } catch (RuntimeException e) {
            made.forEach(bucket -> tier.free(bucket.name));
            throw e;
        }
        buckets.addAll(made);
        entries.putAll(added);
    }

    private void check(String path, Need need) {
        Entry entry = entries.get(path);
        if (entry == null) {
            return;
        }
        if (!entry.shape.equals(need.shape)) {
            throw new IllegalStateException(
                    path
                            + " has the shape "
                            + need.shape
                            + ", but there is optimizer state of the shape "
                            + entry.shape
                            + " for it; use a new optimizer for a new model");
        }
        if (need.master != entry.master) {
            throw new IllegalStateException(
                    path
                            + (need.master
                                    ? " is of half precision, but its optimizer state holds no"
                                    : " is no weight of half precision, but its optimizer state"
                                            + " holds a")
                            + " 32-bit master weight; use a new optimizer, or define the state as"
                            + " the weight needs it");
        }
    }

    private Bucket allocate(int number, List<Slab> slabs, boolean master) {
        Slab last = slabs.get(slabs.size() - 1);
        long elements = last.offset() + last.length();
        String name = String.format("bucket%06d", number);
        NDArray array = tier.allocate(name, BucketState.size(elements, master));
        return new Bucket(number, name, new BucketState(array, elements, master));
    }

    Map<String, Entry> entries() {
        return entries;
    }

    Bucket bucket(int number) {
        return buckets.get(number);
    }

    int count() {
        return buckets.size();
    }
}
