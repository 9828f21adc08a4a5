package org.djlmoe.model;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.autograd.Tape;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.NormKernels;

/**
 * Rows of a table by token id. The gradient is added into the table's gradient in place, row by
 * row, so no second table-sized array appears.
 *
 * <ul>
 *   <li>input: ids INT64 [B, S]
 *   <li>output: [B S, H]
 *   <li>parameter {@code weight}: [V, H]
 * </ul>
 */
public final class TokenEmbedding extends AbstractBlock {

    private final Parameter weight;
    private final int vocab;
    private final int hidden;

    /**
     * Creates an embedding.
     *
     * @param vocab V
     * @param hidden H
     * @param initializerRange standard deviation of the initial table
     */
    public TokenEmbedding(int vocab, int hidden, double initializerRange) {
        this.vocab = vocab;
        this.hidden = hidden;
        weight =
                addParameter(
                        Parameter.builder()
                                .setName("weight")
                                .setType(Parameter.Type.WEIGHT)
                                .optInitializer(new NormalInitializer((float) initializerRange))
                                .optShape(new Shape(vocab, hidden))
                                .build());
    }

    /**
     * Returns the table.
     *
     * @return [V, H]
     */
    public Parameter weight() {
        return weight;
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray ids = inputs.singletonOrThrow();
        if (ids.getDataType() != DataType.INT64) {
            ids = ids.toType(DataType.INT64, false);
        }
        NDArray table = parameterStore.getValue(weight, ids.getDevice(), training);
        return Tape.apply(new Lookup(table), new NDList(ids));
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return new Shape[] {new Shape(inputShapes[0].size(), hidden)};
    }

    private final class Lookup implements Segment {

        private final NDArray table;

        Lookup(NDArray table) {
            this.table = table;
        }

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            NDArray ids = inputs.head();
            NDArray y = ids.getManager().create(new Shape(ids.getShape().size(), hidden));
            NormKernels.embed(checked(ids), table, y);
            return new NDList(y);
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
            NDArray gradient = context.gradient(table);
            if (gradient != null) {
                NormKernels.embedBackward(inputs.head(), outputGradients.head(), gradient);
            }
            return new NDList((NDArray) null);
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(NormKernels.embedPlain(checked(inputs.head()), table));
        }

        @Override
        public boolean hasTrainableParameters() {
            return ArrayKernels.requiresGradient(table);
        }

        private NDArray checked(NDArray ids) {
            if (ids.getShape().size() > 0) {
                long low = ids.min().getLong();
                long high = ids.max().getLong();
                if (low < 0 || high >= vocab) {
                    throw new IllegalArgumentException(
                            "Token id "
                                    + (low < 0 ? low : high)
                                    + " is outside the vocabulary of "
                                    + vocab
                                    + "; is this the model's own tokenizer?");
                }
            }
            return ids;
        }
    }
}
