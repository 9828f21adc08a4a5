package org.djlmoe.moe;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.autograd.Segment;
import org.djlmoe.autograd.SegmentContext;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.routing.MaskLogits;
import org.djlmoe.routing.Router;

/**
 * One pass of a {@link MoeBlock}: router over all tokens, then the experts one after the other,
 * each on blocks of its rows. The block is what an even router gives an expert of a chunk; chunks
 * need no other order where nothing is exchanged, and so a weight and its gradient stay in the
 * cache while all of their rows go by. Over the ranks of a group, {@link DispatchedExperts} do.
 *
 * <p>Input: [..., H]. Outputs: the same shape, and balance loss and z-loss, () each, if the block
 * hands them out. The losses have true gradients: backward takes those of the two outputs, and in
 * training adds the block's coefficients to them.
 */
final class MoeSegment implements Segment {

    private final MoeBlock block;
    private final ParameterStore parameterStore;
    private final NDArray mask;
    private final boolean training;
    private final ExpertKernels.Settings settings;
    private final DispatchedExperts dispatched;
    private int excluded;

    /**
     * @param mask which tokens count in losses and statistics, 0 for those that do not; or nothing
     */
    MoeSegment(MoeBlock block, ParameterStore parameterStore, NDArray mask, boolean training) {
        this.block = block;
        this.parameterStore = parameterStore;
        this.mask = mask;
        this.training = training;
        this.settings =
                new ExpertKernels.Settings(
                        block.router().topK(),
                        block.eps(),
                        block.experts().adapterScale(),
                        block.hasResidual(),
                        block.router().renormalizes());
        this.dispatched =
                block.dispatch() == null ? null : new DispatchedExperts(block.dispatch(), settings);
    }

    @Override
    public NDList forward(SegmentContext context, NDList inputs) {
        if (context.isRecording() && trainsMask() && dispatched != null) {
            throw new IllegalStateException(
                    "Mask logits train in one process only: detach the mask or the group");
        }
        NDArray x = rows(inputs.head());
        NDManager manager = x.getManager();
        long tokens = x.getShape().get(0);
        Shape routes = new Shape(tokens, settings.topK());
        NDArray ids = context.manager().create(routes, DataType.INT64);
        NDArray combine = context.manager().create(routes);
        NDArray sums = TorchKernels.nothing();
        NDArray counted = TorchKernels.nothing();
        if (wantsLosses()) {
            sums = newSums(context.manager());
            counted = maskOf(tokens);
        }
        NDArray y = manager.create(x.getShape());
        List<NDArray> weights = weights(x);
        ExpertKernels.Selection selection = block.router().selection(manager);
        try (ExpertScratch scratch = forwardScratch(context.manager(), x, weights)) {
            Router router = block.router();
            router.refuseSelector(training);
            if (router.selector() == null) {
                ExpertKernels.route(
                        x, 0, 1, weights, settings, selection, counted, sums, ids, combine,
                        scratch);
            }
            if (router.selector() != null || router.logitObserver() != null) {
                try (NDArray logits = logits(x, weights, scratch)) {
                    if (router.logitObserver() != null) {
                        router.logitObserver().accept(logits);
                    }
                    if (router.selector() != null) {
                        try (NDArray chosen = router.select(logits)) {
                            chosen.copyTo(ids);
                        }
                        ExpertKernels.combine(logits, settings, counted, sums, ids, combine);
                    }
                }
            }
            router.observe(ids);
            if (dispatched == null) {
                ExpertKernels.forward(x, 0, 1, weights, settings, ids, combine, scratch, y);
            }
        }
        if (dispatched != null) {
            long rows = block.chunkRows(tokens);
            dispatched.forward(context.manager(), x, weights, rows, ids, combine, y);
        }
        NDList outputs = new NDList(y.reshape(inputs.head().getShape()));
        if (wantsLosses()) {
            block.report(sums.toDoubleArray(), training, context.isRecording());
            if (block.hasLossOutputs()) {
                outputs.add(manager.create(new Shape()));
                outputs.add(manager.create(new Shape()));
                ExpertKernels.routerLosses(sums, outputs.get(1), outputs.get(2));
            }
        }
        if (context.isRecording()) {
            context.save("ids", ids);
            context.save("combine", combine);
            if (wantsLosses()) {
                context.save("sums", sums);
                if (counted.size() > 0) {
                    context.save("mask", counted);
                }
            }
            if (selection.outside().size() > 0) {
                // Copies: arrays from values point into Java's memory.
                context.save("outside", selection.outside().duplicate());
            }
            if (trainsMask()) {
                MaskLogits logits = block.router().mask();
                context.save("slopes", logits.slopes(x.getManager()));
                excluded = excluded(logits, selection);
                if (excluded > 0) {
                    context.save("bias", selection.bias().duplicate());
                }
            }
        }
        return outputs;
    }

