package org.djlmoe.expert;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Activation;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * The experts that every token goes to: a dense SwiGLU of width S, whose output a gate may scale by
 * sigmoid(gate h) a token. n shared experts of width I are one of width n I.
 *
 * <ul>
 *   <li>parameter {@code shared_expert.gate_up_proj}: [1, 2 S, H], the rows of gate before those of
 *       up
 *   <li>parameter {@code shared_expert.down_proj}: [1, H, S]
 *   <li>parameter {@code shared_expert_gate.weight}: [1, H], if gated
 *   <li>input and output: rows [N, H]
 * </ul>
 *
 * <p>The block's own forward is plain and unbounded; {@code MoeBlock} runs the same weights chunk
 * by chunk.
 *
 * <p>Source: D. Dai et al., "DeepSeekMoE", arXiv 2401.06066; the gate is Qwen2-MoE's.
 */
public final class SharedExperts extends AbstractBlock {

    private final Parameter gateUp;
    private final Parameter down;
    private final Parameter gate;

    /**
     * Creates shared experts.
     *
     * @param hidden H
     * @param inner S
     * @param gated whether there is a gate
     * @param initializerRange standard deviation of the initial weights
     */
    public SharedExperts(int hidden, int inner, boolean gated, double initializerRange) {
        if (inner < 1) {
            throw new IllegalArgumentException(
                    "The width of shared experts must be positive, not " + inner);
        }
        gateUp =
                add(
                        "shared_expert.gate_up_proj",
                        new Shape(1, 2L * inner, hidden),
                        initializerRange);
        down = add("shared_expert.down_proj", new Shape(1, hidden, inner), initializerRange);
        gate =
                gated
                        ? add("shared_expert_gate.weight", new Shape(1, hidden), initializerRange)
                        : null;
    }

    private Parameter add(String name, Shape shape, double initializerRange) {
        return addParameter(
                Parameter.builder()
                        .setName(name)
                        .setType(Parameter.Type.OTHER)
                        .optInitializer(new NormalInitializer((float) initializerRange))
                        .optShape(shape)
                        .build());
    }

    /**
     * Returns the weights in the order of {@link ExpertKernels.Weights} from {@code SHARED_GATE_UP}
     * on.
     *
     * @return three parameters, null in place of an absent gate
     */
    public List<Parameter> weights() {
        return Arrays.asList(gateUp, down, gate);
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray rows = inputs.singletonOrThrow();
        Shape one = new Shape(rows.getShape().get(0), 1);
        NDArray scale;
        if (gate == null) {
            scale = rows.getManager().ones(one);
        } else {
            NDArray w = parameterStore.getValue(gate, rows.getDevice(), training);
            scale = Activation.sigmoid(rows.matMul(w.transpose()));
        }
        List<NDArray> weights =
                new ArrayList<>(
                        List.of(
                                parameterStore.getValue(gateUp, rows.getDevice(), training),
                                parameterStore.getValue(down, rows.getDevice(), training)));
        weights.addAll(Collections.nCopies(4, TorchKernels.nothing()));
        NDArray ids = rows.getManager().zeros(one, DataType.INT64);
        return new NDList(
                ExpertKernels.expertsPlain(
                        rows,
                        ids,
                        scale,
                        weights,
                        new ExpertKernels.Settings(1, 0, 0, false, false)));
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return new Shape[] {inputShapes[0]};
    }
}
