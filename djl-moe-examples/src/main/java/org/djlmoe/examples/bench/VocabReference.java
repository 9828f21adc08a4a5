package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.index.NDIndex;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import java.util.LinkedHashMap;
import java.util.Map;
import org.djlmoe.examples.bench.VocabProblem.Kind;

/** The same loss and gradients in double precision, from the formulas, some tokens at a time. */
public final class VocabReference implements Workload {

    private static final int STEP = 256;

    private final VocabProblem problem;
    private final Map<String, NDArray> results = new LinkedHashMap<>();

    /**
     * Creates the workload.
     *
     * @param settings tokens, hidden, vocab, block, seed
     */
    public VocabReference(CaseSettings settings) {
        problem = new VocabProblem(VocabWorkload.kind(settings.name()), settings);
    }

    @Override
    public void run() {
        NDManager manager = problem.manager;
        long tokens = problem.labels.size();
        Shape hidden = problem.hidden.getShape();
        Shape weight = problem.weight.getShape();
        NDArray wide = problem.weight.toType(DataType.FLOAT64, true);
        NDArray counts = problem.labels.gte(0).toType(DataType.FLOAT64, false);
        // what every token's loss is multiplied with, and its gradient beside that
        NDArray factor = problem.kind == Kind.NONE ? counts : counts.div(counts.sum().getDouble());
        if (problem.tokenWeights != null) {
            factor = factor.mul(problem.tokenWeights.toType(DataType.FLOAT64, false));
        }
        NDArray upstream =
                problem.upstream == null
                        ? counts.onesLike()
                        : problem.upstream.toType(DataType.FLOAT64, false);
        NDArray losses = manager.zeros(new Shape(tokens), DataType.FLOAT64);
        NDArray dHidden = manager.zeros(hidden, DataType.FLOAT64);
        NDArray dWeight = manager.zeros(weight, DataType.FLOAT64);
        NDArray dBias = manager.zeros(new Shape(weight.get(0)), DataType.FLOAT64);
        for (long start = 0; start < tokens; start += STEP) {
            NDIndex rows = new NDIndex().addSliceDim(start, Math.min(tokens, start + STEP));
            try (NDManager scratch = manager.newSubManager()) {
                NDArray x = problem.hidden.get(scratch, rows).toType(DataType.FLOAT64, false);
                NDArray f = factor.get(scratch, rows).expandDims(1);
                NDArray g = f.mul(upstream.get(scratch, rows).expandDims(1));
                NDArray labels = problem.labels.get(scratch, rows).maximum(0);
                Block block = block(x, wide, labels.expandDims(1));
                losses.set(rows, block.loss.mul(f).squeeze(1));
                NDArray d = block.gradient.mul(g);
                dHidden.set(rows, d.matMul(wide));
                dWeight.addi(d.transpose().matMul(x));
                dBias.addi(d.sum(new int[] {0}));
            }
        }
        results.clear();
        results.put("loss", problem.kind == Kind.NONE ? losses : losses.sum());
        results.put("hidden", dHidden);
        results.put("weight", dWeight);
        if (problem.bias != null) {
            results.put("bias", dBias);
        }
    }

    /** Losses (n, 1) and their gradients with respect to x w + b (n, V). */
    private record Block(NDArray loss, NDArray gradient) {}

    private Block block(NDArray x, NDArray weight, NDArray labels) {
        boolean all = problem.kind == Kind.ALL_OPTIONS;
        NDArray logits = x.matMul(weight.transpose());
        NDArray slope = null;
        if (all) {
            NDArray bias = problem.bias.toType(DataType.FLOAT64, true);
            bias.attach(x.getManager());
            NDArray tanh = logits.add(bias).mul(VocabProblem.SCALE / VocabProblem.SOFTCAP).tanh();
            logits = tanh.mul(VocabProblem.SOFTCAP);
            slope = tanh.square().mul(-1).add(1).mul(VocabProblem.SCALE);
        }
        double smoothing = all ? VocabProblem.SMOOTHING : 0;
        double zLoss = all ? VocabProblem.Z_LOSS : 0;
        int[] ids = {1};
        NDArray highest = logits.max(ids, true);
        NDArray lse = logits.sub(highest).exp().sum(ids, true).log().add(highest);
        NDArray loss =
                lse.sub(logits.gather(labels, 1).mul(1 - smoothing))
                        .sub(logits.mean(ids, true).mul(smoothing))
                        .add(lse.square().mul(zLoss));
        long vocab = weight.getShape().get(0);
        NDArray target = labels.squeeze(1).oneHot((int) vocab, DataType.FLOAT64);
        NDArray gradient =
                logits.sub(lse)
                        .exp()
                        .mul(lse.mul(2 * zLoss).add(1))
                        .sub(target.mul(1 - smoothing))
                        .sub(smoothing / vocab);
        return new Block(loss, slope == null ? gradient : gradient.mul(slope));
    }

    @Override
    public Map<String, NDArray> results() {
        return new LinkedHashMap<>(results);
    }

    @Override
    public void close() {
        problem.close();
    }
}
