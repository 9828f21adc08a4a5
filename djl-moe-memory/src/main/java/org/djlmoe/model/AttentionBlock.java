package org.djlmoe.model;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.index.NDIndex;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.autograd.RowSegment;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.autograd.Tape;
import org.djlmoe.kernel.ArrayKernels;
import org.djlmoe.kernel.AttentionKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * The attention half of a decoder layer: {@code y = x + attention(norm(x)) o'}, causal, with rotary
 * positions, grouped KV heads and an optional sliding window.
 *
 * <p>It keeps its input until backward, which repeats the forward as far as the attended values.
 * Sequences are taken a few at a time, about 4096 tokens, and at least one.
 *
 * <p>Bound above input, output and weights: with T = max(4096, S) tokens, about T (3 heads d + 2
 * kvHeads d + 2 H) values forward and three times that backward; never S x S.
 *
 * <ul>
 *   <li>input and output: rows [B S, H], sequence after sequence
 *   <li>parameters: {@code input_layernorm.weight} [H], {@code self_attn.q_proj.weight} [heads d,
 *       H], {@code self_attn.k_proj.weight} and {@code v_proj} [kvHeads d, H], {@code
 *       self_attn.o_proj.weight} [H, heads d]
 * </ul>
 *
 * <p>Sources: T. Dao, "FlashAttention-2", arXiv 2307.08691 (through PyTorch); J. Su et al.,
 * "RoFormer", arXiv 2104.09864.
 */
public final class AttentionBlock extends AbstractBlock {

    private static final int CHUNK_TOKENS = 4096;

    private final AttentionKernels.Settings settings;
    private final List<Parameter> weights = new ArrayList<>();

    /**
     * Creates the block.
     *
     * @param config sizes and constants
     */
    public AttentionBlock(MoeConfig config) {
        long hidden = config.hiddenSize();
        long queries = (long) config.numHeads() * config.headDim();
        long keys = (long) config.numKeyValueHeads() * config.headDim();
        settings =
                new AttentionKernels.Settings(
                        config.numHeads(),
                        config.numKeyValueHeads(),
                        config.headDim(),
                        config.slidingWindow(),
                        config.ropeTheta(),
                        config.rmsNormEps());
        Initializer normal = new NormalInitializer((float) config.initializerRange());
        add("input_layernorm.weight", Parameter.Type.GAMMA, Initializer.ONES, new Shape(hidden));
        add("self_attn.q_proj.weight", Parameter.Type.WEIGHT, normal, new Shape(queries, hidden));
        add("self_attn.k_proj.weight", Parameter.Type.WEIGHT, normal, new Shape(keys, hidden));
        add("self_attn.v_proj.weight", Parameter.Type.WEIGHT, normal, new Shape(keys, hidden));
        add("self_attn.o_proj.weight", Parameter.Type.WEIGHT, normal, new Shape(hidden, queries));
    }

    private void add(String name, Parameter.Type type, Initializer initializer, Shape shape) {
        weights.add(
                addParameter(
                        Parameter.builder()
                                .setName(name)
                                .setType(type)
                                .optInitializer(initializer)
                                .optShape(shape)
                                .build()));
    }

    /**
     * Runs the block on rows of sequences of a given length.
     *
     * @param parameterStore the parameter store
     * @param rows [B S, H]
     * @param sequence S
     * @param training whether parameters track gradients
     * @return [B S, H]
     */
    public NDArray forward(
            ParameterStore parameterStore, NDArray rows, int sequence, boolean training) {
        Segment segment = segment(parameterStore, rows, sequence, training);
        return Tape.apply(segment, new NDList(rows)).singletonOrThrow();
    }

    private Segment segment(
            ParameterStore parameterStore, NDArray x, int sequence, boolean training) {
        List<NDArray> arrays = new ArrayList<>();
        for (Parameter weight : weights) {
            arrays.add(parameterStore.getValue(weight, x.getDevice(), training));
        }
        return new Attention(arrays, sequence);
    }

    /** Takes [B, S, H], for use as a block of its own. */
    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray x = inputs.singletonOrThrow();
        Shape shape = x.getShape();
        if (shape.dimension() != 3) {
            throw new IllegalArgumentException(
                    "AttentionBlock expects [batch, sequence, hidden], got " + shape);
        }
        Segment segment = segment(parameterStore, x, (int) shape.get(1), training);
        return Tape.apply(new RowSegment(segment), new NDList(x));
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        return inputShapes;
    }

    private final class Attention implements Segment {

        private final List<NDArray> arrays;
        private final int sequence;

        Attention(List<NDArray> arrays, int sequence) {
            this.arrays = arrays;
            this.sequence = sequence;
        }

        @Override
        public NDList forward(SegmentContext context, NDList inputs) {
            NDArray x = inputs.head();
            NDArray y = x.getManager().create(x.getShape());
            for (NDIndex chunk : chunks(x)) {
                AttentionKernels.forward(x.get(chunk), sequence, arrays, settings, y.get(chunk));
            }
            return new NDList(y);
        }

        @Override
        public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
            NDArray x = inputs.head();
            NDArray g = outputGradients.head();
            NDArray dx = x.getManager().create(x.getShape());
            List<NDArray> gradients = new ArrayList<>();
            for (NDArray array : arrays) {
                NDArray gradient = context.gradient(array);
                gradients.add(gradient == null ? TorchKernels.nothing() : gradient);
            }
            for (NDIndex chunk : chunks(x)) {
                AttentionKernels.backward(
                        x.get(chunk),
                        sequence,
                        g.get(chunk),
                        arrays,
                        gradients,
                        settings,
                        dx.get(chunk));
            }
            return new NDList(context.handOver(dx));
        }

        @Override
        public NDList plain(NDList inputs) {
            return new NDList(AttentionKernels.plain(inputs.head(), sequence, arrays, settings));
        }

        @Override
        public boolean hasTrainableParameters() {
            return arrays.stream().anyMatch(ArrayKernels::requiresGradient);
        }

        /** Ranges of whole sequences. */
        private List<NDIndex> chunks(NDArray x) {
            long rows = x.getShape().get(0);
            long step = (long) Math.max(1, CHUNK_TOKENS / Math.max(1, sequence)) * sequence;
            List<NDIndex> ranges = new ArrayList<>();
            for (long start = 0; start < rows; start += step) {
                ranges.add(new NDIndex().addSliceDim(start, Math.min(rows, start + step)));
            }
            return ranges;
        }
    }
}
