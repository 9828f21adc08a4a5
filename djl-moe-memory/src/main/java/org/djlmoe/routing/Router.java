package org.djlmoe.routing;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.training.ParameterStore;
import ai.djl.training.initializer.Initializer;
import ai.djl.training.initializer.NormalInitializer;
import ai.djl.util.PairList;
import java.util.Arrays;
import java.util.function.Consumer;
import java.util.function.UnaryOperator;
import org.djlmoe.kernel.ExpertKernels;
import org.djlmoe.kernel.TorchKernels;

/**
 * Chooses the top k experts of every token.
 *
 * <p>Logits and softmax are computed in F32: in half precision, logits that differ by a thousandth
 * tie, and tokens flip to other experts. Ties go to the lower index. Combine weights are gathered
 * from the softmax over <i>all</i> experts, whatever a mask or a prior does to the ranking, and are
 * divided by their sum if the model does so; {@link MaskedWeights#KEPT} is the other rule for hard
 * masks.
 *
 * <p>With a bias update rate u the router balances its load without a loss: a bias an expert is
 * added to the probabilities in the ranking, and after every step it moves by u up for an expert
 * that got fewer than the mean of the routes since the step before, and down for one that got more.
 * It has no gradient and is no part of the combine weights. With the rate 0 the bias stays as it
 * was loaded.
 *
 * <p>The order of what changes the ranking: a prior on logits first; then the softmax; then the
 * balancing bias, and a prior on probabilities; then what a hard mask forbids is taken out,
 * whatever its bias. The choices that a prior protects are by the logits alone.
 *
 * <p>Source of the balancing: L. Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for
 * Mixture-of-Experts", arXiv 2408.15664.
 *
 * <ul>
 *   <li>parameter {@code gate.weight}: [E, H]
 *   <li>parameter {@code gate.e_score_correction_bias}: [E], with balancing; it is saved, and never
 *       trained
 *   <li>input: [N, H]
 *   <li>output: ids INT64 [N, k] and combine weights [N, k]
 * </ul>
 */
public final class Router extends AbstractBlock {

    private final Parameter weight;
    private final int experts;
    private final int topK;
    private final boolean renormalize;
    private double[] bias;
    private boolean byProbability;
    private int protectedTop;
    private float[] outside;
    private RoutingObserver observer;
    private Consumer<NDArray> logitObserver;
    private TokenSelector selector;
    private MaskLogits mask;
    private final double biasUpdateRate;
    private final Parameter balanceBias;
    private final long[] load;

    /**
     * Creates a router without a balancing bias.
     *
     * @param hidden H
     * @param experts E
     * @param topK k, at most E
     * @param renormalize whether the combine weights of a token are divided by their sum
     * @param initializerRange standard deviation of the initial weight
     */
    public Router(int hidden, int experts, int topK, boolean renormalize, double initializerRange) {
        this(hidden, experts, topK, renormalize, initializerRange, 0);
    }

    /**
     * Creates a router.
     *
     * @param hidden H
     * @param experts E
     * @param topK k, at most E
     * @param renormalize whether the combine weights of a token are divided by their sum
     * @param initializerRange standard deviation of the initial weight
     * @param biasUpdateRate u, how far the balancing bias moves a step; 0 for no such bias
     */
    public Router(
            int hidden,
            int experts,
            int topK,
            boolean renormalize,
            double initializerRange,
            double biasUpdateRate) {
        this(
                hidden,
                experts,
                topK,
                renormalize,
                initializerRange,
                biasUpdateRate != 0,
                biasUpdateRate);
    }

    /**
     * Creates a router, perhaps with a balancing bias that stays as it is.
     *
     * @param hidden H
     * @param experts E
     * @param topK k, at most E
     * @param renormalize whether the combine weights of a token are divided by their sum
     * @param initializerRange standard deviation of the initial weight
     * @param balanced whether there is a balancing bias
     * @param biasUpdateRate u, how far it moves a step; 0 without one
     */
    public Router(
            int hidden,
            int experts,
            int topK,
            boolean renormalize,
            double initializerRange,
            boolean balanced,
            double biasUpdateRate) {
        if (topK < 1 || topK > experts) {
            throw new IllegalArgumentException(
                    "topK is " + topK + ": it must be from 1 to the number of experts, " + experts);
        }
        this.experts = experts;
        this.topK = topK;
        if (!(biasUpdateRate >= 0) || Double.isInfinite(biasUpdateRate)) {
            throw new IllegalArgumentException(
                    "The update rate of the balancing bias must be finite and not negative, not "
                            + biasUpdateRate);
        }
        if (biasUpdateRate > 0 && !balanced) {
            throw new IllegalArgumentException(
                    "The update rate is "
                            + biasUpdateRate
                            + ", but the router has no balancing bias that it could move");
        }
        this.renormalize = renormalize;
        this.biasUpdateRate = biasUpdateRate;
        this.load = new long[experts];
        this.weight =
                addParameter(
                        Parameter.builder()
                                .setName("gate.weight")
                                .setType(Parameter.Type.WEIGHT)
                                .optInitializer(new NormalInitializer((float) initializerRange))
                                .optShape(new Shape(experts, hidden))
                                .build());
        // The type of a running statistic: no default initializer or optimizer takes it for a
        // weight.
        this.balanceBias =
                balanced
                        ? addParameter(
                                Parameter.builder()
                                        .setName("gate.e_score_correction_bias")
                                        .setType(Parameter.Type.RUNNING_MEAN)
                                        .optInitializer(Initializer.ZEROS)
                                        .optRequiresGrad(false)
                                        .optShape(new Shape(experts))
                                        .build())
                        : null;
    }

