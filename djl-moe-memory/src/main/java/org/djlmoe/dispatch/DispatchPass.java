package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.kernel.DispatchKernels;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.parallel.ProcessGroup;
import org.djlmoe.parallel.ProcessGroupException;
import org.djlmoe.parallel.Transfer;

/** What forward and backward of a layer across ranks have in common. */
abstract class DispatchPass implements AutoCloseable {

    final ProcessGroup group;
    final DispatchRoute route;
    final boolean overlap;
    final PassObserver observer;
    final NDArray x;
    final NDArray ids;
    final NDArray combine;
    final List<NDArray> weights;
    final long hidden;
    final int topK;
    final int ownExperts;
    final PassMemory memory;
    final LentExperts lent;
    final NDArray destinations;
    final NDArray table;
    final ExpertScratch scratch;

    private final List<Transfer> open = new ArrayList<>();
    private long rowBytesSent;

    DispatchPass(PipelinedDispatch dispatch, LayerInputs in, boolean backward) {
        group = dispatch.group();
        overlap = dispatch.overlaps();
        observer = dispatch.observer();
        route = in.route();
        x = in.x();
        ids = in.ids();
        combine = in.combine();
        weights = in.weights();
        hidden = x.getShape().get(1);
        topK = route.topK();
        NDArray down = weights.get(Weights.DOWN.ordinal());
        ownExperts = (int) down.getShape().get(0);
        memory = new PassMemory(x);
        destinations = memory.indices(route.destinations(), new Shape(route.tokens(), topK));
        lent = new LentExperts(group, route.plan(), memory, weights);
        table = memory.indices(memory.manager(), lent.slots(ownExperts));
        memory.add(8L * table.size());
        long rows = Math.max(1, route.chunkTokens());
        scratch =
                backward
                        ? ExpertScratch.backward(memory.manager(), rows, topK, weights)
                        : ExpertScratch.forward(memory.manager(), rows, topK, weights);
        memory.add(scratch.bytes());
    }

    abstract void run();

    int slots() {
        return ownExperts + lent.count();
    }

    ChunkRows chunk(int i) {
        return new ChunkRows(route, group.rank(), i, memory);
    }

    /** Width of a row that goes out: values, combine weights, experts. */
    long packed() {
        return hidden + 2L * topK;
    }

    NDArray receiveBuffer(long width) {
        return memory.values(route.receiveCapacity() * width);
    }

    NDArray sendBuffer(long width) {
        return memory.values(route.sendCapacity() * width);
    }

    void pack(NDArray tokens, long[] targets, long[] counts, NDArray to, long at) {
        DispatchKernels.pack(x, ids, combine, destinations, tokens, targets, counts, to, at);
    }

    /** Puts this rank's own rows behind those that have come. */
    void packOwn(ChunkRows c) {
        pack(c.ownTokens, new long[] {group.rank()}, new long[] {c.own}, c.rows, c.others);
    }

    Transfer exchange(NDArray send, long[] sendRows, NDArray receive, long[] receiveRows) {
        Transfer transfer = group.startAllToAll(send, sendRows, receive, receiveRows);
        open.add(transfer);
        for (long n : sendRows) {
            rowBytesSent += n * send.getShape().get(1) * 4;
        }
        if (!overlap) {
            await(transfer);
        }
        return transfer;
    }

    void await(Transfer transfer) {
        if (open.contains(transfer)) {
            transfer.await();
            open.remove(transfer);
        }
    }

    DispatchMetrics metrics() {
        return new DispatchMetrics(rowBytesSent, lent.bytesSent(), memory.peak());
    }

    /** Frees the pass's memory, once nobody reads or writes it any more. */
    @Override
    public void close() {
        open.addAll(lent.open());
        for (Transfer transfer : open) {
            try {
                transfer.await();
            } catch (ProcessGroupException e) {
                // What went wrong has been thrown already; this only waits.
                continue;
            }
        }
        memory.close();
    }
}
