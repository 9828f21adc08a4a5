package org.djlmoe.optimizer;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/**
 * How the state of parameters is cut into buckets: one after the other in the given order, each
 * bucket filled to the brim before the next begins, a parameter cut wherever a bucket ends.
 */
final class BucketLayout {

    /**
     * A run of a parameter's elements whose state lies in one piece.
     *
     * @param path the parameter
     * @param start the first element, counted in the flattened parameter
     * @param length the number of elements, at least 1
     * @param offset where the state of the first element lies in the bucket
     */
    record Slab(String path, long start, long length, long offset) {}

    private BucketLayout() {}

    /**
     * Cuts parameters into buckets.
     *
     * @param elements the size of each parameter by path, in order
     * @param bucketElements the size of a bucket
     * @return the slabs of each bucket
     */
    static List<List<Slab>> pack(Map<String, Long> elements, long bucketElements) {
        List<List<Slab>> buckets = new ArrayList<>();
        long used = bucketElements;
        for (Map.Entry<String, Long> parameter : elements.entrySet()) {
            long start = 0;
            while (start < parameter.getValue()) {
                if (used == bucketElements) {
                    buckets.add(new ArrayList<>());
                    used = 0;
                }
                long length = Math.min(parameter.getValue() - start, bucketElements - used);
                buckets.get(buckets.size() - 1)
                        .add(new Slab(parameter.getKey(), start, length, used));
                start += length;
                used += length;
            }
        }
        return buckets;
    }
}
