package org.djlmoe.optimizer;

import ai.djl.ndarray.NDArray;
import java.util.List;

/**
 * The state of one bucket: its parts one after the other in a flat F32 array.
 *
 * @param array where they lie
 * @param elements the number of elements of each part
 * @param master whether weights are of half precision, so that their masters are a part
 */
record BucketState(NDArray array, long elements, boolean master) {

    /** What is kept of each element, in the order in which the parts lie. */
    enum Part {
        EXP_AVG,
        EXP_AVG_SQ,
        MASTER;

        static List<Part> of(boolean master) {
            return master ? List.of(values()) : List.of(EXP_AVG, EXP_AVG_SQ);
        }
    }

    /** Returns the size of the whole state of a bucket. */
    static long size(long elements, boolean master) {
        return Part.of(master).size() * elements;
    }

    /** Returns where a part begins. */
    long first(Part part) {
        return part.ordinal() * elements;
    }
}
