package org.djlmoe.examples.dropin;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Activation;
import ai.djl.nn.transformer.TransformerEncoderBlock;
import ai.djl.training.ParameterStore;
import ai.djl.util.PairList;

/**
 * DJL's encoder block with a mask, so that a token attends to itself and those before it. Its norm
 * is DJL's, over the batch, whose statistics still include later tokens.
 *
 * <p>Input and output: (B, S, H).
 */
final class CausalEncoder extends AbstractBlock {

    private final TransformerEncoderBlock encoder;

    CausalEncoder(DropInSettings settings) {
        encoder =
                addChildBlock(
                        "encoder",
                        new TransformerEncoderBlock(
                                settings.hidden(),
                                settings.heads(),
                                4 * settings.hidden(),
                                0f,
                                Activation::relu));
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray x = inputs.singletonOrThrow();
        return encoder.forward(parameterStore, new NDList(x, mask(x)), training, params);
    }

    /** For each of (B, S, H) tokens, those that it sees: (B, S, S). */
    static NDArray mask(NDArray x) {
        long batch = x.getShape().get(0);
        long sequence = x.getShape().get(1);
        NDArray positions = x.getManager().arange((int) sequence);
        return positions
                .expandDims(1)
                .gte(positions.expandDims(0))
                .expandDims(0)
                .broadcast(batch, sequence, sequence);
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType type, Shape... shapes) {
        encoder.initialize(manager, type, shapes);
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return inputShapes;
    }
}
