package org.djlmoe.dispatch;

import org.djlmoe.dispatch.ChunkSchedule.Membership;

/** How the experts of a layer are dispatched over the ranks of a group. */
public enum DispatchMode {
    /** Expert parallelism as usual: every expert at home, the whole layer at once. */
    STANDARD(false, null),
    /** Routes are spread by {@link LeastLoadedPlanner}, the whole layer at once. */
    LEAST_LOADED(true, null),
    /** Spread, and in chunks of every K-th token. */
    PIPELINED_STRIDED(true, Membership.STRIDED),
    /** Spread, and in chunks that tokens are dealt to by destination. */
    PIPELINED_DEALT(true, Membership.DEALT),
    /** Spread, and in strided chunks, or dealt ones where strided would be uneven. */
    AUTOMATIC(true, Membership.AUTOMATIC);

    private final boolean planned;
    private final Membership membership;

    DispatchMode(boolean planned, Membership membership) {
        this.planned = planned;
        this.membership = membership;
    }

    /**
     * Returns whether routes are spread.
     *
     * @return false if every expert stays at home
     */
    public boolean isPlanned() {
        return planned;
    }

    /**
     * Returns whether a layer runs in chunks.
     *
     * @return false if it runs at once
     */
    public boolean isChunked() {
        return membership != null;
    }

    Membership membership() {
        return membership == null ? Membership.STRIDED : membership;
    }
}
