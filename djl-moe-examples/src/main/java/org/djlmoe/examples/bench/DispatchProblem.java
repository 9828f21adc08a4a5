package org.djlmoe.examples.bench;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDArrays;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.kernel.ExpertKernels;

/** The rows and the weights of a Mixture-of-Experts layer, the same in every child. */
final class DispatchProblem implements AutoCloseable {

    private static final float SPREAD = 0.05f;

    final NDManager manager;
    final int tokens;
    final int hidden;
    final int inner;
    final int experts;
    final int topK;

    /** [N, H]. */
    final NDArray x;

    /** [E, H]. */
    final NDArray router;

    DispatchProblem(CaseSettings settings) {
        tokens = settings.number("tokens");
        hidden = settings.number("hidden");
        inner = settings.number("inner");
        experts = settings.number("experts");
        topK = settings.number("top-k");
        manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        manager.getEngine().setRandomSeed(settings.number("seed"));
        x = manager.randomNormal(new Shape(tokens, hidden));
        router = normal(new Shape(experts, hidden));
    }

    private NDArray normal(Shape shape) {
        return manager.randomNormal(0, SPREAD, shape, DataType.FLOAT32);
    }

    /**
     * Makes the weights of the experts; to be called once.
     *
     * @return gate [I, H], up [I, H] and down [H, I] of each expert
     */
    List<NDArray> expertWeights() {
        List<NDArray> weights = new ArrayList<>();
        for (int e = 0; e < experts; e++) {
            weights.add(normal(new Shape(inner, hidden)));
            weights.add(normal(new Shape(inner, hidden)));
            weights.add(normal(new Shape(hidden, inner)));
        }
        return weights;
    }

    /**
     * Makes the weights of the experts as the kernels take them; to be called once.
     *
     * @param weights the kernels' list, in which they are put
     */
    void stack(List<NDArray> weights) {
        List<NDArray> parts = expertWeights();
        stack(parts, weights);
        parts.forEach(NDArray::close);
    }

    /**
     * Copies weights of experts into stacks.
     *
     * @param parts from {@link #expertWeights}
     * @param weights the kernels' list, in which the stacks are put
     */
    void stack(List<NDArray> parts, List<NDArray> weights) {
        NDList gateUp = new NDList();
        NDList down = new NDList();
        try (NDManager scratch = manager.newSubManager()) {
            for (int e = 0; e < experts; e++) {
                NDList both = new NDList(parts.get(3 * e), parts.get(3 * e + 1));
                NDArray joined = NDArrays.concat(both);
                joined.attach(scratch);
                gateUp.add(joined);
                down.add(parts.get(3 * e + 2));
            }
            weights.set(ExpertKernels.Weights.GATE_UP.ordinal(), stacked(gateUp));
            weights.set(ExpertKernels.Weights.DOWN.ordinal(), stacked(down));
        }
    }

    private NDArray stacked(NDList list) {
        NDArray stack = NDArrays.stack(list);
        stack.attach(manager);
        return stack;
    }

    /** Returns the bytes of an array of all tokens. */
    long rowBytes() {
        return 4L * tokens * hidden;
    }

    @Override
    public void close() {
        manager.close();
    }
}
