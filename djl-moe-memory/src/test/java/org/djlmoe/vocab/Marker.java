package org.djlmoe.vocab;

import ai.djl.ndarray.NDArray;
import java.nio.FloatBuffer;

/** Writes into an array's memory where nobody counts it. */
final class Marker {

    private Marker() {}

    static void overwriteBehindTheBack(NDArray array) {
        FloatBuffer memory = array.toByteBuffer(true).asFloatBuffer();
        for (int i = 0; i < memory.limit(); i++) {
            memory.put(i, 1e6f);
        }
    }
}
