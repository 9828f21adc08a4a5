package org.djlmoe.routing;

import ai.djl.ndarray.NDArray;

/** Sees which experts a router chose. */
@FunctionalInterface
public interface RoutingObserver {

    /**
     * Called once a forward pass; in backward only if the block is inside a {@code Checkpointed}
     * one.
     *
     * @param ids INT64 [N, topK], the chosen experts of N tokens; the array is the caller's, copy
     *     what is kept
     */
    void chosen(NDArray ids);
}
