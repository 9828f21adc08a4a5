package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDArrays;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Activation;
import ai.djl.nn.core.Linear;
import java.util.List;

/** The experts of a layer in DJL's operations: all routed rows at once, expert after expert. */
final class StockExperts {

    private StockExperts() {}

    /**
     * Applies the experts.
     *
     * @param x [N, H]
     * @param expert INT64 [N k], the expert of each route
     * @param combine [N k]
     * @param weights gate [I, H], up [I, H] and down [H, I] of each expert
     * @return [N, H]
     */
    static NDArray apply(NDArray x, NDArray expert, NDArray combine, List<NDArray> weights) {
        Shape shape = x.getShape();
        long k = expert.size() / shape.get(0);
        NDArray order = expert.argSort();
        NDArray token = order.toType(DataType.FLOAT64, false).div(k).floor();
        NDList rows = split(x.get(token.toType(DataType.INT64, false)), expert, weights.size() / 3);
        NDList outputs = new NDList();
        for (int e = 0; e < rows.size(); e++) {
            NDArray in = rows.get(e);
            NDArray gate = Linear.linear(in, weights.get(3 * e), null).get(0);
            NDArray up = Linear.linear(in, weights.get(3 * e + 1), null).get(0);
            // Not Activation.swish: its factor is a number in Java's memory, which backward reads
            // when it may be gone.
            NDArray act = Activation.sigmoid(gate).mul(gate).mul(up);
            outputs.add(Linear.linear(act, weights.get(3 * e + 2), null).get(0));
        }
        NDArray weighted = NDArrays.concat(outputs).mul(combine.get(order).expandDims(1));
        // back in the order of the tokens: DJL has no operation that adds rows at places
        return weighted.get(order.argSort())
                .reshape(new Shape(shape.get(0), k, shape.get(1)))
                .sum(new int[] {1});
    }

    private static NDList split(NDArray rows, NDArray expert, int experts) {
        long[] ends = new long[experts - 1];
        for (int e = 0; e < ends.length; e++) {
            ends[e] = expert.lte(e).toType(DataType.INT64, false).sum().getLong();
        }
        return rows.split(ends);
    }
}
