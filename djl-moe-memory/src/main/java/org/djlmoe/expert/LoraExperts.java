package org.djlmoe.expert;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import java.util.List;

/**
 * Low-rank adapters of stacked experts: an expert's weight acts as W + (alpha / r) B A.
 *
 * <p>The product B A is never formed while training: rows go through A, then B. B starts at zero,
 * so a fresh adapter changes nothing; A starts as PEFT's does, of variance 1 / (3 fan-in).
 *
 * <ul>
 *   <li>{@code experts.gate_up_proj.lora_A} [E, r, H] and {@code .lora_B} [E, 2 I, r]; gate and up
 *       share A
 *   <li>{@code experts.down_proj.lora_A} [E, r, I] and {@code .lora_B} [E, H, r]
 *   <li>forward: the stacked deltas (alpha / r) B A of both weights, [E, 2 I, H] and [E, H, I], for
 *       merging. They are as large as the weights.
 * </ul>
 *
 * <p>Source: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685.
 */
public final class LoraExperts extends AbstractBlock {

    private final int rank;
    private final double alpha;
    private final Parameter gateUpA;
    private final Parameter gateUpB;
    private final Parameter downA;
    private final Parameter downB;

    /**
     * Creates adapters.
     *
     * @param experts E
     * @param hidden H
     * @param inner I
     * @param rank r, at least 1
     * @param alpha the adapters' products are scaled by alpha / r
     */
    public LoraExperts(int experts, int hidden, int inner, int rank, double alpha) {
        if (rank < 1 || !(alpha > 0)) {
            throw new IllegalArgumentException(
                    "An adapter needs a rank of at least 1 and a positive alpha, not rank "
                            + rank
                            + " and alpha "
                            + alpha);
        }
        this.rank = rank;
        this.alpha = alpha;
        gateUpA = down("experts.gate_up_proj.lora_A", new Shape(experts, rank, hidden), hidden);
        gateUpB = up("experts.gate_up_proj.lora_B", new Shape(experts, 2L * inner, rank));
        downA = down("experts.down_proj.lora_A", new Shape(experts, rank, inner), inner);
        downB = up("experts.down_proj.lora_B", new Shape(experts, hidden, rank));
    }

    private Parameter down(String name, Shape shape, int fanIn) {
        return add(name, shape, new NormalInitializer((float) Math.sqrt(1.0 / (3.0 * fanIn))));
    }

    private Parameter up(String name, Shape shape) {
        return add(name, shape, Initializer.ZEROS);
    }

    private Parameter add(String name, Shape shape, Initializer initializer) {
        return addParameter(
                Parameter.builder()
                        .setName(name)
                        .setType(Parameter.Type.OTHER)
                        .optInitializer(initializer)
                        .optShape(shape)
                        .build());
    }

    /**
     * Returns the factor of the products.
     *
     * @return alpha / r
     */
    public double scale() {
        return alpha / rank;
    }

    /**
     * Returns r.
     *
     * @return the rank
     */
    public int rank() {
        return rank;
    }

    /**
     * Returns alpha.
     *
     * @return the scaling numerator
     */
    public double alpha() {
        return alpha;
    }

    /**
     * Returns the four parameters.
     *
     * @return A and B of gate_up, then A and B of down
     */
    public List<Parameter> weights() {
        return List.of(gateUpA, gateUpB, downA, downB);
    }

    /**
     * Returns which experts' adapters have moved: B starts at zero, so that an adapter does
     * something once a number in one of its B is not.
     *
     * @return [E]
     */
    public boolean[] moved() {
        int experts = (int) gateUpB.getArray().getShape().get(0);
        boolean[] moved = new boolean[experts];
        for (Parameter b : List.of(gateUpB, downB)) {
            try (NDArray detached = b.getArray().stopGradient()) {
                float[] values = detached.toFloatArray();
                for (int i = 0; i < values.length; i++) {
                    moved[i / (values.length / experts)] |= values[i] != 0;
                }
            }
        }
        return moved;
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDList deltas = new NDList();
        for (int i = 0; i < 4; i += 2) {
            NDArray a =
                    parameterStore.getValue(weights().get(i), inputs.head().getDevice(), training);
            NDArray b =
                    parameterStore.getValue(
                            weights().get(i + 1), inputs.head().getDevice(), training);
            deltas.add(b.matMul(a).mul(scale()));
        }
        return deltas;
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        Shape a = gateUpA.getShape();
        Shape b = gateUpB.getShape();
        long inner = b.get(1) / 2;
        return new Shape[] {
            new Shape(a.get(0), 2 * inner, a.get(2)), new Shape(a.get(0), a.get(2), inner)
        };
    }
}
