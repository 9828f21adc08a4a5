package org.djlmoe.parallel;

/** An exchange under way. */
public interface Transfer {

    /**
     * Waits until the exchange has ended on this rank: what it receives is there, and what it sends
     * may be changed. When this throws, nothing of the exchange touches the caller's arrays any
     * more, so they may be freed.
     *
     * @throws ProcessGroupException if a rank has failed
     */
    void await();
}
