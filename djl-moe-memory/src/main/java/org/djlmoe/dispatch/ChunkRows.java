package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import java.util.Arrays;
import java.util.stream.IntStream;
import java.util.stream.LongStream;
import org.djlmoe.kernel.DispatchKernels;
import org.djlmoe.parallel.Transfer;

/**
 * One chunk on its way: which tokens go to whom, and the parts of the pass's buffers that it
 * occupies.
 *
 * <p>Rows that come from others lie before this rank's own, which need not travel.
 */
final class ChunkRows implements AutoCloseable {

    private final PassMemory memory;
    private final NDManager manager;
    private final long bytes;

    final int chunk;
    final long[] rowsSent;
    final long[] rowsReceived;
    final long[] targets;
    final NDArray sentTokens;
    final NDArray ownTokens;
    final long sent;
    final long others;
    final long own;

    /** What must have arrived before the chunk can be computed. */
    Transfer rowsHere;

    Transfer gradientsHere;

    /** The chunk's results on their way back, and where this rank's come in. */
    Transfer resultsHere;

    NDArray rows;
    NDArray gradients;
    NDArray results;
    NDArray returned;

    ChunkRows(DispatchRoute route, int rank, int chunk, PassMemory memory) {
        this.memory = memory;
        this.chunk = chunk;
        manager = memory.manager().newSubManager();
        rowsSent = route.rowsSent(chunk);
        rowsReceived = route.rowsReceived(chunk);
        own = rowsReceived[rank];
        rowsReceived[rank] = 0;
        others = Arrays.stream(rowsReceived).sum();
        sent = Arrays.stream(rowsSent).sum();
        targets = LongStream.range(0, rowsSent.length).toArray();
        long[] away =
                IntStream.range(0, rowsSent.length)
                        .filter(r -> r != rank)
                        .mapToObj(r -> route.tokens(chunk, r))
                        .flatMapToLong(Arrays::stream)
                        .toArray();
        bytes = 8 * (sent + own);
        memory.add(bytes);
        sentTokens = memory.indices(manager, away);
        ownTokens = memory.indices(manager, route.tokens(chunk, rank));
    }

    long received() {
        return others + own;
    }

    NDArray view(NDArray flat, long count, long width) {
        return DispatchKernels.view(manager, flat, count, width);
    }

    /** This rank's own rows among those of the chunk. */
    NDArray ownOf(NDArray array) {
        return DispatchKernels.rows(manager, array, others, own);
    }

    @Override
    public void close() {
        memory.remove(bytes);
        manager.close();
    }
}
