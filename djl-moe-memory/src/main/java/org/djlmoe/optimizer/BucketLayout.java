package org.djlmoe.optimizer;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;

/**
 * How the state of parameters is cut into buckets: one after the other in the given order, each
 * bucket filled before the next begins, a parameter cut where a bucket ends.
 *
 * <p>A parameter is cut after a multiple of {@link #UNIT} elements only. A kernel goes through a
 * slab in vectors, whose last bits differ from those of the few elements at a slab's end that fill
 * none. So where buckets end shows in no result, and a run may go on with others than it began.
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

    /** A multiple of what vectors hold on any processor. Buckets that are smaller ignore it. */
    static final int UNIT = 64;

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
        long unit = bucketElements < UNIT ? 1 : UNIT;
        long room = 0;
        for (Map.Entry<String, Long> parameter : elements.entrySet()) {
            long start = 0;
            while (start < parameter.getValue()) {
                long rest = parameter.getValue() - start;
                long length = rest <= room ? rest : room - room % unit;
                if (length == 0) {
                    buckets.add(new ArrayList<>());
                    room = bucketElements;
                    continue;
                }
                long offset = bucketElements - room;
                buckets.get(buckets.size() - 1)
                        .add(new Slab(parameter.getKey(), start, length, offset));
                start += length;
                room -= length;
            }
        }
        return buckets;
    }
}