    /**
     * Ranks the kept experts of this layer higher, or allows no others.
     *
     * @param kept one flag an expert
     * @param prior how strongly; {@link SelectionPrior#hardMask()} allows no others
     * @throws IllegalArgumentException if a hard mask keeps fewer than k experts
     */
    public void setPrior(boolean[] kept, SelectionPrior prior) {
        setPrior(kept, prior, MaskedWeights.ALL);
    }

    /**
     * Ranks the kept experts of this layer higher, or allows no others.
     *
     * @param kept one flag an expert
     * @param prior how strongly; {@link SelectionPrior#hardMask()} allows no others
     * @param weights where the combine weights come from; {@link MaskedWeights#KEPT} goes with a
     *     hard mask alone
     * @throws IllegalArgumentException if a hard mask keeps fewer than k experts, or a soft prior
     *     would take its weights from the kept experts
     */
    public void setPrior(boolean[] kept, SelectionPrior prior, MaskedWeights weights) {
        weights.check(prior);
        if (kept.length != experts) {
            throw new IllegalArgumentException(
                    "The mask has " + kept.length + " experts, the router has " + experts);
        }
        double[] added = new double[experts];
        int count = 0;
        for (int e = 0; e < experts; e++) {
            count += kept[e] ? 1 : 0;
            if (prior.isHardMask()) {
                added[e] = kept[e] ? 0 : Double.NEGATIVE_INFINITY;
            } else {
                boolean scaled = prior.form() == SelectionPrior.Form.SCALED;
                added[e] = kept[e] ? prior.beta() * (scaled ? prior.logitRange() : 1) : 0;
            }
        }
        if (prior.isHardMask() && count < topK) {
            throw new IllegalArgumentException(
                    "A hard mask must keep at least topK = "
                            + topK
                            + " experts, but keeps "
                            + count);
        }
        // Strength zero is the router itself: probabilities may tie where logits do not.
        bias = prior.beta() == 0 ? null : added;
        byProbability = prior.form() == SelectionPrior.Form.PROBABILITY && !prior.isHardMask();
        // It protects nothing either, from the balancing bias.
        protectedTop = bias == null ? 0 : Math.min(prior.protectedTop(), topK);
        outside = null;
        // Weights that are divided by their sum are the same under both rules.
        if (weights == MaskedWeights.KEPT && !renormalize) {
            outside = new float[experts];
            for (int e = 0; e < experts; e++) {
                outside[e] = kept[e] ? 0 : Float.NEGATIVE_INFINITY;
            }
        }
    }

    /** Ranks by the router's own logits again. */
    public void clearPrior() {
        bias = null;
        byProbability = false;
        protectedTop = 0;
        outside = null;
    }

    /**
     * Gives the layer a mask that trains through backward. Its parameter must be initialized before
     * it is used, with the manager of the model.
     *
     * @return the mask's logits
     * @throws IllegalStateException if there is one already
     */
    public MaskLogits attachMask() {
        if (mask != null) {
            throw new IllegalStateException("This router has mask logits already: detach them");
        }
        mask = addChildBlock("mask", new MaskLogits(experts));
        return mask;
    }

    /**
     * Returns the mask that trains.
     *
     * @return the mask's logits, or null if there are none
     */
    public MaskLogits mask() {
        return mask;
    }

    /** Drops the mask that trains; the prior stays as it is. */
    public void detachMask() {
        if (mask != null) {
            children.clear();
            mask = null;
        }
    }

    /**
     * Sets who sees the choices.
     *
     * @param observer the observer, or null for nobody
     */
    public void setObserver(RoutingObserver observer) {
        this.observer = observer;
    }

    /**
     * Returns who sees the choices.
     *
     * @return the observer, or null for nobody
     */
    public RoutingObserver observer() {
        return observer;
    }

