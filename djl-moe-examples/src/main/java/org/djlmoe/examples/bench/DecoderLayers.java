package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.training.ParameterStore;
import ai.djl.util.PairList;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.model.AttentionBlock;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.moe.MoeBlock;

/**
 * Decoder layers on rows [B S, H]: attention with a window, and a SwiGLU, which is a
 * Mixture-of-Experts layer of one expert. Two boundaries a layer.
 */
final class DecoderLayers extends AbstractBlock {

    private final int sequence;
    private final List<AttentionBlock> attention = new ArrayList<>();
    private final List<MoeBlock> feedForward = new ArrayList<>();

    DecoderLayers(CaseSettings settings) {
        sequence = settings.number("sequence");
        int hidden = settings.number("hidden");
        int intermediate = settings.number("intermediate");
        MoeConfig config =
                MoeConfig.builder()
                        .setVocabSize(1)
                        .setHiddenSize(hidden)
                        .setIntermediateSize(intermediate)
                        .setNumLayers(settings.number("layers"))
                        .setNumHeads(settings.number("heads"))
                        .setNumExperts(1)
                        .setTopK(1)
                        .optSlidingWindow(settings.number("window"))
                        .build();
        for (int layer = 0; layer < config.numLayers(); layer++) {
            attention.add(addChildBlock("attention" + layer, new AttentionBlock(config)));
            feedForward.add(
                    addChildBlock(
                            "feed_forward" + layer,
                            MoeBlock.builder()
                                    .setHiddenSize(hidden)
                                    .setIntermediateSize(intermediate)
                                    .setNumExperts(1)
                                    .setTopK(1)
                                    .optNorm(config.rmsNormEps())
                                    .optResidual(true)
                                    .build()));
        }
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray x = inputs.singletonOrThrow();
        for (int layer = 0; layer < attention.size(); layer++) {
            NDArray between = attention.get(layer).forward(parameterStore, x, sequence, training);
            // The tape keeps of a boundary what it needs; this handle would keep it in any case.
            x.close();
            x =
                    feedForward
                            .get(layer)
                            .forward(parameterStore, new NDList(between), training)
                            .singletonOrThrow();
            between.close();
        }
        return new NDList(x);
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType type, Shape... shapes) {
        for (int layer = 0; layer < attention.size(); layer++) {
            attention.get(layer).initialize(manager, type, shapes);
            feedForward.get(layer).initialize(manager, type, shapes);
        }
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return inputShapes;
    }
}
