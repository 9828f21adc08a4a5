package org.djlmoe.routing;

import ai.djl.ndarray.NDArray;

/** Sees which experts a router chose. */
@FunctionalInterface
public interface RoutingObserver {

    /**
     * Called once a forward pass, not again in backward.
     *
     * @param ids INT64 [N, topK], the chosen experts of N tokens; the array is the caller's, copy
     *     what is kept
     */
    void chosen(NDArray ids);
}
