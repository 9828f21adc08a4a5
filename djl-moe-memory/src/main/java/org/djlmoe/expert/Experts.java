package org.djlmoe.expert;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import java.io.DataOutputStream;
import java.io.IOException;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.HalfArrays;
import org.djlmoe.kernel.TorchKernels;

/**
 * SwiGLU experts over stacked weights: expert(x) = (silu(x gate') * (x up')) down'.
 *
 * <ul>
 *   <li>parameter {@code experts.gate_up_proj}: [E, 2 I, H], the rows of gate before those of up
 *   <li>parameter {@code experts.down_proj}: [E, H, I]
 *   <li>input: rows [N, H], ids INT64 [N, k], combine weights [N, k]
 *   <li>output: [N, H], the weighted sum over each row's experts
 * </ul>
 *
 * <p>Weights that do not train may be BF16, see {@link #narrowWeights}.
 *
 * <p>The block's own forward is plain and unbounded; {@code MoeBlock} runs the same weights chunk
 * by chunk.
 */
public final class Experts extends AbstractBlock {

    private final int experts;
    private final int hidden;
    private final int inner;
    private final Parameter gateUp;
    private final Parameter down;
    private LoraExperts adapters;

    /**
     * Creates experts.
     *
     * @param experts E
     * @param hidden H
     * @param inner I
     * @param initializerRange standard deviation of the initial weights
     */
    public Experts(int experts, int hidden, int inner, double initializerRange) {
        this.experts = experts;
        this.hidden = hidden;
        this.inner = inner;
        gateUp =
                add(
                        "experts.gate_up_proj",
                        new Shape(experts, 2L * inner, hidden),
                        initializerRange);
        down = add("experts.down_proj", new Shape(experts, hidden, inner), initializerRange);
    }

    private Parameter add(String name, Shape shape, double initializerRange) {
        // Type OTHER: DJL's default initializer for weights takes the wrong fan-in from a stacked
        // shape.
        return addParameter(
                Parameter.builder()
                        .setName(name)
                        .setType(Parameter.Type.OTHER)
                        .optInitializer(new NormalInitializer((float) initializerRange))
                        .optShape(shape)
                        .build());
    }

    /**
     * Gives every expert a low-rank adapter. It must be initialized before it is used, with the
     * manager of the model: what a trainer's manager owns is lost when the trainer closes.
     *
     * @param rank r
     * @param alpha scaling numerator
     * @return the adapters
     */
    public LoraExperts attachAdapters(int rank, double alpha) {
        if (adapters != null) {
            throw new IllegalStateException(
                    "These experts have adapters already: merge or detach them first");
        }
        adapters = addChildBlock("lora", new LoraExperts(experts, hidden, inner, rank, alpha));
        return adapters;
    }

    /**
     * Returns the adapters.
     *
     * @return the adapters, or null if there are none
     */
    public LoraExperts adapters() {
        return adapters;
    }

    /**
     * Adds the adapters' products to the weights and drops the adapters. The sum is formed in F32
     * and cast once to the weights' type.
     *
     * @return how many weights changed; 0 if all B are zero, as in fresh adapters, or if the
     *     products are too small for the weights' type
     * @throws IllegalStateException if there are no adapters, or an adapter holds a number that is
     *     not finite, in which case nothing has changed; or if the sum overflows, in which case the
     *     weights are of no more use
     */
    public long mergeAdapters() {
        if (adapters == null) {
            throw new IllegalStateException("These experts have no adapters to merge");
        }
        List<Parameter> lora = adapters.weights();
        for (Parameter parameter : lora) {
            try (NDArray values = parameter.getArray().stopGradient();
                    NDArray sum = values.sum()) {
                if (!Float.isFinite(sum.getFloat())) {
                    throw new IllegalStateException(
                            "'"
                                    + parameter.getName()
                                    + "' holds numbers that are not finite: nothing was merged");
                }
            }
        }
        long changed = merge(gateUp, lora.get(0), lora.get(1));
        changed += merge(down, lora.get(2), lora.get(3));
        detachAdapters();
        return changed;
    }

    private long merge(Parameter weight, Parameter a, Parameter b) {
        long changed =
                ExpertKernels.merge(
                        weight.getArray(), a.getArray(), b.getArray(), adapters.scale());
        if (changed < 0) {
            throw new IllegalStateException(
                    "'"
                            + weight.getName()
                            + "' is not finite after merging its adapter: if the merge was for good, load"
                            + " the model again");
        }
        return changed;
    }