    @Override
    public NDList backward(SegmentContext context, NDList inputs, NDList outputGradients) {
        NDArray x = rows(inputs.head());
        NDArray arrived = outputGradients.head();
        NDArray g = arrived == null ? x.zerosLike() : rows(arrived);
        NDArray dx = x.getManager().create(x.getShape());
        List<NDArray> weights = weights(x);
        List<NDArray> gradients = new ArrayList<>();
        for (NDArray weight : weights) {
            NDArray gradient = context.gradient(weight);
            gradients.add(gradient == null ? TorchKernels.nothing() : gradient);
        }
        NDArray ids = context.get("ids");
        NDArray combine = context.get("combine");
        NDArray counted = context.find("mask").orElseGet(TorchKernels::nothing);
        NDArray losses = lossGradients(context, outputGradients);
        NDArray outside = context.find("outside").orElseGet(TorchKernels::nothing);
        NDArray slopes = context.find("slopes").orElse(null);
        NDArray dcombine =
                slopes == null ? TorchKernels.nothing() : x.getManager().create(combine.getShape());
        long tokens = x.getShape().get(0);
        long rows = block.chunkRows(tokens);
        if (dispatched == null) {
            try (ExpertScratch scratch =
                    ExpertScratch.backward(context.manager(), rows, settings.topK(), weights)) {
                ExpertKernels.backward(
                        x, 0, 1, g, weights, gradients, settings, losses, counted, outside, ids,
                        combine, scratch, dx, dcombine);
            }
        } else {
            dispatched.backward(
                    context.manager(),
                    x,
                    g,
                    weights,
                    gradients,
                    rows,
                    losses,
                    counted,
                    outside,
                    ids,
                    combine,
                    dx);
        }
        if (slopes != null) {
            maskBackward(context, x, g, weights, outside, slopes, ids, combine, dcombine);
        }
        return new NDList(context.handOver(dx.reshape(inputs.head().getShape())));
    }

    /** Gradient of the mask logits, added to theirs. */
    private void maskBackward(
            SegmentContext context,
            NDArray x,
            NDArray g,
            List<NDArray> weights,
            NDArray outside,
            NDArray slopes,
            NDArray ids,
            NDArray combine,
            NDArray dcombine) {
        NDArray logits =
                parameterStore.getValue(block.router().mask().logits(), x.getDevice(), training);
        NDArray gradient = context.gradient(logits);
        if (gradient == null) {
            return;
        }
        NDArray sums = x.getManager().zeros(new Shape(block.router().experts()), DataType.FLOAT64);
        ExpertKernels.maskGradient(ids, combine, dcombine, settings, sums);
        if (excluded > 0) {
            ExpertKernels.Selection selection =
                    new ExpertKernels.Selection(
                            context.get("bias"), false, 0, TorchKernels.nothing(), outside);
            long rows = block.chunkRows(x.getShape().get(0));
            try (ExpertScratch scratch =
                    ExpertScratch.backward(context.manager(), rows, settings.topK(), weights)) {
                ExpertKernels.excludedGradient(
                        x, g, weights, settings, selection, excluded, ids, combine, dcombine,
                        scratch, sums);
            }
        }
        ExpertKernels.maskLogitsGradient(sums, slopes, gradient);
    }