    /**
     * Tells the observer, if there is one.
     *
     * @param ids INT64 [N, k]
     */
    public void observe(NDArray ids) {
        if (observer != null) {
            observer.chosen(ids);
        }
    }

    /**
     * Sets who sees the logits of every bounded forward pass of a {@code MoeBlock}, one under a
     * tape or without gradients. They are computed a second time for it, for all tokens at once.
     *
     * @param value is given F32 [N, E], closed afterwards; null for nobody
     */
    public void setLogitObserver(Consumer<NDArray> value) {
        logitObserver = value;
    }

    /**
     * Returns who sees the logits.
     *
     * @return the observer, or null for nobody
     */
    public Consumer<NDArray> logitObserver() {
        return logitObserver;
    }

    /**
     * Sets who chooses the experts, token by token in the order of the rows, instead of the top k
     * by rank. A prior set here still counts: the selector is told what it adds. Not for training.
     *
     * @param value the selector, or null for the ranking alone
     */
    public void setSelector(TokenSelector value) {
        selector = value;
    }

    /**
     * Returns who chooses the experts.
     *
     * @return the selector, or null for the ranking alone
     */
    public TokenSelector selector() {
        return selector;
    }

    /**
     * Has the selector choose.
     *
     * @param logits [N, E], one row a token, in order
     * @return ids INT64 [N, k], owned by the manager of the logits
     * @throws IllegalStateException if there is a prior or a balancing bias over probabilities,
     *     which no selector of logits can add to, if combine weights come from the kept experts
     *     alone, or if the selector chose what it may not
     */
    public NDArray select(NDArray logits) {
        if (bias != null && byProbability) {
            throw new IllegalStateException(
                    "A token selector ranks logits, but the prior is of the form probability: use"
                            + " additive or scaled");
        }
        if (outside != null) {
            throw new IllegalStateException(
                    "A token selector takes combine weights from all experts: use"
                            + " MaskedWeights.ALL");
        }
        if (hasBalance()) {
            throw new IllegalStateException(
                    "A token selector ranks logits, but the balancing bias of this router is added"
                            + " to probabilities: leave selectors to models without one");
        }
        double[] added = bias == null ? new double[experts] : bias.clone();
        float[] all = logits.toFloatArray();
        int tokens = all.length / experts;
        long[] ids = new long[tokens * topK];
        double[] row = new double[experts];
        int[] chosen = new int[topK];
        for (int t = 0; t < tokens; t++) {
            for (int e = 0; e < experts; e++) {
                row[e] = all[t * experts + e];
            }
            selector.select(row, added, chosen);
            for (int i = 0; i < topK; i++) {
                checkChoice(chosen, i, added);
                ids[t * topK + i] = chosen[i];
            }
        }
        // An array made of Java values points into Java memory; this one outlives the call.
        try (NDArray view = logits.getManager().create(ids, new Shape(tokens, topK))) {
            return view.duplicate();
        }
    }

    private void checkChoice(int[] chosen, int i, double[] added) {
        int e = chosen[i];
        boolean valid = e >= 0 && e < experts && added[e] != Double.NEGATIVE_INFINITY;
        for (int j = 0; j < i; j++) {
            valid &= chosen[j] != e;
        }
        if (!valid) {
            throw new IllegalStateException(
                    "A token selector chose the experts "
                            + Arrays.toString(chosen)
                            + ": they must be distinct, allowed and from 0 to "
                            + (experts - 1));
        }
    }

    /**
     * Returns how experts are ranked now, in the form that kernels take.
     *
     * @param manager the owner of the bias
     * @return the ranking
     */
    public ExpertKernels.Selection selection(NDManager manager) {
        NDArray added = bias == null ? TorchKernels.nothing() : manager.create(bias);
        NDArray left = outside == null ? TorchKernels.nothing() : manager.create(outside);
        return new ExpertKernels.Selection(
                added, byProbability, protectedTop, balance(manager), left);
    }

    private NDArray balance(NDManager manager) {
        if (balanceBias == null) {
            return TorchKernels.nothing();
        }
        if (balanceBias.requiresGradient()) {
            // Whoever thaws all parameters of a model thaws this one too.
            balanceBias.freeze(true);
        }
        // Without any, logits rank: probabilities may tie where logits do not.
        return hasBalance() ? manager.create(balanceValues()) : TorchKernels.nothing();
    }

    private boolean hasBalance() {
        return balanceBias != null && Arrays.stream(balanceValues()).anyMatch(b -> b != 0);
    }

    private double[] balanceValues() {
        float[] floats = balanceBias.getArray().toFloatArray();
        double[] values = new double[floats.length];
        Arrays.setAll(values, e -> floats[e]);
        return values;
    }

