package org.djlmoe.moe;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import java.util.List;
import org.djlmoe.dispatch.DispatchRoute;
import org.djlmoe.dispatch.PipelinedDispatch;
import org.djlmoe.kernel.DispatchKernels;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.NormKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * The experts of one pass of a {@link MoeBlock} over the ranks of a group.
 *
 * <p>The rows that travel are normed, so with a norm an array of all rows is held for the length of
 * a pass. One process does not run through here for that reason alone: it norms block by block and
 * needs no such array. In time the two are equal.
 */
final class DispatchedExperts {

    private final PipelinedDispatch dispatch;
    private final ExpertKernels.Settings settings;
    private DispatchRoute route;

    DispatchedExperts(PipelinedDispatch dispatch, ExpertKernels.Settings settings) {
        this.dispatch = dispatch;
        this.settings = settings;
    }

    /** Fills y. */
    void forward(
            NDManager manager,
            NDArray x,
            List<NDArray> weights,
            long rows,
            NDArray ids,
            NDArray combine,
            NDArray y) {
        DispatchKernels.zero(y);
        route = dispatch.route(ids);
        try (NDManager pass = manager.newSubManager()) {
            NDArray h = normed(pass, x, weights);
            dispatch.forward(route, h, ids, combine, weights, settings.adapterScale(), y);
        }
        if (weights.get(Weights.SHARED_DOWN.ordinal()).size() > 0) {
            try (ExpertScratch scratch =
                    ExpertScratch.forward(manager, rows, settings.topK(), weights)) {
                ExpertKernels.sharedForward(x, weights, settings, scratch, y);
            }
        }
        if (settings.residual()) {
            y.addi(x);
        }
    }

    /** Fills dx; the route is that of the forward pass. */
    void backward(
            NDManager manager,
            NDArray x,
            NDArray g,
            List<NDArray> weights,
            List<NDArray> gradients,
            long rows,
            NDArray losses,
            NDArray mask,
            NDArray outside,
            NDArray ids,
            NDArray combine,
            NDArray dx) {
        DispatchKernels.zero(dx);
        try (NDManager pass = manager.newSubManager()) {
            NDArray dcombine = pass.create(combine.getShape());
            try (NDManager inner = pass.newSubManager()) {
                NDArray h = normed(inner, x, weights);
                dispatch.backward(
                        route,
                        h,
                        ids,
                        combine,
                        weights,
                        settings.adapterScale(),
                        g,
                        gradients,
                        dx,
                        dcombine);
            }
            try (ExpertScratch scratch =
                    ExpertScratch.backward(pass, rows, settings.topK(), weights)) {
                ExpertKernels.routerBackward(
                        x, g, weights, gradients, settings, losses, mask, outside, ids, dcombine,
                        scratch, dx);
            }
        }
    }

    private NDArray normed(NDManager manager, NDArray x, List<NDArray> weights) {
        NDArray gamma = weights.get(Weights.NORM.ordinal());
        if (gamma == TorchKernels.nothing()) {
            return x;
        }
        NDArray h = manager.create(x.getShape());
        NormKernels.rmsNorm(x, gamma, settings.eps(), h);
        return h;
    }
}
