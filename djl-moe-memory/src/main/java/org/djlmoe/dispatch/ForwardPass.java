package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import org.djlmoe.kernel.DispatchKernels;

/**
 * Forward of a layer across ranks: two exchanges a chunk.
 *
 * <p>While chunk i computes, the results of chunk i - 1 go back and the rows of chunk i + 1 come.
 * Exchanges are carried out in order, so these rows may come into the memory that those results
 * leave, and three buffers of received rows are enough.
 */
final class ForwardPass extends DispatchPass {

    private final NDArray y;
    private NDArray send;

    ForwardPass(PipelinedDispatch dispatch, LayerInputs in, NDArray y) {
        super(dispatch, in, false);
        this.y = y;
    }

    @Override
    void run() {
        lent.fetch(weights);
        NDArray computed = receiveBuffer(packed());
        NDArray results = receiveBuffer(packed());
        NDArray arriving = route.chunks() > 1 ? receiveBuffer(packed()) : null;
        send = sendBuffer(packed());
        // A single chunk's rows have all left before its results come back.
        NDArray returned = route.chunks() > 1 ? sendBuffer(hidden) : send;
        ChunkRows last = null;
        ChunkRows next = dispatch(0, computed);
        lent.await();
        for (int i = 0; i < route.chunks(); i++) {
            ChunkRows c = next;
            await(c.rowsHere);
            packOwn(c);
            next = i + 1 < route.chunks() ? dispatch(i + 1, arriving) : null;
            c.results = c.view(results, c.received(), hidden);
            observer.computes(i);
            DispatchKernels.receivedForward(
                    c.rows, topK, table, slots(), weights, lent.weights(), scratch, c.results);
            DispatchKernels.add(c.ownOf(c.results), c.ownTokens, y);
            finish(last);
            c.returned = c.view(returned, c.sent, hidden);
            c.resultsHere = exchange(c.results, c.rowsReceived, c.returned, c.rowsSent);
            last = c;
            NDArray free = computed;
            computed = arriving;
            arriving = results;
            results = free;
        }
        finish(last);
    }

    private ChunkRows dispatch(int i, NDArray into) {
        ChunkRows c = chunk(i);
        NDArray out = c.view(send, c.sent, packed());
        pack(c.sentTokens, c.targets, c.rowsSent, out, 0);
        c.rows = c.view(into, c.received(), packed());
        c.rowsHere = exchange(out, c.rowsSent, c.rows, c.rowsReceived);
        return c;
    }

    private void finish(ChunkRows c) {
        if (c != null) {
            await(c.resultsHere);
            DispatchKernels.add(c.returned, c.sentTokens, y);
            c.close();
        }
    }
}