    /**
     * Returns the balancing bias.
     *
     * @return [E], or null without balancing
     */
    public Parameter balanceBias() {
        return balanceBias;
    }

    /**
     * Counts the routes of a forward pass of training towards the next update of the balancing
     * bias. Those of several passes add up.
     *
     * @param routes of each expert, [E]
     */
    public synchronized void addLoad(long[] routes) {
        for (int e = 0; e < experts; e++) {
            load[e] += routes[e];
        }
    }

    /**
     * Moves the balancing bias of each expert by the rate towards an even load, and begins to count
     * anew. An expert with exactly the mean load stays. With the rate 0, or if nothing has been
     * counted, none moves.
     */
    public void updateBalanceBias() {
        updateBalanceBias(UnaryOperator.identity());
    }

    /**
     * As {@link #updateBalanceBias()}, with loads that several routers add up, each for tokens of
     * its own: then their biases stay equal.
     *
     * @param sum given the routes counted here, [E], returns those of all; not called with the rate
     *     0
     */
    public synchronized void updateBalanceBias(UnaryOperator<long[]> sum) {
        if (biasUpdateRate > 0) {
            move(sum.apply(load.clone()));
        }
        Arrays.fill(load, 0);
    }

    private void move(long[] routes) {
        long total = Arrays.stream(routes).sum();
        if (total > 0) {
            double[] values = balanceValues();
            float[] moved = new float[experts];
            for (int e = 0; e < experts; e++) {
                moved[e] =
                        (float)
                                (values[e]
                                        + biasUpdateRate
                                                * Long.signum(total - routes[e] * experts));
            }
            NDArray array = balanceBias.getArray();
            try (NDArray next = array.getManager().create(moved)) {
                next.copyTo(array);
            }
        }
    }

    /**
     * Returns the weight.
     *
     * @return [E, H]
     */
    public Parameter weight() {
        return weight;
    }

    /**
     * Returns k.
     *
     * @return experts a token
     */
    public int topK() {
        return topK;
    }

    /**
     * Returns E.
     *
     * @return the number of experts
     */
    public int experts() {
        return experts;
    }

    /**
     * Returns whether combine weights are divided by their sum.
     *
     * @return whether they are
     */
    public boolean renormalizes() {
        return renormalize;
    }

    @Override
    protected NDList forwardInternal(
            ParameterStore parameterStore,
            NDList inputs,
            boolean training,
            PairList<String, Object> params) {
        NDArray hidden = inputs.singletonOrThrow();
        NDArray w = parameterStore.getValue(weight, hidden.getDevice(), training);
        ExpertKernels.Settings settings =
                new ExpertKernels.Settings(topK, 0, 0, false, renormalize);
        NDArray logits = TorchKernels.nothing();
        NDArray slopes = TorchKernels.nothing();
        if (training && mask != null && mask.trains()) {
            if (mask.excluded() > 0) {
                throw new IllegalStateException(
                        "Running excluded experts for their gradient needs a BoundedTrainer");
            }
            logits = parameterStore.getValue(mask.logits(), hidden.getDevice(), true);
            slopes = mask.slopes(hidden.getManager());
        }
        NDList chosen =
                selector == null
                        ? ExpertKernels.routePlain(
                                hidden, w, settings, selection(hidden.getManager()), logits, slopes)
                        : selected(hidden, w, training);
        observe(chosen.get(0));
        return chosen;
    }

    private NDList selected(NDArray hidden, NDArray w, boolean training) {
        refuseSelector(training);
        NDArray logits = hidden.toType(DataType.FLOAT32, false).matMul(w.transpose());
        NDArray ids = select(logits);
        NDArray combine =
                renormalize ? logits.gather(ids, 1).softmax(1) : logits.softmax(1).gather(ids, 1);
        return new NDList(ids, combine);
    }

    /**
     * Fails if a selector is set: what it chooses depends on what it saw before, so a repeated
     * forward pass would choose otherwise.
     *
     * @param training whether this pass is one of training
     */
    public void refuseSelector(boolean training) {
        if (training && selector != null) {
            throw new IllegalStateException(
                    "A token selector is for evaluation and generation: clear it before training,"
                            + " with setSelector(null)");
        }
    }

    @Override
    protected void initializeChildBlocks(NDManager manager, DataType dataType, Shape... shapes) {
        if (mask != null) {
            mask.initialize(manager, dataType, new Shape(experts));
        }
    }

    @Override
    public Shape[] getOutputShapes(Shape[] inputShapes) {
        Shape chosen = new Shape(inputShapes[0].get(0), topK);
        return new Shape[] {chosen, chosen};
    }

    @Override
    public DataType[] getOutputDataTypes() {
        return new DataType[] {DataType.INT64, DataType.FLOAT32};
    }
}
