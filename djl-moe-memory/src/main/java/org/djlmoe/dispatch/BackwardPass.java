package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import java.util.List;
import org.djlmoe.kernel.DispatchKernels;

/**
 * Backward of a layer across ranks: three exchanges a chunk. The rows go out once more instead of
 * having been kept, with them the gradients of their outputs; the gradients of the rows and of
 * their combine weights come back. See {@link ForwardPass} about the buffers.
 */
final class BackwardPass extends DispatchPass {

    private final NDArray g;
    private final List<NDArray> gradients;
    private final NDArray dx;
    private final NDArray dcombine;
    private NDArray sendRows;
    private NDArray sendGradients;

    BackwardPass(
            PipelinedDispatch dispatch,
            LayerInputs in,
            NDArray g,
            List<NDArray> gradients,
            NDArray dx,
            NDArray dcombine) {
        super(dispatch, in, true);
        this.g = g;
        this.gradients = gradients;
        this.dx = dx;
        this.dcombine = dcombine;
    }

    @Override
    void run() {
        lent.fetch(weights);
        lent.trainLike(gradients);
        boolean more = route.chunks() > 1;
        NDArray computed = receiveBuffer(packed());
        NDArray results = receiveBuffer(packed());
        NDArray arriving = more ? receiveBuffer(packed()) : null;
        NDArray computedG = receiveBuffer(hidden);
        NDArray arrivingG = more ? receiveBuffer(hidden) : null;
        sendRows = sendBuffer(packed());
        sendGradients = sendBuffer(hidden);
        // A single chunk's rows have all left before its results come back.
        NDArray returned = more ? sendBuffer(hidden + topK) : sendRows;
        DispatchKernels.zero(dcombine);
        ChunkRows last = null;
        ChunkRows next = dispatch(0, computed, computedG);
        lent.await();
        for (int i = 0; i < route.chunks(); i++) {
            ChunkRows c = next;
            await(c.rowsHere);
            await(c.gradientsHere);
            packOwn(c);
            DispatchKernels.gather(g, c.ownTokens, c.gradients, c.others);
            next = i + 1 < route.chunks() ? dispatch(i + 1, arriving, arrivingG) : null;
            c.results = c.view(results, c.received(), hidden + topK);
            observer.computes(i);
            DispatchKernels.receivedBackward(
                    c.rows,
                    c.gradients,
                    topK,
                    table,
                    slots(),
                    weights,
                    lent.weights(),
                    gradients,
                    lent.gradients(),
                    scratch,
                    c.results);
            DispatchKernels.addGradients(c.ownOf(c.results), c.ownTokens, dx, dcombine);
            finish(last);
            c.returned = c.view(returned, c.sent, hidden + topK);
            c.resultsHere = exchange(c.results, c.rowsReceived, c.returned, c.rowsSent);
            last = c;
            NDArray free = computed;
            computed = arriving;
            arriving = results;
            results = free;
            free = computedG;
            computedG = arrivingG;
            arrivingG = free;
        }
        finish(last);
        lent.sendGradientsHome(gradients);
    }

    private ChunkRows dispatch(int i, NDArray into, NDArray intoG) {
        ChunkRows c = chunk(i);
        NDArray out = c.view(sendRows, c.sent, packed());
        pack(c.sentTokens, c.targets, c.rowsSent, out, 0);
        c.rows = c.view(into, c.received(), packed());
        c.rowsHere = exchange(out, c.rowsSent, c.rows, c.rowsReceived);
        NDArray outG = c.view(sendGradients, c.sent, hidden);
        DispatchKernels.gather(g, c.sentTokens, outG, 0);
        c.gradients = c.view(intoG, c.received(), hidden);
        c.gradientsHere = exchange(outG, c.rowsSent, c.gradients, c.rowsReceived);
        return c;
    }

    private void finish(ChunkRows c) {
        if (c != null) {
            await(c.resultsHere);
            DispatchKernels.addGradients(c.returned, c.sentTokens, dx, dcombine);
            c.close();
        }
    }
}
