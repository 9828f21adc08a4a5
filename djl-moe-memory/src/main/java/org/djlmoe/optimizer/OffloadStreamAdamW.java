package org.djlmoe.optimizer;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.metric.Metrics;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Block;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.ParameterTracker;
import java.io.IOException;
import java.lang.ref.Cleaner;
import java.nio.file.Path;
import java.util.ArrayList;
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
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.optimizer.AdamWKernels.Run;
import org.djlmoe.optimizer.ParameterGroups.Rule;
import org.djlmoe.optimizer.StateBuckets.Need;
import org.djlmoe.optimizer.UpdatePlan.Group;
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
 * or of 32 bits; the former are widened, up to 2^21 elements at a time, in one more buffer. What
 * changes such a weight from outside is lost with its next update.
 *
 * <p>Bound of all buffers: none in place in memory; else two of a bucket, 8 bytes an element or 12
 * of half precision. To widen gradients of half precision, 8 MB.
 *
 * <p>It works under {@code BoundedTrainer} and under DJL's trainer. DJL's hands over one gradient
 * at a time, named by a number, so what depends on all of them or on paths (the global norm,
 * leaving out a whole step, experts without tokens) needs {@link Builder#optModel} or {@link
 * Builder#optBlock} there; so do groups that go by paths. Gradients are set to zero; an array that
 * is handed to {@link #update} as a gradient may be changed. A parameter that no gradient has ever
 * reached is left as it is; later, where PyTorch would have none, DJL has a gradient of zeros.
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

    private final double beta1;
    private final double beta2;
    private final double epsilon;
    private final Clipping clipping;
    private final ParameterGroups groups;
    private final boolean decaysIdle;
    private final Map<String, String> options;
    private final GradientSequence sequence;
    private final StepPolicy policy;
    private final SlotChecks checks;
    private final AdamWKernels kernels;
    private final StateBuckets buckets;
    private final AdamWState state;
    private final BucketPipeline pipeline;
    private final Cleaner.Cleanable cleanable;
    private boolean closed;

    /** The last step, or the one that DJL's trainer is in the middle of. */
    private StepPolicy.Step current;

    /** Whether something has been updated in it. */
    private boolean started;

    private OffloadStreamAdamW(Builder builder, AdamWKernels kernels) {
        super(builder);
        beta1 = builder.beta1;
        beta2 = builder.beta2;
        epsilon = builder.epsilon;
        clipping = new Clipping(rescaleGrad, builder.clipValue, builder.clipNorm);
        groups = builder.groups();
        decaysIdle = builder.idle == IdleExperts.DECAY;
        options = options(builder);
        sequence = new GradientSequence(builder.block);
        policy = new StepPolicy(kernels, clipping, builder.nonFinite, builder.load, builder.begin);
        checks = new SlotChecks(kernels);
        this.kernels = kernels;
        Tier tier = builder.tier == null ? builder.newTier() : builder.tier;
        buckets = new StateBuckets(tier, builder.bucketElements(tier));
        state = new AdamWState(buckets, kernels);
        pipeline = new BucketPipeline(tier, kernels, builder.staged);
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
            checks.check(parameters);
            Map<String, NDArray> gradients = new LinkedHashMap<>();
            parameters.forEach(slot -> gradients.put(slot.path(), slot.gradient()));
            begin(gradients);
            List<NDArray> all = List.copyOf(gradients.values());
            // Gradients are best set to zero run by run, while they are in a cache.
            boolean cleared = false;
            if (!current.skipped()) {
                UpdatePlan plan = plan(parameters);
                cleared = !plan.anyIdle() && kernels.areContiguous(all);
                run(plan, parameters.get(0).weight().getDevice(), cleared);
            }
            if (!cleared) {
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
     * @throws IllegalStateException if an option needs all gradients of the step, or paths, and the
     *     model is not known
     */
    @Override
    public void update(String parameterId, NDArray weight, NDArray gradient) {
        requireOpen();
        try (GradMode off = GradMode.off()) {
            Slot slot = new Slot(parameterId, sequence.path(parameterId), weight, gradient);
            checks.check(List.of(slot));
            if (isMadeUp(weight, gradient)) {
                return;
            }
            if (sequence.block() == null && policy.needsModel()) {
                throw new IllegalStateException(
                        "optClipNorm and optNonFinite look at all gradients of a step, and"
                                + " optIdleExperts at paths, but this trainer hands over one"
                                + " gradient at a time, named by a number ("
                                + parameterId
                                + "): give the optimizer the model with optModel(model) or"
                                + " optBlock(block), or train with BoundedTrainer");
            }
            sequence.next(parameterId, slot.path(), gradient, this::begin);
            if (!current.skipped()) {
                run(plan(List.of(slot)), weight.getDevice(), false);
            }
            // What was handed over may be a copy of the gradient.
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

    private void begin(Map<String, NDArray> gradients) {
        current = policy.next(gradients);
        started = false;
        pipeline.beginStep();
    }

    /** Plans updates; if that fails with nothing updated yet, the step has not been. */
    private UpdatePlan plan(List<Slot> slots) {
        UpdatePlan plan;
        try {
            plan = planned(slots);
        } catch (RuntimeException e) {
            if (!started) {
                policy.takeBack(current);
                sequence.forgetStep();
            }
            throw e;
        }
        checks.updated(slots);
        started = true;
        return plan;
    }

    private UpdatePlan planned(List<Slot> slots) {
        // Asked for everything that can go wrong before anything changes.
        Map<String, Need> needs = new LinkedHashMap<>();
        Map<String, Group> groupOf = new HashMap<>();
        for (Slot slot : slots) {
            Shape shape = slot.weight().getShape();
            needs.put(slot.path(), new Need(shape, kernels.isHalf(slot.weight())));
            groupOf.put(slot.path(), groups.of(slot.path(), shape.dimension(), current.number()));
            SlotChecks.checkLoad(slot, current.expertLoad().get(slot.path()));
        }
        buckets.ensure(needs);
        UpdatePlan plan = new UpdatePlan(buckets, decaysIdle);
        for (Slot slot : slots) {
            String path = slot.path();
            if (needs.get(path).master() && !state.hasWholeMaster(path)) {
                state.fillMaster(path, slot.weight());
            }
            plan.add(slot, groupOf.get(path), current.expertLoad().get(path));
        }
        return plan;
    }

    private void run(UpdatePlan plan, Device device, boolean clear) {
        if (!plan.isEmpty()) {
            pipeline.run(
                    plan.jobs(),
                    plan.following(),
                    device,
                    (job, there) ->
                            plan.runs(job.bucket())
                                    .forEach((group, runs) -> update(group, runs, there, clear)));
        }
    }

    private void update(Group group, List<Run> runs, BucketState there, boolean clear) {
        if (group.idle()) {
            kernels.shrink(runs, there, 1 - group.learningRate() * group.decay());
            return;
        }
        kernels.update(
                runs,
                there,
                scratch(runs, there.master()),
                new AdamWKernels.Rule(
                        group.learningRate(),
                        beta1,
                        beta2,
                        epsilon,
                        group.decay(),
                        clipping.limit(),
                        current.divisor()),
                clear);
    }

    /** A buffer for gradients of half precision, which only weights with a master may have. */
    private NDArray scratch(List<Run> runs, boolean master) {
        if (!master || runs.stream().noneMatch(run -> kernels.isHalf(run.gradient()))) {
            return TorchKernels.nothing();
        }
        long longest = runs.stream().mapToLong(Run::length).max().getAsLong();
        return pipeline.scratch(longest, runs.get(0).weight().getDevice());
    }

    /**
     * Returns the state by parameter path.
     *
     * @return a view of this optimizer
     */
    public AdamWState state() {
        requireOpen();
        return state;
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
        requireOpen();
        if (sequence.isNamedById()) {
            throw new IllegalStateException(
                    "DJL's trainer names parameters by numbers that are others in every process, so"
                            + " their state cannot be found again: give the optimizer the model with"
                            + " optModel(model) or optBlock(block)");
        }
        new StateFile(state, kernels).save(file, policy.updates(), policy.skipped(), options);
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
        Supplier<Block> block = sequence.block();
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
     * @param trained the initialized model, which is the one that is trained from now on
     * @return what became of each parameter
     * @throws IllegalStateException if this optimizer holds state of another shape, or with a
     *     master that the weight has no use for, or of parameters that DJL's trainer named by id
     * @throws SafetensorsException if the file is no such file or is broken, or a parameter has
     *     another shape in it; nothing has changed then
     * @throws IOException if reading fails; what this optimizer holds is of no more use then
     */
    public StateReport load(Path file, Block trained) throws IOException {
        requireOpen();
        if (sequence.isNamedById()) {
            throw new IllegalStateException(
                    "This optimizer has updated parameters that DJL's trainer named by numbers, and"
                            + " cannot tell which of the file they are: load into a new one");
        }
        try (GradMode off = GradMode.off()) {
            StateFile.Loaded loaded =
                    new StateFile(state, kernels).load(file, ParameterPaths.of(trained), options);
            policy.restore(loaded.updates(), loaded.skipped());
            sequence.restart(trained);
            checks.forgetModel();
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
    private Map<String, String> options(Builder builder) {
        Map<String, String> named = new LinkedHashMap<>();
        named.put("beta1", Double.toString(beta1));
        named.put("beta2", Double.toString(beta2));
        named.put("epsilon", Double.toString(epsilon));
        named.put("weight_decay", Double.toString(builder.decay));
        named.put("clip_norm", Double.toString(clipping.norm()));
        named.put("clip_value", Double.toString(clipping.value()));
        named.put("rescale_grad", Float.toString(rescaleGrad));
        named.put("non_finite", builder.nonFinite.name());
        named.put("idle_experts", builder.load == null ? "none" : builder.idle.name());
        return named;
    }

    /**
     * Returns the number of the last step, the one that the learning-rate tracker was asked with.
     * Steps that were left out don't count.
     *
     * @return the number of steps, from {@code optBeginNumUpdate} on; 0 before the first
     */
    public int updates() {
        return policy.updates();
    }

    /**
     * Returns how many steps were left out because of a gradient that was not finite.
     *
     * @return the number of steps
     */
    public long skippedSteps() {
        return policy.skipped();
    }

    /**
     * Returns the Euclidean norm of all gradients of the last step, rescaled and with values
     * clipped, before it was itself clipped.
     *
     * @return the norm; NaN if neither {@code optClipNorm} nor {@code optNonFinite} asks for it
     */
    public double globalNorm() {
        return policy.globalNorm();
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

        /** Elements of a bucket that passes through buffers. More would gain nothing. */
        private static final long BUCKET = 1L << 22;

        /** Elements of a bucket that is updated in place; less costs a tenth of the time. */
        private static final long IN_PLACE = 1L << 25;

        private ParameterTracker learningRate;
        private double beta1 = 0.9;
        private double beta2 = 0.999;
        private double epsilon = 1e-8;
        private double decay = 0.01;
        private double clipNorm;
        private double clipValue;
        private NonFinitePolicy nonFinite = NonFinitePolicy.PROPAGATE;
        private final List<Rule> multipliers = new ArrayList<>();
        private final List<Rule> decays = new ArrayList<>();
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
            if (beginNumUpdate < 0) {
                throw new IllegalArgumentException(
                        "The number of updates so far must be 0 or above, not " + beginNumUpdate);
            }
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
            required(path, "the predicate of a decay group");
            decays.add(new Rule(path, nonNegative("weight decay", weightDecay)));
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
            required(path, "the predicate of a learning-rate group");
            multipliers.add(new Rule(path, nonNegative("learning-rate multiplier", multiplier)));
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
            required(trained, "the block");
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
            required(model, "the model");
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
            required(policy, "the policy for gradients that are not finite");
            nonFinite = policy;
            return this;
        }

        /**
         * Sets the largest size of a bucket. By default 2^22 elements, or 2^25 where state is
         * updated in memory in place.
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
            required(place, "the tier");
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
            required(folder, "the folder of the files");
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
         * other parameter: its running means fade, and it moves and decays. Needs the model under
         * DJL's trainer.
         *
         * @param policy what a step does with them
         * @param source tells which they are
         * @return this builder
         */
        public Builder optIdleExperts(IdleExperts policy, ExpertLoad source) {
            required(policy, "the policy for experts without tokens");
            required(source, "the source of the experts' tokens");
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

        private ParameterGroups groups() {
            return new ParameterGroups(learningRate, multipliers, decay, decays);
        }

        private Tier newTier() {
            return directory == null ? new HostTier() : new MappedFileTier(directory);
        }

        private long bucketElements(Tier place) {
            if (bucketElements > 0) {
                return bucketElements;
            }
            boolean inPlace =
                    !staged
                            && !place.isBackedByFiles()
                            && !Engine.getEngine("PyTorch").defaultDevice().isGpu();
            return inPlace ? IN_PLACE : BUCKET;
        }

        private static void required(Object value, String what) {
            if (value == null) {
                throw new IllegalArgumentException(what + " must not be null");
            }
        }

        private static void below1(String what, double value) {
            if (!(value >= 0 && value < 1)) {
                throw new IllegalArgumentException(
                        "The " + what + " must be at least 0 and below 1, not " + value);
            }
        }
    }
}
