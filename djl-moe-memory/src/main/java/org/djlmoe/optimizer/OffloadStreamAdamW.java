package org.djlmoe.optimizer;

import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.ParameterTracker;
import java.lang.ref.Cleaner;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.Predicate;
import java.util.function.Supplier;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.ParameterPaths;
import org.djlmoe.autograd.StepOptimizer;
import org.djlmoe.optimizer.BucketLayout.Slab;
import org.djlmoe.optimizer.StateBuckets.Bucket;
import org.djlmoe.optimizer.StateBuckets.Place;
import org.djlmoe.tier.HostTier;
import org.djlmoe.tier.Tier;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * AdamW whose state lies in a {@link Tier} in buckets of fixed size, with the rule of {@code
 * torch.optim.AdamW}.
 *
 * <p>For update t of a parameter, counted for each parameter by itself, with gradient g:
 *
 * <pre>
 * w = w * (1 - lr * decay)
 * m = beta1 * m + (1 - beta1) * g
 * v = beta2 * v + (1 - beta2) * g * g
 * w = w - lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon)
 * </pre>
 *
 * <p>This is not what DJL's {@code AdamW} does, which has one step count for all parameters, adds
 * epsilon to the uncorrected root and clips values from above only.
 *
 * <p>Memory: 8 bytes an element in the tier. The update runs where the state lies and makes no
 * copies; the buckets bound what an update ever has to hold of it elsewhere.
 *
 * <p>It works under {@code BoundedTrainer} and under DJL's trainer. DJL's hands over one gradient
 * at a time, so what depends on all of them, the global norm and leaving out a whole step, needs
 * {@link Builder#optModel} or {@link Builder#optBlock} there. Gradients are set to zero; an array
 * that is handed to {@link #update} as a gradient may be changed. A parameter that no gradient has
 * reached is left as it is.
 *
 * <p>When not to use it: weights are 32-bit floats on the CPU here, on one device; everything else
 * is refused.
 *
 * <p>Source: I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization", arXiv
 * 1711.05101.
 */
public final class OffloadStreamAdamW extends Optimizer implements StepOptimizer, AutoCloseable {

    private static final Logger LOGGER = LoggerFactory.getLogger(OffloadStreamAdamW.class);
    private static final Cleaner CLEANER = Cleaner.create();

    private final ParameterTracker learningRate;
    private final double beta1;
    private final double beta2;
    private final double epsilon;
    private final double decay;
    private final double clipNorm;
    private final double clipValue;
    private final NonFinitePolicy nonFinite;
    private final ParameterGroups groups;
    private final Supplier<Block> block;
    private final AdamWKernels kernels;
    private final StateBuckets buckets;
    private final Cleaner.Cleanable cleanable;

    /** Paths by DJL's ids, learned from the block at the first id that is not in it. */
    private final Map<String, String> paths = new HashMap<>();

    /** Under DJL's trainer: the ids of the current step that are still to come, or have been. */
    private final Set<String> pending = new HashSet<>();

    private final Set<String> seen = new HashSet<>();

    private Decision decision;
    private int updates;
    private long skipped;
    private double globalNorm = Double.NaN;

    /** What holds for a whole step: its number, and how gradients are scaled, or that it's left. */
    private record Decision(int number, double divisor, boolean skip) {}

    private OffloadStreamAdamW(Builder builder, AdamWKernels kernels) {
        super(builder);
        learningRate = builder.learningRate;
        beta1 = builder.beta1;
        beta2 = builder.beta2;
        epsilon = builder.epsilon;
        decay = builder.decay;
        clipNorm = builder.clipNorm;
        clipValue = builder.clipValue;
        nonFinite = builder.nonFinite;
        groups = builder.groups;
        block = builder.block;
        this.kernels = kernels;
        Tier tier = builder.tier == null ? new HostTier() : builder.tier;
        buckets = new StateBuckets(tier, builder.bucketElements);
        // DJL never closes an optimizer, so a program that only swapped the class would leak.
        cleanable = CLEANER.register(this, builder.tier == null ? tier::close : () -> {});
    }

    @Override
    public void step(List<Slot> parameters) {
        if (parameters.isEmpty()) {
            return;
        }
        try (GradMode off = GradMode.off()) {
            parameters.forEach(slot -> check(slot.path(), slot.weight(), slot.gradient()));
            Map<String, NDArray> gradients = new LinkedHashMap<>();
            parameters.forEach(slot -> gradients.put(slot.path(), slot.gradient()));
            decide(gradients);
            if (!decision.skip) {
                apply(parameters);
            }
            kernels.zero(List.copyOf(gradients.values()));
        }
    }

    /**
     * Updates one weight, as DJL's trainer asks for, and sets the gradient that PyTorch keeps with
     * it to zero.
     *
     * @param parameterId DJL's id of the parameter
     * @param weight the weight, updated in place
     * @param gradient its gradient, which may be changed
     * @throws IllegalStateException if an option needs all gradients of the step and the model is
     *     not known
     */
    @Override
    public void update(String parameterId, NDArray weight, NDArray gradient) {
        try (GradMode off = GradMode.off()) {
            String path = path(parameterId);
            check(path, weight, gradient);
            if (isMadeUp(weight, gradient)) {
                return;
            }
            if (block == null) {
                beginWithoutBlock(parameterId, path, gradient);
            } else {
                beginWithBlock(parameterId, path, gradient);
            }
            if (!decision.skip) {
                apply(List.of(new Slot(parameterId, path, weight, gradient)));
            }
            Gradients.zero(weight);
        }
    }

    /**
     * DJL makes up a gradient of zeros where backward has left none; PyTorch has no update then.
     */
    private boolean isMadeUp(NDArray weight, NDArray gradient) {
        if (!weight.hasGradient()) {
            return false;
        }
        try (NDArray real = Gradients.of(weight)) {
            return real == null && kernels.isZero(gradient);
        }
    }

    /** A repeated id starts a step. */
    private void beginWithoutBlock(String id, String path, NDArray gradient) {
        if (needsAllGradients()) {
            throw new IllegalStateException(
                    "optClipNorm and optNonFinite look at all gradients of a step, but this trainer"
                            + " hands over one at a time ("
                            + path
                            + "): give the optimizer the model with optModel(model) or"
                            + " optBlock(block), or train with BoundedTrainer");
        }
        if (decision == null || seen.contains(id)) {
            seen.clear();
            decide(Map.of(path, gradient));
        }
        seen.add(id);
    }

    /** An id that is not expected (any more) starts a step. */
    private void beginWithBlock(String id, String path, NDArray gradient) {
        if (pending.remove(id)) {
            return;
        }
        pending.clear();
        Map<String, NDArray> gradients = new LinkedHashMap<>();
        Map<String, NDArray> handles = new LinkedHashMap<>();
        Set<String> expected = new HashSet<>();
        try {
            ParameterPaths.of(block.get())
                    .forEach(
                            (name, parameter) -> {
                                NDArray handle = Gradients.of(parameter);
                                if (handle != null) {
                                    handles.put(name, handle);
                                    expected.add(parameter.getId());
                                }
                            });
            gradients.putAll(handles);
            // What is handed over counts, also where it is not the array that PyTorch keeps.
            gradients.put(path, gradient);
            decide(gradients);
        } finally {
            handles.values().forEach(NDArray::close);
        }
        pending.addAll(expected);
        pending.remove(id);
    }

    private boolean needsAllGradients() {
        return clipNorm > 0 || nonFinite != NonFinitePolicy.PROPAGATE;
    }

    /** Counts a step and decides how its gradients are scaled, or that it is left out. */
    private void decide(Map<String, NDArray> gradients) {
        String culprit = null;
        boolean skip = false;
        double divisor = 1.0 / rescaleGrad;
        if (needsAllGradients()) {
            double squares = 0;
            for (Map.Entry<String, NDArray> entry : gradients.entrySet()) {
                double sum = kernels.sumOfSquares(entry.getValue(), 0);
                if (!Double.isFinite(sum) && culprit == null) {
                    culprit = entry.getKey();
                }
                squares +=
                        clipValue > 0
                                ? kernels.sumOfSquares(entry.getValue(), unscaledLimit())
                                : sum;
            }
            globalNorm = Math.abs(rescaleGrad) * Math.sqrt(squares);
            if (culprit != null && nonFinite == NonFinitePolicy.RAISE) {
                throw new ArithmeticException(
                        "The gradient of "
                                + culprit
                                + " holds a NaN or an infinity; nothing has been updated");
            }
            skip = culprit != null && nonFinite == NonFinitePolicy.SKIP;
            if (clipNorm > 0) {
                divisor /= Math.min(1, clipNorm / (globalNorm + 1e-6));
            }
        }
        if (skip) {
            skipped++;
            LOGGER.warn(
                    "A step is left out ({} so far): the gradient of {} holds a NaN or an infinity",
                    skipped,
                    culprit);
        } else {
            // The superclass counts per id and keeps the highest, from optBeginNumUpdate on.
            updates = updateCount("step");
        }
        decision = new Decision(updates, divisor, skip);
    }

    private double unscaledLimit() {
        return clipValue > 0 ? clipValue / Math.abs(rescaleGrad) : 0;
    }

    /** Slabs of one bucket that have the same learning rate and decay. */
    private record Group(double learningRate, double decay) {}

    private void apply(List<Slot> parameters) {
        Map<String, Shape> shapes = new LinkedHashMap<>();
        Map<String, Slot> slots = new HashMap<>();
        Map<String, Group> groupOf = new HashMap<>();
        for (Slot slot : parameters) {
            String path = slot.path();
            shapes.put(path, slot.weight().getShape());
            slots.put(path, slot);
            groupOf.put(path, group(path, slot.weight().getShape().dimension()));
        }
        buckets.ensure(shapes);
        TreeMap<Integer, Map<Group, List<Integer>>> work = new TreeMap<>();
        for (String path : shapes.keySet()) {
            for (Place place : buckets.entries().get(path).places()) {
                work.computeIfAbsent(place.bucket(), k -> new LinkedHashMap<>())
                        .computeIfAbsent(groupOf.get(path), k -> new ArrayList<>())
                        .add(place.index());
            }
        }
        work.forEach(
                (number, parts) ->
                        parts.forEach(
                                (group, indices) ->
                                        update(buckets.bucket(number), indices, group, slots)));
    }

    private Group group(String path, int rank) {
        double rate = learningRate.getNewValue(path, decision.number) * groups.multiplier(path);
        if (!Double.isFinite(rate)) {
            throw new IllegalArgumentException(
                    "The learning rate of " + path + " is " + rate + " at update " + updates);
        }
        return new Group(rate, groups.decay(path, rank, decay));
    }

    private void update(
            Bucket bucket, List<Integer> indices, Group group, Map<String, Slot> slots) {
        int n = indices.size();
        List<NDArray> weights = new ArrayList<>(n);
        List<NDArray> gradients = new ArrayList<>(n);
        long[] start = new long[n];
        long[] offset = new long[n];
        long[] length = new long[n];
        long[] step = new long[n];
        for (int i = 0; i < n; i++) {
            int index = indices.get(i);
            Slab slab = bucket.slabs.get(index);
            Slot slot = slots.get(slab.path());
            weights.add(slot.weight());
            gradients.add(slot.gradient());
            start[i] = slab.start();
            offset[i] = slab.offset();
            length[i] = slab.length();
            step[i] = ++bucket.steps[index];
        }
        kernels.update(
                new AdamWKernels.Slabs(weights, gradients, start, offset, length, step),
                bucket.expAvg,
                bucket.expAvgSq,
                new AdamWKernels.Rule(
                        group.learningRate,
                        beta1,
                        beta2,
                        epsilon,
                        group.decay,
                        unscaledLimit(),
                        decision.divisor));
    }

    private String path(String id) {
        if (block == null) {
            return id;
        }
        if (!paths.containsKey(id)) {
            ParameterPaths.of(block.get())
                    .forEach((path, parameter) -> paths.put(parameter.getId(), path));
            paths.putIfAbsent(id, id);
        }
        return paths.get(id);
    }

    private static void check(String path, NDArray weight, NDArray gradient) {
        if (weight.getDevice().isGpu()) {
            throw new IllegalArgumentException(
                    path
                            + " lies on "
                            + weight.getDevice()
                            + ", but this optimizer updates on the CPU: set optDevices(new Device[]"
                            + " {Device.cpu()}) in the training configuration");
        }
        if (weight.getDataType() != DataType.FLOAT32
                || gradient.getDataType() != DataType.FLOAT32) {
            throw new IllegalArgumentException(
                    String.format(
                            "%s is %s with a gradient of %s, but this optimizer updates FLOAT32"
                                    + " only: train FLOAT32 weights, or freeze the parameter",
                            path, weight.getDataType(), gradient.getDataType()));
        }
        if (!weight.getShape().equals(gradient.getShape())) {
            throw new IllegalArgumentException(
                    path
                            + " has the shape "
                            + weight.getShape()
                            + " and a gradient of the shape "
                            + gradient.getShape());
        }
    }

    /**
     * Returns the state by parameter path.
     *
     * @return a view of this optimizer
     */
    public AdamWState state() {
        return new AdamWState(buckets, kernels);
    }

    /**
     * Returns the number of the last step, the one that the learning-rate tracker was asked with.
     * Steps that were left out don't count.
     *
     * @return the number of steps, from {@code optBeginNumUpdate} on; 0 before the first
     */
    public int updates() {
        return updates;
    }

    /**
     * Returns how many steps were left out because of a gradient that was not finite.
     *
     * @return the number of steps
     */
    public long skippedSteps() {
        return skipped;
    }

    /**
     * Returns the Euclidean norm of all gradients of the last step, rescaled and with values
     * clipped, before it was itself clipped.
     *
     * @return the norm; NaN if neither {@code optClipNorm} nor {@code optNonFinite} asks for it
     */
    public double globalNorm() {
        return globalNorm;
    }

    /** Frees the state, unless it lies in a tier that the builder was given. */
    @Override
    public void close() {
        cleanable.clean();
    }

    static double nonNegative(String what, double value) {
        if (!(value >= 0) || Double.isInfinite(value)) {
            throw new IllegalArgumentException(
                    "The " + what + " must be 0 or above and finite, not " + value);
        }
        return value;
    }

    /**
     * Creates a builder.
     *
     * @return a new builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Builds an {@link OffloadStreamAdamW}. */
    public static final class Builder extends OptimizerBuilder<Builder> {

        private ParameterTracker learningRate;
        private double beta1 = 0.9;
        private double beta2 = 0.999;
        private double epsilon = 1e-8;
        private double decay = 0.01;
        private double clipNorm;
        private double clipValue;
        private NonFinitePolicy nonFinite = NonFinitePolicy.PROPAGATE;
        private final ParameterGroups groups = new ParameterGroups();
        private Supplier<Block> block;
        private long bucketElements = 1L << 22;
        private Tier tier;

        Builder() {}

        @Override
        protected Builder self() {
            return this;
        }

        /**
         * Sets the learning rate. The tracker is asked with the parameter's path and the number of
         * the step, 1 at first, as DJL's optimizers ask it.
         *
         * @param tracker the learning rate by step
         * @return this builder
         */
        public Builder setLearningRateTracker(ParameterTracker tracker) {
            learningRate = tracker;
            return this;
        }

        /**
         * Sets the decay of the gradient's running mean; 0.9 by default.
         *
         * @param value at least 0, below 1; give a double, since 0.9f is another number
         * @return this builder
         */
        public Builder optBeta1(double value) {
            beta1 = value;
            return this;
        }

        /**
         * Sets the decay of the running mean of the gradient's square; 0.999 by default.
         *
         * @param value at least 0, below 1; give a double, since 0.999f is another number
         * @return this builder
         */
        public Builder optBeta2(double value) {
            beta2 = value;
            return this;
        }

        /**
         * Sets what is added to the root of the corrected mean square; 1e-8 by default.
         *
         * @param value at least 0
         * @return this builder
         */
        public Builder optEpsilon(double value) {
            epsilon = value;
            return this;
        }

        /**
         * Sets the weight decay of parameters of rank 2 and above that no decay group names; 0.01
         * by default.
         *
         * @param value at least 0
         * @return this builder
         */
        public Builder optWeightDecay(double value) {
            decay = value;
            return this;
        }

        /** DJL's name for {@link #optWeightDecay}. */
        @Override
        public Builder optWeightDecays(float weightDecays) {
            return optWeightDecay(weightDecays);
        }

        /**
         * Sets the weight decay of some parameters, whatever their rank. The first group that
         * matches counts.
         *
         * @param path which parameters, by path
         * @param weightDecay at least 0
         * @return this builder
         */
        public Builder optDecayGroup(Predicate<String> path, double weightDecay) {
            groups.addDecay(path, weightDecay);
            return this;
        }

        /**
         * Multiplies the learning rate of some parameters. The first group that matches counts.
         *
         * @param path which parameters, by path
         * @param multiplier at least 0
         * @return this builder
         */
        public Builder optLearningRateGroup(Predicate<String> path, double multiplier) {
            groups.addMultiplier(path, multiplier);
            return this;
        }

        /**
         * Sets both the learning-rate multiplier and the weight decay of some parameters.
         *
         * @param path which parameters, by path
         * @param multiplier at least 0
         * @param weightDecay at least 0
         * @return this builder
         */
        public Builder optGroup(Predicate<String> path, double multiplier, double weightDecay) {
            return optLearningRateGroup(path, multiplier).optDecayGroup(path, weightDecay);
        }

        /**
         * Names the block that is trained. Paths, and what needs all gradients of a step, come from
         * it under DJL's trainer.
         *
         * @param trained the model's block
         * @return this builder
         */
        public Builder optBlock(Block trained) {
            block = () -> trained;
            return this;
        }

        /**
         * Names the model that is trained; its block is looked up when the first step needs it.
         *
         * @param model the model
         * @return this builder
         */
        public Builder optModel(Model model) {
            block = model::getBlock;
            return this;
        }

        /**
         * Scales all gradients of a step by {@code min(1, norm / (global norm + 1e-6))}, as {@code
         * torch.nn.utils.clip_grad_norm_} does. Off by default.
         *
         * @param norm the largest Euclidean norm of all gradients together, above 0; infinity to
         *     only measure
         * @return this builder
         */
        public Builder optClipNorm(double norm) {
            if (!(norm > 0)) {
                throw new IllegalArgumentException("The clip norm must be above 0, not " + norm);
            }
            clipNorm = norm;
            return this;
        }

        /**
         * Clips every element of a gradient to [-value, value], before the global norm is taken.
         * Off by default.
         *
         * @param value the largest absolute value, above 0 and finite
         * @return this builder
         */
        public Builder optClipValue(double value) {
            if (!(value > 0) || Double.isInfinite(value)) {
                throw new IllegalArgumentException(
                        "The clip value must be above 0 and finite, not " + value);
            }
            clipValue = value;
            return this;
        }

        /** DJL's name for {@link #optClipValue}, on both sides here; below 0 switches it off. */
        @Override
        public Builder optClipGrad(float clipGrad) {
            if (clipGrad < 0) {
                clipValue = 0;
                return this;
            }
            return optClipValue(clipGrad);
        }

        @Override
        public Builder setRescaleGrad(float rescaleGrad) {
            if (rescaleGrad == 0 || !Float.isFinite(rescaleGrad)) {
                throw new IllegalArgumentException(
                        "The gradient scale must be finite and not 0, but is " + rescaleGrad);
            }
            return super.setRescaleGrad(rescaleGrad);
        }

        /**
         * Sets what happens when a gradient holds a NaN or an infinity; {@link
         * NonFinitePolicy#PROPAGATE} by default.
         *
         * @param policy the policy
         * @return this builder
         */
        public Builder optNonFinite(NonFinitePolicy policy) {
            nonFinite = policy;
            return this;
        }

        /**
         * Sets the largest size of a bucket; 2^22 elements by default.
         *
         * @param elements the number of elements, at least 1
         * @return this builder
         */
        public Builder optBucketElements(long elements) {
            bucketElements = elements;
            return this;
        }

        /**
         * Sets where the state lies; the host's memory by default.
         *
         * @param place the tier, to be closed by the caller
         * @return this builder
         */
        public Builder optTier(Tier place) {
            tier = place;
            return this;
        }

        /**
         * Builds the optimizer.
         *
         * @return the optimizer
         * @throws IllegalArgumentException if the learning-rate tracker is missing or a number is
         *     out of its range
         * @throws org.djlmoe.kernel.KernelException if DJL's PyTorch engine is missing
         */
        public OffloadStreamAdamW build() {
            return build(null);
        }

        OffloadStreamAdamW build(AdamWKernels kernels) {
            if (learningRate == null) {
                throw new IllegalArgumentException(
                        "The learning rate is missing: setLearningRateTracker(Tracker.fixed(1e-3f))");
            }
            below1("beta1", beta1);
            below1("beta2", beta2);
            nonNegative("epsilon", epsilon);
            nonNegative("weight decay", decay);
            if (bucketElements < 1) {
                throw new IllegalArgumentException(
                        "A bucket holds at least 1 element, not " + bucketElements);
            }
            return new OffloadStreamAdamW(this, kernels == null ? AdamWKernels.best() : kernels);
        }

        private static void below1(String what, double value) {
            if (!(value >= 0 && value < 1)) {
                throw new IllegalArgumentException(
                        "The " + what + " must be at least 0 and below 1, not " + value);
            }
        }
    }
}
