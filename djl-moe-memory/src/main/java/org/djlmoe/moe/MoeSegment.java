package org.djlmoe.moe;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * One pass of a {@link MoeBlock}: router over all tokens, then the experts chunk by chunk; rows [N,
 * H].
 */
final class MoeSegment implements Segment {

    private final MoeBlock block;
    private final ParameterStore parameterStore;
    private final boolean training;
    private final ExpertKernels.Settings settings;

    MoeSegment(MoeBlock block, ParameterStore parameterStore, boolean training) {
        this.block = block;
        this.parameterStore = parameterStore;
        this.training = training;
        this.settings =
                new ExpertKernels.Settings(
                        block.router().topK(),
                        block.eps(),
                        block.experts().adapterScale(),
                        block.hasResidual(),
                        block.router().renormalizes());
    }

    @Override
    public NDList forward(SegmentContext context, NDList inputs) {
        NDArray x = inputs.head();
        long tokens = x.getShape().get(0);
        Shape routes = new Shape(tokens, settings.topK());
        NDArray ids = context.manager().create(routes, DataType.INT64);
        NDArray combine = context.manager().create(routes);
        NDArray y = x.getManager().create(x.getShape());
        List<NDArray> weights = weights(x);
        int chunks = block.chunks(tokens);
        if (block.router().selector() == null) {
            ExpertKernels.Selection selection = block.router().selection(x.getManager());
            for (int i = 0; i < chunks; i++) {
                ExpertKernels.route(x, i, chunks, weights, settings, selection, ids, combine);
            }
        } else {
            block.router().refuseSelector(training);
            ids.close();
            ids = select(x, chunks, weights, combine);
        }
        block.router().observe(ids);
        for (int i = 0; i < chunks; i++) {
            ExpertKernels.forward(x, i, chunks, weights, settings, ids, combine, y);
        }
        if (context.isRecording()) {
            context.save("ids", ids);
            context.save("combine", combine);
        }
        return new NDList(y);
    }

    /** Token by token in order: the logits of all rows first, since a chunk takes every K-th. */
    private NDArray select(NDArray x, int chunks, List<NDArray> weights, NDArray combine) {
        try (NDArray logits =
                x.getManager().create(new Shape(x.getShape().get(0), block.router().experts()))) {
            for (int i = 0; i < chunks; i++) {
                ExpertKernels.routerLogits(x, i, chunks, weights, settings, logits);
            }
            NDArray ids = block.router().select(logits);
            for (int i = 0; i < chunks; i++) {
                ExpertKernels.combine(logits, i, chunks, settings, ids, combine);
            }
            return ids;
        }
    }

    @Override
    public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
        NDArray x = inputs.head();
        NDArray g = outputGradients.head();
        NDArray dx = x.getManager().create(x.getShape());
        List<NDArray> weights = weights(x);
        List<NDArray> gradients = new ArrayList<>();
        for (NDArray weight : weights) {
            NDArray gradient = context.gradient(weight);
            gradients.add(gradient == null ? TorchKernels.nothing() : gradient);
        }
        NDArray ids = context.get("ids");
        NDArray combine = context.get("combine");
        NDArray balance =
                block.balanceCoefficient() == 0
                        ? TorchKernels.nothing()
                        : ExpertKernels.balanceGradient(
                                x.getManager(),
                                ids,
                                block.router().experts(),
                                block.balanceCoefficient());
        int chunks = block.chunks(x.getShape().get(0));
        for (int i = 0; i < chunks; i++) {
            ExpertKernels.backward(
                    x, i, chunks, g, weights, gradients, settings, balance, ids, combine, dx);
        }
        return new NDList(dx);
    }

    @Override
    public NDList plain(NDList inputs) {
        return new NDList(block.plain(parameterStore, inputs.head(), training));
    }

    @Override
    public boolean hasTrainableParameters() {
        return parameters().stream().anyMatch(p -> p != null && p.requiresGradient());
    }

    private List<Parameter> parameters() {
        List<Parameter> parameters = new ArrayList<>();
        parameters.add(block.norm());
        parameters.add(block.router().weight());
        parameters.addAll(block.experts().weights());
        return parameters;
    }

    private List<NDArray> weights(NDArray x) {
        List<NDArray> arrays = new ArrayList<>();
        for (Parameter parameter : parameters()) {
            arrays.add(
                    parameter == null
                            ? TorchKernels.nothing()
                            : parameterStore.getValue(parameter, x.getDevice(), training));
        }
        return arrays;
    }
}
