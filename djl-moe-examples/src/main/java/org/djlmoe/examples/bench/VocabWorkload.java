package org.djlmoe.examples.bench;

import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.nn.core.Linear;
import ai.djl.training.GradientCollector;
import ai.djl.training.loss.Loss;
import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.Tape;
import org.djlmoe.examples.bench.VocabProblem.Kind;
import org.djlmoe.kernel.ArrayKernels;

/**
 * Loss and gradients of a vocabulary projection: ours, or DJL's Linear and cross-entropy. As in
 * training, weight and bias keep the array of their gradient, which is set to zero; hidden states
 * are new in each run.
 */
public final class VocabWorkload implements Workload {

    static final String OURS = "ours";
    static final String STOCK = "stock";
    static final String OURS_NONE = "ours-none";
    static final String OURS_ALL_OPTIONS = "ours-all-options";

    private static final String[] NAMES = {"hidden", "weight", "bias"};

    private final VocabProblem problem;
    private final Loss loss;
    private final boolean stock;
    private NDArray value;
    private NDArray hidden;

    /**
     * Creates the workload.
     *
     * @param settings tokens, hidden, vocab, block, seed
     */
    public VocabWorkload(CaseSettings settings) {
        problem = new VocabProblem(kind(settings.name()), settings);
        stock = settings.name().equals(STOCK);
        loss = stock ? Loss.softmaxCrossEntropyLoss() : problem.loss();
        weights().forEach(array -> array.setRequiresGradient(true));
    }

    private NDList weights() {
        NDList all = problem.predictions();
        return all.subNDList(1);
    }

    /** The hidden states of a batch, whose gradient lives as long as they do. */
    private NDArray newHidden() {
        if (hidden != null) {
            hidden.close();
        }
        NDArray leaf = problem.hidden.stopGradient();
        leaf.setRequiresGradient(true);
        return leaf;
    }

    static Kind kind(String name) {
        if (name.endsWith("none")) {
            return Kind.NONE;
        }
        return name.endsWith("all-options") ? Kind.ALL_OPTIONS : Kind.MEAN;
    }

    @Override
    public void run() {
        weights().forEach(Gradients::zero);
        hidden = newHidden();
        if (value != null) {
            value.close();
        }
        try (NDManager batch = problem.manager.newSubManager()) {
            // What is computed belongs to the manager of what it is computed from.
            NDList in = new NDList(ArrayKernels.alias(batch, hidden));
            weights().forEach(array -> in.add(ArrayKernels.alias(batch, array)));
            try (GradientCollector collector = collector(batch)) {
                value =
                        loss.evaluate(
                                problem.labels(),
                                stock ? Linear.linear(in.get(0), in.get(1), null) : in);
                collector.backward(
                        problem.upstream == null ? value : value.mul(problem.upstream).sum());
            }
            value = value.stopGradient();
            value.attach(problem.manager);
        }
    }

    private GradientCollector collector(NDManager batch) {
        return stock
                ? Engine.getEngine("PyTorch").newGradientCollector()
                : new Tape(batch, 0, () -> weights().forEach(Gradients::zero));
    }

    @Override
    public Map<String, NDArray> results() {
        Map<String, NDArray> results = new LinkedHashMap<>();
        results.put("loss", value.duplicate());
        NDList in = new NDList(hidden).addAll(weights());
        for (int i = 0; i < in.size(); i++) {
            results.put(NAMES[i], Gradients.of(in.get(i)));
        }
        return results;
    }

    @Override
    public void close() {
        problem.close();
    }
}