    /**
     * Merges the adapters for a while. A copy of the weights is kept.
     *
     * @return what undoes it when closed
     * @throws IllegalStateException as {@link #mergeAdapters}; then weights and adapters are as
     *     before
     */
    public MergedAdapters mergeAdaptersForNow() {
        return new MergedAdapters(this);
    }

    void reattach(LoraExperts merged) {
        if (adapters != null) {
            throw new IllegalStateException(
                    "These experts have got other adapters: detach them before the merge is undone");
        }
        adapters = addChildBlock("lora", merged);
    }

    /**
     * Freezes the weights and narrows them to BF16: half the memory, products in BF16 with F32
     * accumulation. Exact for weights that were BF16 in their checkpoint, otherwise rounded for
     * good. Adapters stay F32. It is to be called while no trainer exists: trainers keep arrays.
     *
     * <p>Weights that are not initialized become zeros, for a checkpoint to fill.
     *
     * @param manager owns the new arrays
     */
    public void narrowWeights(NDManager manager) {
        for (Parameter parameter : List.of(gateUp, down)) {
            NDArray half;
            if (!parameter.isInitialized()) {
                half = HalfArrays.zeros(manager, parameter.getShape());
            } else if (HalfArrays.isHalf(parameter.getArray())) {
                continue;
            } else {
                half = HalfArrays.narrow(manager, parameter.getArray());
            }
            replace(parameter, half);
            parameter.freeze(true);
        }
    }

    /**
     * Widens BF16 weights to F32, exactly. They stay frozen. To be called while no trainer exists.
     *
     * @param manager owns the new arrays
     */
    public void widenWeights(NDManager manager) {
        for (Parameter parameter : List.of(gateUp, down)) {
            if (HalfArrays.isHalf(parameter.getArray())) {
                replace(parameter, HalfArrays.widen(manager, parameter.getArray()));
            }
        }
    }

    private static void replace(Parameter parameter, NDArray array) {
        parameter.close();
        // An array is taken only where no shape is known.
        parameter.setShape(null);
        parameter.setArray(array);
    }

    /**
     * Returns whether the weights are BF16.
     *
     * @return true after {@link #narrowWeights}
     */
    public boolean hasHalfWeights() {
        return gateUp.isInitialized() && HalfArrays.isHalf(gateUp.getArray());
    }

    @Override
    public void saveParameters(DataOutputStream os) throws IOException {
        if (hasHalfWeights()) {
            throw new IllegalStateException(
                    "DJL's own format has no BF16: save a checkpoint, or widen the weights first");
        }
        super.saveParameters(os);
    }

    /**
     * Drops the adapters without merging them. Their arrays stay with the manager that they were
     * initialized with: a trainer that has used them reads them once more when it closes.
     */
    public void detachAdapters() {
        if (adapters != null) {
            children.clear();
            adapters = null;
        }
    }

    /**
     * Returns the gate and up weights.
     *
     * @return [E, 2 I, H]
     */
    public Parameter gateUp() {
        return gateUp;
    }

    /**
     * Returns the down weights.
     *
     * @return [E, H, I]
     */
    public Parameter down() {
        return down;
    }

    /**
     * Returns I.
     *
     * @return the width of an expert
     */
    public int inner() {
        return inner;
    }

    /**
     * Returns the weights in the order of {@link ExpertKernels.Weights} from {@code GATE_UP} on.
     *
     * @return six parameters, null in place of absent adapters
     */
    public List<Parameter> weights() {
        List<Parameter> all = new ArrayList<>(List.of(gateUp, down));
        all.addAll(adapters == null ? Collections.nCopies(4, null) : adapters.weights());
        return all;
    }

    /**
     * Returns the factor of the adapters' products.
     *
     * @return alpha / r, or 0 without adapters
     */
    public double adapterScale() {
        return adapters == null ? 0 : adapters.scale();
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray rows = inputs.get(0);
        List<NDArray> arrays = new ArrayList<>();
        for (Parameter parameter : weights()) {
            arrays.add(
                    parameter == null
                            ? TorchKernels.nothing()
                            : parameterStore.getValue(parameter, rows.getDevice(), training));
        }
        ExpertKernels.Settings settings =
                new ExpertKernels.Settings(
                        (int) inputs.get(1).getShape().get(1), 0, adapterScale(), false, false);
        return new NDList(
                ExpertKernels.expertsPlain(rows, inputs.get(1), inputs.get(2), arrays, settings));
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType dataType, Shape... shapes) {
        if (adapters != null) {
            adapters.initialize(manager, dataType, new Shape(-1, hidden));
        }
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return new Shape[] {inputShapes[0]};
    }
}
