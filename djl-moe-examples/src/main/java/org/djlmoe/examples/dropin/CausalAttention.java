package org.djlmoe.examples.dropin;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.norm.LayerNorm;
import ai.djl.nn.transformer.ScaledDotProductAttentionBlock;
import ai.djl.training.ParameterStore;
import ai.djl.util.PairList;

/**
 * The attention half of a transformer layer, of DJL's blocks: x + attention(norm(x)), in which a
 * token attends to itself and those before it.
 *
 * <p>Input and output: (B, S, H).
 */
final class CausalAttention extends AbstractBlock {

    private final LayerNorm norm;
    private final ScaledDotProductAttentionBlock attention;

    CausalAttention(DropInSettings settings) {
        norm = addChildBlock("norm", LayerNorm.builder().axis(2).build());
        attention =
                addChildBlock(
                        "attention",
                        ScaledDotProductAttentionBlock.builder()
                                .setEmbeddingSize(settings.hidden())
                                .setHeadCount(settings.heads())
                                .optAttentionProbsDropoutProb(0f)
                                .build());
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray x = inputs.singletonOrThrow();
        NDArray h = norm.forward(parameterStore, inputs, training).singletonOrThrow();
        NDList masked = new NDList(h, CausalEncoder.mask(x));
        return new NDList(x.add(attention.forward(parameterStore, masked, training).head()));
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType type, Shape... shapes) {
        norm.initialize(manager, type, shapes);
        attention.initialize(manager, type, shapes);
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return inputShapes;
    }
}
