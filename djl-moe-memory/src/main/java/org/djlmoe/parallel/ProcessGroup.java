package org.djlmoe.parallel;

import ai.djl.ndarray.NDArray;

/**
 * The processes that train one model together, seen from one of them.
 *
 * <p>All but {@link #startSend} and {@link #startReceive} are collective: every rank calls the same
 * ones in the same order. What is started is carried out in the background, in the order of the
 * starts, each after the one before: an array that an earlier one sends may be received into by a
 * later one. Only {@link Transfer#await} waits.
 *
 * <p>No rank sees another's memory, and what is received lies in arrays of the caller. If a rank
 * fails, closes its group too early, or calls something else than the others, all ranks get a
 * {@link ProcessGroupException} that names it; none waits for ever. A group that failed stays
 * failed.
 *
 * <p>A group is used by one thread of a rank at a time.
 */
public interface ProcessGroup extends AutoCloseable {

    /**
     * Returns the number of this process.
     *
     * @return from 0 to {@link #size()} - 1
     */
    int rank();

    /**
     * Returns the number of processes.
     *
     * @return at least 1
     */
    int size();

    /**
     * Gives every rank the numbers of every other.
     *
     * @param values this rank's numbers; ranks may have different amounts
     * @return the numbers by rank
     */
    long[][] allGather(long[] values);

    /**
     * Starts an exchange in which every rank sends rows to every other. Rows for one rank lie
     * together, in the order of the ranks, in {@code send} as in {@code receive}. A rank sends
     * nothing to itself: its own rows need not move.
     *
     * @param send at least the sum of {@code sendRows} rows, [rows, width]
     * @param sendRows rows for each rank, 0 for this one
     * @param receive at least the sum of {@code receiveRows} rows, of the same width and type
     * @param receiveRows rows from each rank, 0 for this one
     * @return the exchange; until it has ended, {@code send} must not be changed, nor {@code
     *     receive} used
     */
    Transfer startAllToAll(NDArray send, long[] sendRows, NDArray receive, long[] receiveRows);

    /**
     * Starts to send a tensor. Tensors from one rank to another arrive in the order sent.
     *
     * @param array the tensor
     * @param rank who receives it, not this rank
     * @return the exchange
     */
    Transfer startSend(NDArray array, int rank);

    /**
     * Starts to receive a tensor.
     *
     * @param array filled; of the shape and type that is sent
     * @param rank who sends it, not this rank
     * @return the exchange
     */
    Transfer startReceive(NDArray array, int rank);

    /**
     * Replaces a tensor by the sum over all ranks, added in the order of the ranks.
     *
     * @param array of the same shape on every rank, changed in place
     */
    void sum(NDArray array);

    /** Returns when all ranks have called it. */
    void barrier();

    /**
     * Tells all ranks that this one has failed: whoever waits for it gets an exception.
     *
     * @param cause what happened
     */
    void abort(Throwable cause);

    /** Leaves the group. Who waits for this rank afterwards fails. */
    @Override
    void close();
}
