package org.djlmoe.parallel;

import ai.djl.ndarray.NDArray;
import java.util.Arrays;

/** The group of one process. It exchanges nothing, so it copies nothing. */
public final class SoloGroup implements ProcessGroup {

    private static final Transfer DONE = () -> {};

    @Override
    public int rank() {
        return 0;
    }

    @Override
    public int size() {
        return 1;
    }

    @Override
    public long[][] allGather(long[] values) {
        return new long[][] {values};
    }

    @Override
    public Transfer startAllToAll(
            NDArray send, long[] sendRows, NDArray receive, long[] receiveRows) {
        if (!Arrays.equals(sendRows, new long[1]) || !Arrays.equals(receiveRows, new long[1])) {
            throw new IllegalArgumentException(
                    "A group of one process has nobody to exchange rows with, but was given "
                            + Arrays.toString(sendRows)
                            + " to send and "
                            + Arrays.toString(receiveRows)
                            + " to receive");
        }
        return DONE;
    }

    @Override
    public Transfer startSend(NDArray array, int rank) {
        throw nobody(rank);
    }

    @Override
    public Transfer startReceive(NDArray array, int rank) {
        throw nobody(rank);
    }

    private static IllegalArgumentException nobody(int rank) {
        return new IllegalArgumentException(
                "There is no rank " + rank + " beside this one in a group of one process");
    }

    @Override
    public void sum(NDArray array) {}

    @Override
    public void barrier() {}

    @Override
    public void abort(Throwable cause) {}

    @Override
    public void close() {}
}
