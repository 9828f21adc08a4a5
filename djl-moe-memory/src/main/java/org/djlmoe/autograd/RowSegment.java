package org.djlmoe.autograd;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.Shape;

/**
 * Lets a segment of one input and one output that works on rows [N, H] take arrays [..., H].
 *
 * <p>The reshapes are inside, so that a boundary is the array that the segment before has made and
 * not a view of it: memory of an array cannot be freed while a view holds it.
 */
public final class RowSegment implements Segment {

    private final Segment rows;

    /**
     * Wraps a segment.
     *
     * @param rows a segment whose input and output are [N, H]
     */
    public RowSegment(Segment rows) {
        this.rows = rows;
    }

    @Override
    public NDList forward(SegmentContext context, NDList inputs) {
        return restored(rows.forward(context, flattened(inputs)), inputs);
    }

    @Override
    public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
        NDList gradients = rows.backward(context, flattened(inputs), flattened(outputGradients));
        NDList restored = restored(gradients, inputs);
        if (context.isHandedOver(gradients.head())) {
            context.handOver(restored.head());
        }
        return restored;
    }

    @Override
    public NDList plain(NDList inputs) {
        return restored(rows.plain(flattened(inputs)), inputs);
    }

    @Override
    public boolean hasTrainableParameters() {
        return rows.hasTrainableParameters();
    }

    private static NDList flattened(NDList arrays) {
        NDArray array = arrays.singletonOrThrow();
        return new NDList(array.reshape(-1, array.getShape().getLastDimension()));
    }

    private static NDList restored(NDList rows, NDList inputs) {
        NDArray array = rows.singletonOrThrow();
        Shape shape = inputs.head().getShape();
        long width = array == null ? 0 : array.getShape().getLastDimension();
        Shape axes = shape.slice(0, shape.dimension() - 1);
        return new NDList(array == null ? null : array.reshape(axes.add(width)));
    }
}
