package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.metric.Metrics;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.ParameterTracker;
import java.io.IOException;
import java.lang.ref.Cleaner;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.function.Predicate;
import java.util.function.Supplier;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.autograd.ParameterPaths;
import org.djlmoe.autograd.StepOptimizer;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.optimizer.AdamWKernels.Precision;
import org.djlmoe.optimizer.BucketLayout.Slab;
import org.djlmoe.optimizer.StateBuckets.Need;
import org.djlmoe.optimizer.StateBuckets.Place;
import org.djlmoe.tier.HostTier;
import org.djlmoe.tier.MappedFileTier;
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
 * <p>Memory: 8 bytes an element in the tier. On the CPU the update runs where the state lies, in
 * memory or in mapped files ({@link Builder#optFileTier}), and makes no copies. On a GPU, or with
 * {@link Builder#optStaged}, buckets pass through two staging buffers: one is updated while the
 * other is written back and filled again.
 *
 * <p>Weights of half precision (F16, BF16) have a 32-bit master in the tier, 12 bytes an element in
 * all; the master is updated and rounded into the weight. Their gradients may be of half precision
 * or of 32 bits; the former are widened, a bucket at a time, in one more buffer. What changes such
 * a weight from outside is lost with its next update.
 *
 * <p>Bound of all buffers, with buckets of beta elements: 2 x 16 x beta bytes.
 *
 * <p>It works under {@code BoundedTrainer} and under DJL's trainer. DJL's hands over one gradient
 * at a time, so what depends on all of them, the global norm and leaving out a whole step, needs
 * {@link Builder#optModel} or {@link Builder#optBlock} there. Gradients are set to zero; an array
 * that is handed to {@link #update} as a gradient may be changed. A parameter that no gradient has
 * reached is left as it is.
 *
 * <p>When not to use it: weights are floats of 16 or 32 bits on one device; everything else is
 * refused. The path for GPUs is the one that {@code optStaged} takes on the CPU, and is untested
 * there.
 *
 * <p>Source: I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization", arXiv
 * 1711.05101.
 */
public final class OffloadStreamAdamW extends Optimizer implements StepOptimizer, AutoCloseable {

    private static final Logger LOGGER = LoggerFactory.getLogger(OffloadStreamAdamW.class);
    private static final Cleaner CLEANER = Cleaner.create();

    /** Elements of a bucket that needs buffers. More would gain nothing. */
    private static final long BUCKET = 1L << 22;

    /** Elements of a bucket that needs none; less costs a tenth of the time. */
    private static final long IN_PLACE = 1L << 25;

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
    private final GradientSequence sequence;
    private final AdamWKernels kernels;
    private final StateBuckets buckets;
    private final BucketPipeline pipeline;
    private final IdleExperts idle;
    private final ExpertLoad load;
    private final Cleaner.Cleanable cleanable;
    private boolean closed;

    private Decision decision;
    private final int begin;
    private int updates;
    private long skipped;
    private double globalNorm = Double.NaN;

    /** What holds for a whole step: its number, and how gradients are scaled, or that it's left. */
    private record Decision(
            int number, double divisor, boolean skip, Map<String, long[]> expertLoad) {}

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
        sequence = new GradientSequence(block);
        begin = builder.begin;
        this.kernels = kernels;
        Tier tier = builder.tier;
        if (tier == null) {
            tier =
                    builder.directory == null
                            ? new HostTier()
                            : new MappedFileTier(builder.directory);
        }
        long elements = builder.bucketElements;
        if (elements == 0) {
            boolean inPlace =
                    !builder.staged
                            && !tier.isBackedByFiles()
                            && !Engine.getEngine("PyTorch").defaultDevice().isGpu();
            buckets = new StateBuckets(tier, inPlace ? IN_PLACE : BUCKET, BUCKET);
        } else {
            buckets = new StateBuckets(tier, elements, elements);
        }
        pipeline = new BucketPipeline(tier, kernels, builder.staged);
        idle = builder.idle;
        load = builder.load;
        // DJL never closes an optimizer, so a program that only swapped the class would leak.
        cleanable =
                CLEANER.register(this, new Release(pipeline, builder.tier == null ? tier : null));
    }

    /** Must not know the optimizer, or it would keep it alive. */
    private record Release(BucketPipeline pipeline, Tier owned) implements Runnable {
        @Override
        public void run() {
            pipeline.close();
            if (owned != null) {
                owned.close();
            }
        }
    }

    private void requireOpen() {
        if (closed) {
            throw new IllegalStateException(
                    "This optimizer is closed and its state is gone; build a new one");
        }
    }

    @Override
    public void step(List<Slot> parameters) {
        requireOpen();
        if (parameters.isEmpty()) {
            return;
        }
        try (GradMode off = GradMode.off()) {
            checkDevices(parameters);
            parameters.forEach(slot -> check(slot.path(), slot.weight(), slot.gradient()));
            Map<String, NDArray> gradients = new LinkedHashMap<>();
            parameters.forEach(slot -> gradients.put(slot.path(), slot.gradient()));
            decide(gradients);
            List<NDArray> all = List.copyOf(gradients.values());
            boolean clear = kernels.areContiguous(all);
            if (decision.skip || !apply(parameters, clear)) {
                kernels.zero(all);
            }
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
        requireOpen();
        try (GradMode off = GradMode.off()) {
            String path = sequence.path(parameterId);
            check(path, weight, gradient);
            if (isMadeUp(weight, gradient)) {
                return;
            }
            if (block == null && needsAllGradients()) {
                throw new IllegalStateException(
                        "optClipNorm and optNonFinite look at all gradients of a step, but this"
                                + " trainer hands over one at a time ("
                                + path
                                + "): give the optimizer the model with optModel(model) or"
                                + " optBlock(block), or train with BoundedTrainer");
            }
            sequence.next(parameterId, path, gradient, this::decide);
            if (!decision.skip) {
                // It may be a copy of the gradient that is to be set to zero.
                apply(List.of(new Slot(parameterId, path, weight, gradient)), false);
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
            // The superclass counts as well, but its count cannot be restored.
            updates = Math.max(begin, updates) + 1;
        }
        // Also of a step that is left out: its tokens are no tokens of the next.
        decision = new Decision(updates, divisor, skip, load == null ? Map.of() : load.take());
        pipeline.beginStep();
    }

    private double unscaledLimit() {
        return clipValue > 0 ? clipValue / Math.abs(rescaleGrad) : 0;
    }

    /**
     * Updates parameters.
     *
     * @param clear whether to set gradients to zero, which all have to be contiguous
     * @return whether all are zero now
     */
    private boolean apply(List<Slot> parameters, boolean clear) {
        Map<String, Need> needs = new LinkedHashMap<>();
        Map<String, Slot> slots = new LinkedHashMap<>();
        for (Slot slot : parameters) {
            boolean half = kernels.precision(slot.weight()) == Precision.HALF;
            needs.put(slot.path(), new Need(slot.weight().getShape(), half));
            slots.put(slot.path(), slot);
        }
        // Asked for everything that can go wrong before anything changes.
        Map<String, UpdatePlan.Group> groupOf = new HashMap<>();
        needs.forEach(
                (path, need) -> {
                    groupOf.put(path, group(path, need.shape().dimension()));
                    checkLoad(path, need.shape());
                });
        for (String path : buckets.ensure(needs)) {
            if (needs.get(path).master()) {
                fillMaster(path, slots.get(path).weight());
            }
        }
        UpdatePlan plan = new UpdatePlan(buckets, idle == IdleExperts.DECAY);
        slots.forEach(
                (path, slot) -> plan.add(slot, groupOf.get(path), decision.expertLoad.get(path)));
        if (!plan.isEmpty()) {
            Device device = parameters.get(0).weight().getDevice();
            pipeline.run(
                    plan.jobs(),
                    plan.following(),
                    device,
                    (job, state) ->
                            plan.slabs(job.bucket())
                                    .forEach(
                                            (group, slabs) ->
                                                    update(group, slabs, state, device, clear)));
        }
        return clear && !plan.anyIdle();
    }

    private void fillMaster(String path, NDArray weight) {
        for (Place place : buckets.entries().get(path).places) {
            StateBuckets.Bucket bucket = buckets.bucket(place.bucket());
            Slab slab = bucket.slabs.get(place.index());
            kernels.copy(
                    bucket.state.array(),
                    2 * bucket.state.elements() + slab.offset(),
                    weight,
                    slab.start(),
                    slab.length());
        }
    }

    private void checkLoad(String path, Shape shape) {
        long[] tokens = decision.expertLoad.get(path);
        if (tokens != null && (shape.dimension() == 0 || shape.get(0) != tokens.length)) {
            throw new IllegalArgumentException(
                    "The expert load of "
                            + path
                            + " is of "
                            + tokens.length
                            + " experts, but its shape is "
                            + shape);
        }
    }

    private UpdatePlan.Group group(String path, int rank) {
        double rate = learningRate.getNewValue(path, decision.number) * groups.multiplier(path);
        if (!Double.isFinite(rate)) {
            throw new IllegalArgumentException(
                    "The learning rate of " + path + " is " + rate + " at update " + updates);
        }
        return new UpdatePlan.Group(rate, groups.decay(path, rank, decay), false);
    }

    private void update(
            UpdatePlan.Group group,
            AdamWKernels.Slabs slabs,
            AdamWKernels.State state,
            Device device,
            boolean clear) {
        if (group.idle()) {
            kernels.shrink(slabs, state, 1 - group.learningRate() * group.decay());
            return;
        }
        boolean half =
                state.master()
                        && slabs.gradients().stream()
                                .anyMatch(g -> kernels.precision(g) == Precision.HALF);
        kernels.update(
                slabs,
                state,
                half ? pipeline.scratch(state.elements(), device) : BucketPipeline.noScratch(),
                new AdamWKernels.Rule(
                        group.learningRate(),
                        beta1,
                        beta2,
                        epsilon,
                        group.decay(),
                        unscaledLimit(),
                        decision.divisor),
                clear);
    }

    private static void checkDevices(List<Slot> parameters) {
        Slot first = parameters.get(0);
        Device device = first.weight().getDevice();
        for (Slot slot : parameters) {
            if (!slot.weight().getDevice().equals(device)) {
                throw new IllegalArgumentException(
                        String.format(
                                "%s lies on %s and %s on %s, but an optimizer updates on one"
                                        + " device: build one for each",
                                first.path(), device, slot.path(), slot.weight().getDevice()));
            }
        }
    }

    private void check(String path, NDArray weight, NDArray gradient) {
        Precision ofWeight = kernels.precision(weight);
        Precision ofGradient = kernels.precision(gradient);
        if (ofWeight == Precision.OTHER
                || ofGradient == Precision.OTHER
                || ofWeight == Precision.F32 && ofGradient == Precision.HALF) {
            throw new IllegalArgumentException(
                    String.format(
                            "%s is %s with a gradient of %s, but this optimizer updates FLOAT32"
                                    + " with gradients of FLOAT32, and FLOAT16 or BFLOAT16 with"
                                    + " gradients of either: convert it, or freeze the parameter",
                            path, weight.getDataType(), gradient.getDataType()));
        }
        if (!weight.getDevice().equals(gradient.getDevice())) {
            throw new IllegalArgumentException(
                    path
                            + " lies on "
                            + weight.getDevice()
                            + " and its gradient on "
                            + gradient.getDevice());
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
        requireOpen();
        return new AdamWState(buckets, kernels);
    }

    /**
     * Writes the state of all parameters, of frozen ones too, and the count of steps to a
     * safetensors file: {@code <path>.exp_avg}, {@code <path>.exp_avg_sq}, {@code <path>.step} and,
     * for weights of half precision, {@code <path>.master}. The weights are not in it.
     *
     * <p>The file takes its name when it is complete on the disk; until then an older one stays.
     * Beside the state this takes 1 MB. Call it between steps.
     *
     * @param file the file; its folder must exist
     * @throws IllegalStateException if DJL's trainer handed over parameters by id, and the model is
     *     not known
     * @throws IOException if writing fails
     */
    public void save(Path file) throws IOException {
        AdamWState from = state();
        if (sequence.isNamedById()) {
            throw new IllegalStateException(
                    "DJL's trainer names parameters by numbers that are others in every process, so"
                            + " their state cannot be found again: give the optimizer the model with"
                            + " optModel(model) or optBlock(block)");
        }
        new StateFile(from).save(file, updates, skipped, options());
    }

    /**
     * Reads a file that {@link #save} wrote, for the parameters of the model that the builder was
     * given.
     *
     * @param file the file
     * @return what became of each parameter
     * @throws IllegalStateException if the builder was given none
     * @throws IOException as the other method does
     * @see #load(Path, Block)
     */
    public StateReport load(Path file) throws IOException {
        if (block == null) {
            throw new IllegalStateException(
                    "Which parameters there are is not known: call load(file, block), or give the"
                            + " optimizer the model with optModel(model) or optBlock(block)");
        }
        return load(file, block.get());
    }

    /**
     * Reads a file that {@link #save} wrote. Tier and size of buckets may be others than those it
     * was written with; the steps that follow are those of a run without interruption, to the bit.
     *
     * <p>What this optimizer holds is replaced. State of a parameter that is frozen now is kept. A
     * trained parameter without state starts at step 0. State of parameters that the model lacks is
     * left out. All of these are named in the report and in one line of the log, as is an option
     * that has changed, which counts from now on. Beside the state this takes 1 MB. Call it between
     * steps.
     *
     * @param file the file
     * @param trained the initialized model
     * @return what became of each parameter
     * @throws IllegalStateException if this optimizer holds state of another shape
     * @throws SafetensorsException if the file is no such file or is broken, or a parameter has
     *     another shape in it; nothing has changed then
     * @throws IOException if reading fails; what this optimizer holds is of no more use then
     */
    public StateReport load(Path file, Block trained) throws IOException {
        Map<String, Parameter> parameters = ParameterPaths.of(trained);
        Map<String, StateFile.Target> targets = new LinkedHashMap<>();
        parameters.forEach(
                (path, parameter) -> {
                    if (!parameter.isInitialized()) {
                        throw new IllegalArgumentException(
                                path + " has no values yet: initialize the model first");
                    }
                    NDArray weight = parameter.getArray();
                    targets.put(
                            path,
                            new StateFile.Target(
                                    weight.getShape(),
                                    kernels.precision(weight) == Precision.HALF,
                                    parameter.requiresGradient()));
                });
        try (GradMode off = GradMode.off()) {
            StateFile.Loaded loaded =
                    new StateFile(state())
                            .load(
                                    file,
                                    targets,
                                    options(),
                                    path -> fillMaster(path, parameters.get(path).getArray()));
            updates = loaded.updates();
            skipped = loaded.skipped();
            decision = null;
            sequence.restart();
            StateReport report = loaded.report();
            if (report.isComplete()) {
                LOGGER.info("{}", report);
            } else {
                LOGGER.warn("{}", report);
            }
            return report;
        }
    }

    /** What decides an update, besides the learning rate and the groups, which are code. */
    private Map<String, String> options() {
        Map<String, String> options = new LinkedHashMap<>();
        options.put("beta1", Double.toString(beta1));
        options.put("beta2", Double.toString(beta2));
        options.put("epsilon", Double.toString(epsilon));
        options.put("weight_decay", Double.toString(decay));
        options.put("clip_norm", Double.toString(clipNorm));
        options.put("clip_value", Double.toString(clipValue));
        options.put("rescale_grad", Float.toString(rescaleGrad));
        options.put("non_finite", nonFinite.name());
        options.put("idle_experts", load == null ? "none" : idle.name());
        return options;
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

    /**
     * Returns what the last step took; under DJL's trainer, its updates so far.
     *
     * @return the figures, zeros before the first
     */
    public OptimizerStatistics lastStep() {
        return pipeline.statistics();
    }

    /**
     * Returns a listener that adds {@link #lastStep} to the trainer's {@link Metrics}, if it has
     * any: {@code optimizer-fetch}, {@code optimizer-update}, {@code optimizer-write-back} and
     * {@code optimizer-stall}, in milliseconds. DJL tells listeners nothing after a step, so a
     * step's figures come with the next batch, or the end of the epoch.
     *
     * @return the listener, for one trainer
     */
    public TrainingListener metricsListener() {
        return new OptimizerMetrics(this);
    }

    /**
     * Frees staging buffers and threads, and the state, unless it lies in a tier that the builder
     * was given. Files are gone then.
     */
    @Override
    public void close() {
        closed = true;
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
        private long bucketElements;
        private Tier tier;
        private Path directory;
        private boolean staged;
        private IdleExperts idle = IdleExperts.SKIP;
        private ExpertLoad load;
        private int begin;

        Builder() {}

        @Override
        public Builder optBeginNumUpdate(int beginNumUpdate) {
            begin = beginNumUpdate;
            return super.optBeginNumUpdate(beginNumUpdate);
        }

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
         * Sets the largest size of a bucket. By default 2^22 elements, or 2^25 where F32 state is
         * updated in memory in place, which needs no buffers.
         *
         * @param elements the number of elements, at least 1
         * @return this builder
         */
        public Builder optBucketElements(long elements) {
            if (elements < 1) {
                throw new IllegalArgumentException(
                        "A bucket holds at least 1 element, not " + elements);
            }
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
         * Puts the state into mapped files, where it is updated in place and takes none of the
         * memory that the process must keep: 8 bytes a parameter, 12 of half precision. The files
         * are gone when the optimizer is closed or the process ends.
         *
         * @param folder an existing folder on a disk
         * @return this builder
         * @throws IllegalArgumentException if it does not exist, is not writable or lies in memory
         */
        public Builder optFileTier(Path folder) {
            new MappedFileTier(folder).close();
            directory = folder;
            return this;
        }

        /**
         * Updates in staging buffers instead of where the state lies, as always on a GPU. On the
         * CPU it is slower; it is there to see what a GPU would do. Off by default.
         *
         * @param value whether to
         * @return this builder
         */
        public Builder optStaged(boolean value) {
            staged = value;
            return this;
        }

        /**
         * Treats experts without tokens by a policy, and counts the updates of each expert by
         * itself. By default an expert without tokens is updated with its gradient of zeros, as any
         * other parameter: its running means fade, and it moves and decays.
         *
         * @param policy what a step does with them
         * @param source tells which they are
         * @return this builder
         */
        public Builder optIdleExperts(IdleExperts policy, ExpertLoad source) {
            idle = policy;
            load = source;
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
            if (tier != null && directory != null) {
                throw new IllegalArgumentException(
                        "The state lies in one place: optTier or optFileTier, not both");
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
