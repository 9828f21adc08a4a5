package org.djlmoe.autograd;

import ai.djl.MalformedModelException;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.BlockList;
import ai.djl.nn.Parameter;
import ai.djl.nn.ParameterList;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.util.PairList;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.Predicate;

/**
 * Wraps any block so that, under a {@link BoundedTrainer}, it keeps only its inputs and runs
 * forward once more in backward (activation checkpointing).
 *
 * <p>Same shapes, results and gradients as the block itself: dropout draws the same numbers in the
 * repetition, and running statistics (batch normalization) move once. It is transparent for
 * parameter names and for saving.
 *
 * <p>Bound: of all wrapped blocks together, the activations of one live at a time, plus each one's
 * inputs. The price is a second forward. Do not wrap what bounds itself already, with less
 * repetition: the segments of {@code model}, {@code moe} and {@code vocab}.
 *
 * <p>Source: T. Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv 1604.06174.
 */
public final class Checkpointed implements Block {

    private final Block block;

    /**
     * Wraps a block.
     *
     * @param block the block to run again in backward
     */
    public Checkpointed(Block block) {
        this.block = block;
    }

    /**
     * Returns the block inside, for whoever looks for blocks of a certain class.
     *
     * @param block any block
     * @return the innermost wrapped block, or the block itself if it is not a {@code Checkpointed}
     */
    public static Block unwrap(Block block) {
        Block actual = block;
        while (actual instanceof Checkpointed) {
            actual = ((Checkpointed) actual).block;
        }
        return actual;
    }

    @Override
    public NDList forward(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        if (!training) {
            return block.forward(parameterStore, inputs, false, params);
        }
        return Tape.apply(new Repeated(parameterStore, params), inputs);
    }

    /** One use of the block. */
    private final class Repeated implements Segment {

        private final ParameterStore parameterStore;
        private final PairList<String, Object> params;

        Repeated(ParameterStore parameterStore, PairList<String, Object> params) {
            this.parameterStore = parameterStore;
            this.params = params;
        }

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            seed(inputs, context);
            return block.forward(parameterStore, inputs, true, params);
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
            Map<NDArray, NDArray> statistics = runningStatistics();
            seed(inputs, context);
            try {
                return Tape.differentiate(
                        leaves -> block.forward(parameterStore, leaves, true, params),
                        inputs,
                        outputGradients);
            } finally {
                statistics.forEach((array, before) -> before.copyTo(array));
            }
        }

        @Override
        public NDList plain(NDList inputs) {
            return block.forward(parameterStore, inputs, true, params);
        }

        @Override
        public boolean hasTrainableParameters() {
            return block.getParameters().values().stream().anyMatch(Parameter::requiresGradient);
        }

        private void seed(NDList inputs, SegmentContext context) {
            if (context.seed() >= 0) {
                Engine engine = inputs.head().getManager().getEngine();
                engine.setRandomSeed((int) context.seed());
            }
        }

        /** Copies of the arrays that a forward moves besides its outputs. */
        private Map<NDArray, NDArray> runningStatistics() {
            Map<NDArray, NDArray> copies = new LinkedHashMap<>();
            for (Parameter parameter : block.getParameters().values()) {
                Parameter.Type type = parameter.getType();
                if (type == Parameter.Type.RUNNING_MEAN || type == Parameter.Type.RUNNING_VAR) {
                    copies.put(parameter.getArray(), parameter.getArray().duplicate());
                }
            }
            return copies;
        }
    }

    @Override
    public void setInitializer(Initializer initializer, Parameter.Type type) {
        block.setInitializer(initializer, type);
    }

    @Override
    public void setInitializer(Initializer initializer, String paramName) {
        block.setInitializer(initializer, paramName);
    }

    @Override
    public void setInitializer(Initializer initializer, Predicate<Parameter> predicate) {
        block.setInitializer(initializer, predicate);
    }

    @Override
    public void initialize(NDManager manager, DataType dataType, Shape... inputShapes) {
        block.initialize(manager, dataType, inputShapes);
    }

    @Override
    public boolean isInitialized() {
        return block.isInitialized();
    }

    @Override
    public void cast(DataType dataType) {
        block.cast(dataType);
    }

    @Override
    public void clear() {
        block.clear();
    }

    @Override
    public PairList<String, Shape> describeInput() {
        return block.describeInput();
    }

    @Override
    public BlockList getChildren() {
        return block.getChildren();
    }

    @Override
    public ParameterList getDirectParameters() {
        return block.getDirectParameters();
    }

    @Override
    public ParameterList getParameters() {
        return block.getParameters();
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return block.getOutputShapes(inputShapes);
    }

    @Override
    public Shape[] getInputShapes() {
        return block.getInputShapes();
    }

    @Override
    public DataType[] getOutputDataTypes() {
        return block.getOutputDataTypes();
    }

    @Override
    public void saveParameters(DataOutputStream os) throws IOException {
        block.saveParameters(os);
    }

    @Override
    public void loadParameters(NDManager manager, DataInputStream is)
            throws IOException, MalformedModelException {
        block.loadParameters(manager, is);
    }

    @Override
    public Map<String, String> getCustomMetadata() {
        return block.getCustomMetadata();
    }
}
