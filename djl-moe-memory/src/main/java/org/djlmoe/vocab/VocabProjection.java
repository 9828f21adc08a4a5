package org.djlmoe.vocab;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import java.util.Arrays;
import org.djlmoe.kernel.ArrayKernels;

/**
 * The last layer of a language model, which leaves the product with its weight to {@link
 * RingDtpLoss}.
 *
 * <p>Shapes, with H the hidden size and V the vocabulary:
 *
 * <ul>
 *   <li>input: (B, S, H) or (N, H)
 *   <li>parameters: {@code weight} (V, H), normal with deviation 0.02; optional {@code bias} (V),
 *       zero
 *   <li>output: the list (hidden, weight) or (hidden, weight, bias): the input as it came, and
 *       handles of the parameters that may be closed with the batch
 * </ul>
 *
 * <p>Logits, (.., V), are computed by {@link #logits} alone, for the few tokens that generation
 * needs. For a loss other than {@link RingDtpLoss} use DJL's {@code Linear}.
 *
 * <p>A tied weight is the very {@link Parameter} of the embedding: gradients of both uses add up.
 * It stays a parameter of the embedding, which lists, initializes and saves it, once; the embedding
 * must come earlier in the model, and give dense gradients.
 */
public final class VocabProjection extends AbstractBlock {

    private static final byte VERSION = 1;

    private final long vocabSize;
    private final Parameter weight;
    private final Parameter bias;
    private final boolean tied;

    private VocabProjection(Builder builder) {
        super(VERSION);
        vocabSize = builder.vocabSize;
        tied = builder.weight != null;
        weight =
                tied
                        ? builder.weight
                        : addParameter(
                                Parameter.builder()
                                        .setName("weight")
                                        .setType(Parameter.Type.WEIGHT)
                                        .optInitializer(new NormalInitializer(0.02f))
                                        .build());
        bias =
                builder.bias
                        ? addParameter(
                                Parameter.builder()
                                        .setName("bias")
                                        .setType(Parameter.Type.BIAS)
                                        .optInitializer(Initializer.ZEROS)
                                        .build())
                        : null;
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray hidden = inputs.singletonOrThrow();
        NDManager owner = hidden.getManager();
        NDList out = new NDList(hidden);
        out.add(ArrayKernels.alias(owner, array(weight, parameterStore, hidden, training)));
        if (bias != null) {
            out.add(ArrayKernels.alias(owner, array(bias, parameterStore, hidden, training)));
        }
        return out;
    }

    /**
     * Computes the logits of all tokens given, without the scale and the cap that a loss may add
     * ({@link RingDtpLoss#logits} has them).
     *
     * @param parameterStore the parameter store
     * @param hidden hidden states (.., H)
     * @param training true to have the parameters track gradients
     * @return logits (.., V)
     */
    public NDArray logits(ParameterStore parameterStore, NDArray hidden, boolean training) {
        return logits(
                hidden,
                array(weight, parameterStore, hidden, training),
                bias == null ? null : array(bias, parameterStore, hidden, training));
    }

    /**
     * Computes logits.
     *
     * @param hidden hidden states (.., H)
     * @param weight the weight (V, H)
     * @param bias the bias (V), or null
     * @return logits (.., V)
     */
    public static NDArray logits(NDArray hidden, NDArray weight, NDArray bias) {
        NDArray product = hidden.matMul(weight.transpose());
        return bias == null ? product : product.add(bias);
    }

    private NDArray array(
            Parameter parameter, ParameterStore store, NDArray hidden, boolean training) {
        if (!parameter.isInitialized()) {
            throw new IllegalStateException(
                    "The projection's "
                            + parameter.getName()
                            + " is not initialized"
                            + (tied ? "; a tied weight is initialized by its embedding" : ""));
        }
        return store.getValue(parameter, hidden.getDevice(), training);
    }

    @Override
    protected void beforeInitialize(Shape... inputs) {
        super.beforeInitialize(inputs);
        if (inputs.length != 1 || inputs[0].dimension() < 2) {
            throw new IllegalArgumentException(
                    "VocabProjection takes one input of shape (B, S, H) or (N, H), not "
                            + Arrays.toString(inputs));
        }
        Shape shape = matrix(inputs[0]);
        if (tied && weight.getShape() != null && !weight.getShape().equals(shape)) {
            throw new IllegalArgumentException(
                    "The tied weight has shape "
                            + weight.getShape()
                            + ", but the projection needs "
                            + shape);
        }
    }

    @Override
    protected void prepare(Shape[] inputs) {
        if (!tied) {
            weight.setShape(matrix(inputs[0]));
        }
        if (bias != null) {
            bias.setShape(new Shape(vocabSize));
        }
    }

    private Shape matrix(Shape hidden) {
        return new Shape(vocabSize, hidden.get(hidden.dimension() - 1));
    }

    @Override
    public boolean isInitialized() {
        // a tied weight is not among the block's own
        return super.isInitialized() && weight.isInitialized();
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        Shape hidden = inputShapes[0];
        return bias == null
                ? new Shape[] {hidden, matrix(hidden)}
                : new Shape[] {hidden, matrix(hidden), new Shape(vocabSize)};
    }

    /**
     * Returns V.
     *
     * @return the size of the vocabulary
     */
    public long getVocabSize() {
        return vocabSize;
    }

    /**
     * Creates a builder.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Builds a {@link VocabProjection}. */
    public static final class Builder {

        private long vocabSize;
        private boolean bias;
        private Parameter weight;

        Builder() {}

        /**
         * Sets V, the size of the vocabulary.
         *
         * @param vocabSize a positive number
         * @return this builder
         */
        public Builder setVocabSize(long vocabSize) {
            this.vocabSize = vocabSize;
            return this;
        }

        /**
         * Sets whether there is a bias. The default is none.
         *
         * @param bias true for a bias
         * @return this builder
         */
        public Builder optBias(boolean bias) {
            this.bias = bias;
            return this;
        }

        /**
         * Has the projection share the parameter of an embedding, of shape (V, H).
         *
         * @param weight the embedding's parameter
         * @return this builder
         */
        public Builder optWeight(Parameter weight) {
            this.weight = weight;
            return this;
        }

        /**
         * Builds the block.
         *
         * @return the block
         * @throws IllegalArgumentException if the size of the vocabulary is missing
         */
        public VocabProjection build() {
            if (vocabSize < 1) {
                throw new IllegalArgumentException(
                        "setVocabSize must be given a positive number, not " + vocabSize);
            }
            return new VocabProjection(this);
        }
    }
}
