package org.djlmoe.optimizer;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.optimizer.BucketLayout.Slab;
import org.djlmoe.tier.Tier;

/**
 * The state of all parameters seen so far. A parameter that comes later gets buckets of its own, so
 * that what lies already never moves.
 */
final class StateBuckets {

    /** Two arrays in the tier, and for each slab in them how often it has been updated. */
    static final class Bucket {

        final List<Slab> slabs;
        final long[] steps;
        final NDArray expAvg;
        final NDArray expAvgSq;

        Bucket(List<Slab> slabs, NDArray expAvg, NDArray expAvgSq) {
            this.slabs = slabs;
            this.steps = new long[slabs.size()];
            this.expAvg = expAvg;
            this.expAvgSq = expAvgSq;
        }
    }

    /** Where a slab lies: its bucket and its position in the bucket's list. */
    record Place(int bucket, int index) {}

    /** What is known of a parameter: its shape and its slabs in the order of its elements. */
    record Entry(Shape shape, List<Place> places) {}

    private final Tier tier;
    private final long bucketElements;
    private final List<Bucket> buckets = new ArrayList<>();
    private final Map<String, Entry> entries = new LinkedHashMap<>();

    StateBuckets(Tier tier, long bucketElements) {
        this.tier = tier;
        this.bucketElements = bucketElements;
    }

    /**
     * Makes room, filled with zeros, for the parameters that have none.
     *
     * @throws IllegalStateException if there is state of another shape for one of them
     */
    void ensure(Map<String, Shape> parameters) {
        Map<String, Long> missing = new LinkedHashMap<>();
        parameters.forEach(
                (path, shape) -> {
                    Entry entry = entries.get(path);
                    if (entry == null) {
                        missing.put(path, shape.size());
                    } else if (!entry.shape.equals(shape)) {
                        throw new IllegalStateException(
                                path
                                        + " has the shape "
                                        + shape
                                        + ", but there is optimizer state of the shape "
                                        + entry.shape
                                        + " for it; use a new optimizer for a new model");
                    }
                });
        missing.keySet()
                .forEach(
                        path ->
                                entries.put(
                                        path, new Entry(parameters.get(path), new ArrayList<>())));
        for (List<Slab> slabs : BucketLayout.pack(missing, bucketElements)) {
            Slab last = slabs.get(slabs.size() - 1);
            long size = last.offset() + last.length();
            int number = buckets.size();
            String name = String.format("bucket%06d", number);
            Bucket bucket =
                    new Bucket(
                            slabs,
                            tier.allocate(name + ".exp_avg", size),
                            tier.allocate(name + ".exp_avg_sq", size));
            buckets.add(bucket);
            for (int i = 0; i < slabs.size(); i++) {
                entries.get(slabs.get(i).path()).places.add(new Place(number, i));
            }
        }
    }

    Map<String, Entry> entries() {
        return entries;
    }

    Bucket bucket(int number) {
        return buckets.get(number);
    }
}
