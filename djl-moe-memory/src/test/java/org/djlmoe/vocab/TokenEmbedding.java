package org.djlmoe.vocab;

import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.Shape;
import ai.djl.ndarray.types.SparseFormat;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.nn.core.Embedding;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;

/** Rows of a table by token number, through plain autograd. */
final class TokenEmbedding extends AbstractBlock {

    final Parameter table;
    private final int hidden;

    TokenEmbedding(int vocab, int hidden) {
        this.hidden = hidden;
        table =
                addParameter(
                        Parameter.builder()
                                .setName("table")
                                .setType(Parameter.Type.WEIGHT)
                                .optShape(new Shape(vocab, hidden))
                                .optInitializer(new NormalInitializer(0.5f))
                                .build());
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore store,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        return Embedding.embedding(
                inputs.head(),
                store.getValue(table, inputs.head().getDevice(), training),
                SparseFormat.DENSE);
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputs) {
        return new Shape[] {inputs[0].add(hidden)};
    }
}
