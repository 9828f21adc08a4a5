package org.djlmoe.autograd;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.nn.Block;
import ai.djl.nn.Parameter;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.TrainingConfig;
import ai.djl.training.evaluator.Evaluator;
import ai.djl.training.initializer.Initializer;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.loss.Loss;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.util.PairList;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.IdentityHashMap;
import java.util.List;
import java.util.Queue;
import java.util.Set;
import java.util.concurrent.ExecutorService;
import java.util.function.Predicate;

/**
 * A {@link Trainer} whose gradient collector is a {@link Tape}.
 *
 * <p>It takes the place of {@code model.newTrainer(config)} in a program that is otherwise
 * unchanged; {@code EasyTrain} and hand-written loops both work. Blocks that are segments then keep
 * only their boundaries from forward to backward, and a step goes through the parameters in the
 * block's order without copying their gradients first.
 *
 * <p>Limits: one device, one thread. A parameter that no gradient has reached is left as it is,
 * where DJL's trainer would make up a gradient of zeros and decay it.
 */
public class BoundedTrainer extends Trainer {

    private final Optimizer optimizer;
    private final long seed;
    private final Queue<Runnable> afterStep = new ArrayDeque<>();
    private BoundaryPolicy boundaryPolicy = BoundaryPolicy.ON_DEVICE;
    private long collectors;

    /**
     * Creates a trainer with seed 0.
     *
     * @param model the model, with its block set
     * @param config the training configuration
     */
    public BoundedTrainer(Model model, TrainingConfig config) {
        this(model, config, 0);
    }

    /**
     * Creates a trainer.
     *
     * @param model the model, with its block set
     * @param config the training configuration
     * @param seed decides the random numbers of segments, such as dropout in a checkpointed block
     * @throws IllegalArgumentException if the configuration names several devices or an executor,
     *     or an evaluator that its loss refuses
     */
    public BoundedTrainer(Model model, TrainingConfig config, long seed) {
        this(model, new DeferredListeners(config), seed);
    }

    private BoundedTrainer(Model model, DeferredListeners config, long seed) {
        super(prepared(model, config), config);
        this.optimizer = config.getOptimizer();
        this.seed = seed;
        config.attachListeners();
        notifyListeners(listener -> listener.onTrainingBegin(this));
    }

    /**
     * Has the configuration's initializers applied and a loaded model thawed, as only newTrainer
     * does.
     */
    private static Model prepared(Model model, DeferredListeners config) {
        Device[] devices = config.getDevices();
        if (devices.length > 1) {
            throw new IllegalArgumentException(
                    "BoundedTrainer trains on one device, but the configuration names "
                            + Arrays.toString(devices)
                            + "; set optDevices(new Device[] {...}) with one of them");
        }
        Device owner = model.getNDManager().getDevice();
        if (devices.length == 1 && !devices[0].equals(owner)) {
            throw new IllegalArgumentException(
                    "The configuration trains on "
                            + devices[0]
                            + ", but the model's arrays are on "
                            + owner
                            + "; create the model on the device that it is trained on");
        }
        if (config.getExecutorService() != null) {
            throw new IllegalArgumentException(
                    "BoundedTrainer runs forward and backward on the calling thread; remove"
                            + " optExecutorService from the configuration");
        }
        if (config.getLossFunction() instanceof EvaluatorCheck) {
            ((EvaluatorCheck) config.getLossFunction()).checkEvaluators(config.getEvaluators());
        }
        model.newTrainer(config).close();
        return model;
    }

    @Override
    public GradientCollector newGradientCollector() {
        return new Tape(getManager(), seed + collectors++, this::zeroGradients, boundaryPolicy);
    }

    /**
     * Returns how many gradient collectors there have been. Together with the seed the number
     * decides the random numbers of segments under the next one.
     *
     * @return the number
     */
    public long collectors() {
        return collectors;
    }

