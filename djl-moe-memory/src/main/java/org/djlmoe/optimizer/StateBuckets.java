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

    /** One array in the tier: the parts of the state one after the other. */
    static final class Bucket {

        final int number;
        final String name;
        final List<Slab> slabs;
        final AdamWKernels.State state;

        Bucket(int number, String name, List<Slab> slabs, AdamWKernels.State state) {
            this.number = number;
            this.name = name;
            this.slabs = slabs;
            this.state = state;
        }
    }

    /** A part of the state, in the order in which they lie in a bucket. */
    enum Part {
        EXP_AVG,
        EXP_AVG_SQ,
        MASTER
    }

    /** Where a slab lies: its bucket and its position in the bucket's list. */
    record Place(int bucket, int index) {}

    /** What a parameter needs room for. */
    record Need(Shape shape, boolean master) {}

    /** What is known of a parameter: its slabs in the order of its elements, and its counts. */
    static final class Entry {

        final Shape shape;
        final boolean master;
        final List<Place> places = new ArrayList<>();

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
    private final long masterElements;
    private final List<Bucket> buckets = new ArrayList<>();
    private final Map<String, Entry> entries = new LinkedHashMap<>();

    /**
     * Creates buckets for no parameter yet.
     *
     * @param tier where they lie
     * @param bucketElements the largest size of a bucket
     * @param masterElements the same with masters
     */
    StateBuckets(Tier tier, long bucketElements, long masterElements) {
        this.tier = tier;
        this.bucketElements = bucketElements;
        this.masterElements = masterElements;
    }

    /**
     * Makes room, filled with zeros, for the parameters that have none; all of them or, if it
     * fails, none.
     *
     * @return the paths that room was made for
     * @throws IllegalStateException if there is state of another shape, or without the master that
     *     is needed, for one of them
     */
    List<String> ensure(Map<String, Need> parameters) {
        return ensure(List.of(parameters));
    }

    /** The same for several groups that share no bucket: room for all of them, or for none. */
    List<String> ensure(List<Map<String, Need>> groups) {
        Map<String, Entry> added = new LinkedHashMap<>();
        List<Bucket> made = new ArrayList<>();
        try {
            for (Map<String, Need> group : groups) {
                for (boolean master : new boolean[] {false, true}) {
                    Map<String, Long> sizes = new LinkedHashMap<>();
                    group.forEach(
                            (path, need) -> {
                                Entry entry = entries.get(path);
                                if (entry != null) {
                                    check(path, entry, need);
                                } else if (need.master == master) {
                                    added.put(path, new Entry(need));
                                    sizes.put(path, need.shape.size());
                                }
                            });
                    long limit = master ? masterElements : bucketElements;
                    for (List<Slab> slabs : BucketLayout.pack(sizes, limit)) {
                        made.add(allocate(buckets.size() + made.size(), slabs, master));
                    }
                }
            }
        } catch (RuntimeException e) {
            made.forEach(bucket -> tier.free(bucket.name));
            throw e;
        }
        for (Bucket bucket : made) {
            for (int i = 0; i < bucket.slabs.size(); i++) {
                added.get(bucket.slabs.get(i).path()).places.add(new Place(buckets.size(), i));
            }
            buckets.add(bucket);
        }
        entries.putAll(added);
        return List.copyOf(added.keySet());
    }

    private static void check(String path, Entry entry, Need need) {
        if (!entry.shape.equals(need.shape)) {
            throw new IllegalStateException(
                    path
                            + " has the shape "
                            + need.shape
                            + ", but there is optimizer state of the shape "
                            + entry.shape
                            + " for it; use a new optimizer for a new model");
        }
        if (need.master && !entry.master) {
            throw new IllegalStateException(
                    path
                            + " is of half precision, but its optimizer state holds no 32-bit"
                            + " master weight; use a new optimizer, or define the state with one");
        }
    }

    private Bucket allocate(int number, List<Slab> slabs, boolean master) {
        Slab last = slabs.get(slabs.size() - 1);
        long size = last.offset() + last.length();
        String name = String.format("bucket%06d", number);
        NDArray array = tier.allocate(name, (master ? 3 : 2) * size);
        return new Bucket(number, name, slabs, new AdamWKernels.State(array, size, master));
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
