package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.index.NDIndex;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.TorchKernels;

/**
 * Loss and gradients of a Mixture-of-Experts layer on one rank, as {@code MoeBlock} runs it under a
 * tape with K chunks. With one chunk an expert gets all of its rows at once, as far as they are no
 * more than the even share.
 *
 * <p>Output, gradients and weights are resident, so that what is measured is what the layer needs
 * beyond them.
 */
public final class MoeLayerWorkload implements Workload {

    static final String STOCK = "stock";
    static final String PIPELINED = "pipelined";

    private static final int LOSS_PARTS = 64;

    private final DispatchProblem problem;
    private final int chunks;
    private final List<NDArray> weights;
    private final List<NDArray> gradients = new ArrayList<>();
    private final NDArray y;
    private final NDArray dy;
    private final NDArray dx;
    private float loss;

    /**
     * Creates the workload.
     *
     * @param settings tokens, hidden, inner, experts, top-k, chunks, seed; the case {@code kN} has
     *     N chunks whatever the option says
     */
    public MoeLayerWorkload(CaseSettings settings) {
        problem = new DispatchProblem(settings);
        chunks =
                settings.name().equals(PIPELINED)
                        ? settings.number("chunks")
                        : Integer.parseInt(settings.name().substring(1));
        weights =
                new ArrayList<>(
                        Collections.nCopies(
                                ExpertKernels.Weights.values().length, TorchKernels.nothing()));
        weights.set(ExpertKernels.Weights.ROUTER.ordinal(), problem.router);
        problem.stack(weights);
        for (NDArray weight : weights) {
            gradients.add(weight.size() == 0 ? weight : weight.zerosLike());
        }
        y = problem.x.zerosLike();
        dy = problem.x.zerosLike();
        dx = problem.x.zerosLike();
    }

    static String withChunks(int chunks) {
        return "k" + chunks;
    }

    @Override
    public void run() {
        ExpertKernels.Settings settings =
                new ExpertKernels.Settings(problem.topK, 0, 0, false, true);
        ExpertKernels.Selection selection =
                new ExpertKernels.Selection(TorchKernels.nothing(), false, 0);
        long rows = (problem.tokens + chunks - 1) / chunks;
        try (GradMode off = GradMode.off();
                NDManager pass = problem.manager.newSubManager()) {
            gradients.stream().filter(g -> g.size() > 0).forEach(g -> g.muli(0));
            Shape routes = new Shape(problem.tokens, problem.topK);
            NDArray ids = pass.create(routes, DataType.INT64);
            NDArray combine = pass.create(routes);
            try (ExpertScratch scratch = ExpertScratch.forward(pass, rows, problem.topK, weights)) {
                ExpertKernels.route(
                        problem.x,
                        0,
                        1,
                        weights,
                        settings,
                        selection,
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        ids,
                        combine,
                        scratch);
                ExpertKernels.forward(problem.x, 0, 1, weights, settings, ids, combine, scratch, y);
            }
            meanSquare();
            try (ExpertScratch scratch =
                    ExpertScratch.backward(pass, rows, problem.topK, weights)) {
                ExpertKernels.backward(
                        problem.x,
                        0,
                        1,
                        dy,
                        weights,
                        gradients,
                        settings,
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        TorchKernels.nothing(),
                        ids,
                        combine,
                        scratch,
                        dx,
                        TorchKernels.nothing());
            }
        }
    }

    /** The loss, some rows at a time, and its gradient in the array that is there for it. */
    private void meanSquare() {
        double sum = 0;
        int step = Math.max(1, problem.tokens / LOSS_PARTS);
        for (int start = 0; start < problem.tokens; start += step) {
            NDIndex rows = new NDIndex().addSliceDim(start, Math.min(problem.tokens, start + step));
            try (NDManager part = problem.manager.newSubManager()) {
                sum += y.get(part, rows).square().sum().getFloat();
            }
        }
        loss = (float) (sum / y.size());
        // DJL's copyTo goes through a buffer of that size
        dy.muli(0).addi(y).muli(2.0 / y.size());
    }

    @Override
    public Map<String, NDArray> results() {
        Map<String, NDArray> results = new LinkedHashMap<>();
        results.put("loss", problem.manager.create(loss));
        results.put("x", dx.duplicate());
        results.put("router", gradient(ExpertKernels.Weights.ROUTER).duplicate());
        int inner = problem.inner;
        for (int e = 0; e < problem.experts; e++) {
            NDArray gateUp = gradient(ExpertKernels.Weights.GATE_UP).get(e);
            results.put("gate" + e, gateUp.get("0:" + inner).duplicate());
            results.put("up" + e, gateUp.get(inner + ":").duplicate());
            results.put("down" + e, gradient(ExpertKernels.Weights.DOWN).get(e).duplicate());
        }
        return results;
    }

    private NDArray gradient(ExpertKernels.Weights weight) {
        return gradients.get(weight.ordinal());
    }

    @Override
    public void close() {
        problem.close();
    }
}