    /**
     * Lets the random numbers of segments go on where those of another run stopped.
     *
     * @param number what {@link #collectors} was there
     * @throws IllegalArgumentException if the number is negative
     */
    public void setCollectors(long number) {
        if (number < 0) {
            throw new IllegalArgumentException(
                    "The number of gradient collectors must be 0 or more, not " + number);
        }
        collectors = number;
    }

    /**
     * Sets where the inputs of segments lie between forward and backward, from the next gradient
     * collector on.
     *
     * @param policy the policy; {@link BoundaryPolicy#ON_DEVICE} at first
     */
    public void setBoundaryPolicy(BoundaryPolicy policy) {
        this.boundaryPolicy = policy;
    }

    @Override
    public NDList evaluate(NDList input) {
        try (GradMode off = GradMode.off()) {
            return super.evaluate(input);
        }
    }

    /**
     * Updates the parameters that have a gradient, sets the gradients to zero, tells blocks that
     * are {@linkplain StepListener step listeners}, then runs what was put off.
     */
    @Override
    public void step() {
        List<StepOptimizer.Slot> slots = new ArrayList<>();
        try (GradMode off = GradMode.off()) {
            // Each parameter once, even one that two places of the model share.
            for (var entry : ParameterPaths.of(getModel().getBlock()).entrySet()) {
                Parameter parameter = entry.getValue();
                NDArray gradient = Gradients.of(parameter);
                if (gradient != null) {
                    slots.add(
                            new StepOptimizer.Slot(
                                    parameter.getId(),
                                    entry.getKey(),
                                    parameter.getArray(),
                                    gradient));
                }
            }
            if (optimizer instanceof StepOptimizer) {
                ((StepOptimizer) optimizer).step(slots);
            } else {
                for (StepOptimizer.Slot slot : slots) {
                    optimizer.update(slot.id(), slot.weight(), slot.gradient());
                    Gradients.zero(slot.weight());
                }
            }
        } finally {
            slots.forEach(slot -> slot.gradient().close());
        }
        Set<Block> told = Collections.newSetFromMap(new IdentityHashMap<>());
        tellAfterStep(getModel().getBlock(), told);
        while (!afterStep.isEmpty()) {
            afterStep.remove().run();
        }
    }

    private static void tellAfterStep(Block block, Set<Block> told) {
        Block actual = Checkpointed.unwrap(block);
        if (told.add(actual)) {
            if (actual instanceof StepListener) {
                ((StepListener) actual).afterStep();
            }
            actual.getChildren().values().forEach(child -> tellAfterStep(child, told));
        }
    }

    /**
     * Has something done after the next step, when no gradients are pending. Listeners run before
     * the step and use this to change what is trained.
     *
     * @param change what to do
     */
    public void afterStep(Runnable change) {
        afterStep.add(change);
    }

    /** Sets the gradients of all parameters to zero. */
    public void zeroGradients() {
        for (Parameter parameter : getModel().getBlock().getParameters().values()) {
            if (parameter.isInitialized() && parameter.requiresGradient()) {
                Gradients.zero(parameter.getArray());
            }
        }
    }

    /**
     * A configuration whose listeners are attached later: DJL's constructor would call them when
     * this class's fields do not exist yet.
     */
    private static final class DeferredListeners implements TrainingConfig {

        private final TrainingConfig config;
        private final List<TrainingListener> attached = new ArrayList<>();

        DeferredListeners(TrainingConfig config) {
            this.config = config;
        }

        void attachListeners() {
            attached.addAll(config.getTrainingListeners());
        }

        @Override
        public List<TrainingListener> getTrainingListeners() {
            return attached;
        }

        @Override
        public Device[] getDevices() {
            return config.getDevices();
        }

        @Override
        public PairList<Initializer, Predicate<Parameter>> getInitializers() {
            return config.getInitializers();
        }

        @Override
        public Optimizer getOptimizer() {
            return config.getOptimizer();
        }

        @Override
        public Loss getLossFunction() {
            return config.getLossFunction();
        }

        @Override
        public ExecutorService getExecutorService() {
            return config.getExecutorService();
        }

        @Override
        public List<Evaluator> getEvaluators() {
            return config.getEvaluators();
        }
    }
}
