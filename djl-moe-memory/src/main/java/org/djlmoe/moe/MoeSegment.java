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
import org.djlmoe.routing.MaskLogits;

/**
 * One pass of a {@link MoeBlock}: router over all tokens, then the experts chunk by chunk; rows [N,
 * H].
 */
final class MoeSegment implements Segment {

    private final MoeBlock block;
    private final ParameterStore parameterStore;
    private final boolean training;
    private final ExpertKernels.Settings settings;
    private int excluded;

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
        ExpertKernels.Selection selection = block.router().selection(x.getManager());
        if (block.router().selector() == null) {
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
            if (selection.outside().size() > 0) {
                // Copies: arrays from values point into Java's memory.
                context.save("outside", selection.outside().duplicate());
            }
            MaskLogits mask = block.router().mask();
            if (training && mask != null && mask.trains()) {
                context.save("slopes", mask.slopes(x.getManager()));
                excluded = excluded(mask, selection);
                if (excluded > 0) {
                    context.save("bias", selection.bias().duplicate());
                }
            }
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
        NDArray outside = context.find("outside").orElseGet(TorchKernels::nothing);
        NDArray slopes = context.find("slopes").orElse(null);
        NDArray dcombine =
                slopes == null ? TorchKernels.nothing() : x.getManager().create(combine.getShape());
        int chunks = block.chunks(x.getShape().get(0));
        for (int i = 0; i < chunks; i++) {
            ExpertKernels.backward(
                    x, i, chunks, g, weights, gradients, settings, balance, outside, ids, combine,
                    dx, dcombine);
        }
        if (slopes != null) {
            NDArray sums =
                    x.getManager().zeros(new Shape(block.router().experts()), DataType.FLOAT64);
            ExpertKernels.maskGradient(ids, combine, dcombine, settings, sums);
            for (int i = 0; excluded > 0 && i < chunks; i++) {
                ExpertKernels.excludedGradient(
                        x,
                        i,
                        chunks,
                        g,
                        weights,
                        settings,
                        new ExpertKernels.Selection(context.get("bias"), false, 0, outside),
                        excluded,
                        ids,
                        combine,
                        dcombine,
                        sums);
            }
            NDArray logits =
                    parameterStore.getValue(
                            block.router().mask().logits(), x.getDevice(), training);
            NDArray gradient = context.gradient(logits);
            if (gradient != null) {
                ExpertKernels.maskLogitsGradient(sums, slopes, gradient);
            }
        }
        return new NDList(dx);
    }

    /** How many dropped experts a row run for their gradient. */
    private int excluded(MaskLogits mask, ExpertKernels.Selection selection) {
        if (mask.excluded() == 0 || selection.bias().size() == 0) {
            return 0;
        }
        int dropped = 0;
        for (double added : selection.bias().toDoubleArray()) {
            dropped += added == Double.NEGATIVE_INFINITY ? 1 : 0;
        }
        return Math.min(mask.excluded(), dropped);
    }

    @Override
    public NDList plain(NDList inputs) {
        return new NDList(block.plain(parameterStore, inputs.head(), training));
    }

    @Override
    public boolean hasTrainableParameters() {
        MaskLogits mask = block.router().mask();
        return (mask != null && mask.trains())
                || parameters().stream().anyMatch(p -> p != null && p.requiresGradient());
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
