package org.djlmoe.dispatch;

/** Sees a pass go from chunk to chunk: for tests. */
@FunctionalInterface
interface PassObserver {

    /** The experts of a chunk begin to compute. */
    void computes(int chunk);
}