    /** For the kernels: the factors of the two losses are their gradients. */
    private NDArray lossGradients(SegmentContext context, NDList outputGradients) {
        double[] factors = {
            training ? block.balanceCoefficient() : 0, training ? block.zCoefficient() : 0
        };
        for (int i = 1; i < outputGradients.size(); i++) {
            NDArray gradient = outputGradients.get(i);
            factors[i - 1] += gradient == null ? 0 : gradient.getFloat();
        }
        return factors[0] == 0 && factors[1] == 0
                ? TorchKernels.nothing()
                : ExpertKernels.routerLossGradients(
                        context.manager(), context.get("sums"), factors[0], factors[1]);
    }

    /** Over ranks the experts compute elsewhere, and what is left here is to route. */
    private ExpertScratch forwardScratch(NDManager manager, NDArray x, List<NDArray> weights) {
        long rows = block.chunkRows(x.getShape().get(0));
        return dispatched == null
                ? ExpertScratch.forward(manager, rows, settings.topK(), weights)
                : ExpertScratch.routing(manager, rows, x.getShape().get(1));
    }

    private NDArray logits(NDArray x, List<NDArray> weights, ExpertScratch scratch) {
        Shape shape = new Shape(x.getShape().get(0), block.router().experts());
        NDArray logits = x.getManager().create(shape);
        ExpertKernels.routerLogits(x, weights, settings, scratch, logits);
        return logits;
    }

    /** How many dropped experts a row run for their gradient. */
    private static int excluded(MaskLogits logits, ExpertKernels.Selection selection) {
        if (logits.excluded() == 0 || selection.bias().size() == 0) {
            return 0;
        }
        int dropped = 0;
        for (double added : selection.bias().toDoubleArray()) {
            dropped += added == Double.NEGATIVE_INFINITY ? 1 : 0;
        }
        return Math.min(logits.excluded(), dropped);
    }

    @Override
    public NDList plain(NDList inputs) {
        NDArray x = rows(inputs.head());
        NDArray h = block.normedPlain(parameterStore, x, training);
        NDList chosen = block.router().forward(parameterStore, new NDList(h), training);
        NDArray y = block.expertsPlain(parameterStore, x, h, chosen, training);
        NDList outputs = new NDList(y.reshape(inputs.head().getShape()));
        if (!wantsLosses()) {
            return outputs;
        }
        NDArray router = parameterStore.getValue(block.router().weight(), x.getDevice(), training);
        NDArray counted = maskOf(x.getShape().get(0));
        try (NDArray sums = newSums(x.getManager())) {
            ExpertKernels.routerSums(h, router, chosen.head(), counted, sums);
            block.report(sums.toDoubleArray(), training, true);
        }
        if (block.hasLossOutputs()) {
            outputs.addAll(ExpertKernels.routerLossesPlain(h, router, chosen.head(), counted));
        } else if (block.balanceCoefficient() > 0 || block.zCoefficient() > 0) {
            NDList losses = ExpertKernels.routerLossesPlain(h, router, chosen.head(), counted);
            block.addLosses(losses);
        }
        return outputs;
    }

    @Override
    public boolean hasTrainableParameters() {
        MaskLogits logits = block.router().mask();
        return (logits != null && logits.trains())
                || parameters().stream().anyMatch(p -> p != null && p.requiresGradient());
    }

    /** Whether the router's losses are computed; statistics come from the same sums. */
    private boolean wantsLosses() {
        return training || block.hasLossOutputs();
    }

    /** Whether backward has to leave a gradient with the router's mask logits. */
    private boolean trainsMask() {
        MaskLogits logits = block.router().mask();
        return training && logits != null && logits.trains();
    }

    private NDArray newSums(NDManager manager) {
        return manager.zeros(new Shape(2L * block.router().experts() + 2), DataType.FLOAT64);
    }

    /** A copy: what was given may be gone when backward runs. */
    private NDArray maskOf(long tokens) {
        return mask == TorchKernels.nothing()
                ? mask
                : mask.toType(DataType.FLOAT32, true).reshape(tokens);
    }

    private static NDArray rows(NDArray array) {
        Shape shape = array.getShape();
        return shape.dimension() == 2 ? array : array.reshape(-1, shape.getLastDimension());
    }

    private List<Parameter> parameters() {
        List<Parameter> parameters = new ArrayList<>();
        parameters.add(block.norm());
        parameters.add(block.router().weight());
        parameters.addAll(block.experts().weights());
        parameters.addAll(block.sharedWeights());
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
