package org.djlmoe.examples.bench;

import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.nn.core.Linear;
import ai.djl.training.GradientCollector;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.kernel.ArrayKernels;

/**
 * Loss and gradients of a Mixture-of-Experts layer as DJL's operations and its automatic
 * differentiation compute them: all routed rows at once, in the order of their experts.
 */
public final class StockMoeLayerWorkload implements Workload {

    private final DispatchProblem problem;
    private final List<NDArray> weights;
    private NDArray loss;

    /**
     * Creates the workload.
     *
     * @param settings tokens, hidden, inner, experts, top-k, seed
     */
    public StockMoeLayerWorkload(CaseSettings settings) {
        problem = new DispatchProblem(settings);
        weights = problem.expertWeights();
        problem.x.setRequiresGradient(true);
        problem.router.setRequiresGradient(true);
        weights.forEach(weight -> weight.setRequiresGradient(true));
    }

    @Override
    public void run() {
        Gradients.zero(problem.x);
        Gradients.zero(problem.router);
        weights.forEach(Gradients::zero);
        if (loss != null) {
            loss.close();
        }
        try (NDManager batch = problem.manager.newSubManager();
                GradientCollector collector = Engine.getEngine("PyTorch").newGradientCollector()) {
            // What is computed belongs to the manager of what it is computed from.
            NDArray y = layer(ArrayKernels.alias(batch, problem.x));
            NDArray value = y.square().mean();
            collector.backward(value);
            loss = problem.manager.create(value.getFloat());
        }
    }

    private NDArray layer(NDArray x) {
        int k = problem.topK;
        NDArray probabilities = Linear.linear(x, problem.router, null).get(0).softmax(1);
        NDList top = probabilities.topK(k, 1, true, true);
        NDArray combine = top.get(0).div(top.get(0).sum(new int[] {1}, true)).flatten();
        NDArray expert = top.get(1).flatten();
        return StockExperts.apply(x, expert, combine, weights);
    }

    /** The output and its gradient. */
    @Override
    public long residentBytes() {
        return 2 * problem.rowBytes();
    }

    @Override
    public Map<String, NDArray> results() {
        Map<String, NDArray> results = new LinkedHashMap<>();
        results.put("loss", loss.duplicate());
        results.put("x", Gradients.of(problem.x));
        results.put("router", Gradients.of(problem.router));
        for (int e = 0; e < problem.experts; e++) {
            results.put("gate" + e, Gradients.of(weights.get(3 * e)));
            results.put("up" + e, Gradients.of(weights.get(3 * e + 1)));
            results.put("down" + e, Gradients.of(weights.get(3 * e + 2)));
        }
        return results;
    }

    @Override
    public void close() {
        problem.close();
    }
}
