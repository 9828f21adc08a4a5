package org.djlmoe.maskcoft;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.routing.ExpertMask;
import org.djlmoe.routing.MaskLogits;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.SelectionPrior;

/**
 * The expert masks of a model as DJL parameters, for a training loop of one's own: backward under a
 * {@code BoundedTrainer} leaves d loss / d theta with them, and any optimizer trains them.
 *
 * <pre>{@code
 * MaskBlocks masks = MaskBlocks.builder()
 *         .setLayers(moeBlocks).setManager(model.getNDManager())
 *         .setBudget(MaskBudget.perLayer(6)).optSamples(4).build();   // before the trainer
 * ...
 * for (int i = 0; i < 4; i++) {       // gradients of the samples add up to their mean
 *     masks.draw(step, i);
 *     // forward and backward of the same batch, in a gradient collector each
 * }
 * trainer.step();
 * }</pre>
 *
 * <p>It takes an estimator that runs backward: {@link MaskEstimator#gumbel} or {@link
 * MaskEstimator#dense}. Plackett-Luce learns from forward losses; {@link MaskSearch} runs it.
 *
 * <p>An optimizer such as Adam moves a parameter by about its learning rate a step. Theta wants
 * steps of about a tenth, so where one rate serves weights and masks, theta is {@code scale} times
 * the parameter.
 *
 * <p>Used by one thread at a time.
 */
public final class MaskBlocks {

    private final List<MoeBlock> layers;
    private final List<MaskLogits> masks = new ArrayList<>();
    private final MaskEstimator estimator;
    private final MaskBudget budget;
    private final int samples;
    private final double temperature;
    private final double scale;
    private final MaskedWeights weights;
    private final long seed;

    private MaskBlocks(Builder builder) {
        layers = List.copyOf(builder.layers);
        estimator = builder.estimator;
        budget = builder.budget;
        samples = builder.samples;
        temperature = builder.temperature;
        scale = builder.scale;
        weights = builder.weights;
        seed = builder.seed;
        boolean done = false;
        try {
            for (MoeBlock layer : layers) {
                MaskLogits mask = layer.router().attachMask();
                masks.add(mask);
                mask.initialize(builder.manager, DataType.FLOAT32, new Shape(1));
            }
            done = true;
        } finally {
            if (!done) {
                for (int l = 0; l < masks.size(); l++) {
                    layers.get(l).router().detachMask();
                }
            }
        }
    }

    /**
     * Returns a builder.
     *
     * @return the builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Puts the mask of a sample in force, the same for every token until the next call.
     *
     * @param step the step, at least 0
     * @param sample which of its samples, 0 to M - 1
     * @return the mask
     */
    public ExpertMask draw(int step, int sample) {
        MaskSample drawn =
                estimator.draw(new MaskScores(theta(), temperature, budget, seed), step, sample);
        for (int l = 0; l < masks.size(); l++) {
            double[] slopes = drawn.credit(l);
            Arrays.setAll(slopes, e -> slopes[e] * scale / samples);
            apply(l, drawn.mask(), slopes);
        }
        return drawn.mask();
    }

    /** Puts a mask in force whose gradient is that of the factors themselves. */
    void applyWithUnitSlopes(ExpertMask mask) {
        for (int l = 0; l < masks.size(); l++) {
            double[] ones = new double[mask.numExperts()];
            Arrays.fill(ones, 1);
            apply(l, mask, ones);
        }
    }

    private void apply(int l, ExpertMask mask, double[] slopes) {
        layers.get(l).router().setPrior(mask.kept(l), SelectionPrior.hardMask(), weights);
        masks.get(l).setSlopes(slopes, estimator.excludedExperts());
    }

    /**
     * Returns what has been learnt.
     *
     * @return the top of theta within the budget, of equals the lower id
     */
    public ExpertMask mask() {
        return budget.top(theta());
    }

    /**
     * Returns the mask logits.
     *
     * @return theta, [layers, experts]
     */
    public double[][] theta() {
        double[][] theta = new double[masks.size()][];
        for (int l = 0; l < theta.length; l++) {
            float[] row = masks.get(l).logits().getArray().toFloatArray();
            theta[l] = new double[row.length];
            for (int e = 0; e < row.length; e++) {
                theta[l][e] = scale * row[e];
            }
        }
        return theta;
    }

    /**
     * Sets where theta begins, in place of zeros.
     *
     * @param theta [layers, experts], finite
     */
    public void setTheta(double[][] theta) {
        double[][] checked = new MaskScores(theta, temperature, budget, seed).theta();
        for (int l = 0; l < masks.size(); l++) {
            NDArray array = masks.get(l).logits().getArray();
            float[] row = new float[checked[l].length];
            for (int e = 0; e < row.length; e++) {
                row[e] = (float) (checked[l][e] / scale);
            }
            try (GradMode off = GradMode.off();
                    NDArray values = array.getManager().create(row)) {
                values.copyTo(array);
            }
        }
    }

    /** Reads d loss / d parameter, [layers, experts], and sets it to zero. */
    double[][] takeGradients() {
        double[][] gradients = new double[masks.size()][];
        for (int l = 0; l < gradients.length; l++) {
            Parameter logits = masks.get(l).logits();
            gradients[l] = new double[(int) logits.getArray().size()];
            try (NDArray gradient = Gradients.of(logits)) {
                if (gradient != null) {
                    float[] row = gradient.toFloatArray();
                    Arrays.setAll(gradients[l], e -> row[e]);
                }
            }
            Gradients.zero(logits.getArray());
        }
        return gradients;
    }

    /**
     * Returns the parameters.
     *
     * @return one a layer
     */
    public List<Parameter> parameters() {
        return masks.stream().map(MaskLogits::logits).toList();
    }

    /** Ends the training of the masks: no mask is in force and no gradient is computed. */
    public void stop() {
        for (int l = 0; l < masks.size(); l++) {
            masks.get(l).setSlopes(null, 0);
            layers.get(l).router().clearPrior();
        }
    }

    /**
     * Takes the parameters out of the model, after {@link #stop}. Their arrays stay with their
     * manager: a trainer that has used them reads them once more when it closes.
     */
    public void detach() {
        stop();
        layers.forEach(layer -> layer.router().detachMask());
    }

    /** Builds {@link MaskBlocks}. */
    public static final class Builder {

        private List<MoeBlock> layers;
        private NDManager manager;
        private MaskBudget budget;
        private MaskEstimator estimator = MaskEstimator.gumbel();
        private int samples = 1;
        private double temperature = 1;
        private double scale = 1;
        private MaskedWeights weights = MaskedWeights.ALL;
        private long seed;

        Builder() {}

        /**
         * Sets the MoE layers, of equally many experts.
         *
         * @param value the layers in order
         * @return this builder
         */
        public Builder setLayers(List<MoeBlock> value) {
            layers = value;
            return this;
        }

        /**
         * Sets the owner of the parameters.
         *
         * @param value the model's manager
         * @return this builder
         */
        public Builder setManager(NDManager value) {
            manager = value;
            return this;
        }

        /**
         * Sets how many experts are kept.
         *
         * @param value at least the experts of a token in every layer
         * @return this builder
         */
        public Builder setBudget(MaskBudget value) {
            budget = value;
            return this;
        }

        /**
         * Sets how gradients are estimated. Default: Gumbel straight-through.
         *
         * @param value one that runs backward
         * @return this builder
         */
        public Builder optEstimator(MaskEstimator value) {
            estimator = value;
            return this;
        }

        /**
         * Sets how many samples are drawn a step; their gradients add up to the mean. Default: 1.
         *
         * @param value M, at least 1
         * @return this builder
         */
        public Builder optSamples(int value) {
            samples = value;
            return this;
        }

        /**
         * Sets the temperature tau. Default: 1.
         *
         * @param value above 0, in the unit of theta
         * @return this builder
         */
        public Builder optTemperature(double value) {
            temperature = value;
            return this;
        }

        /**
         * Sets theta's ratio to the parameter. Default: 1.
         *
         * @param value above 0
         * @return this builder
         */
        public Builder optScale(double value) {
            scale = value;
            return this;
        }

        /**
         * Sets where combine weights come from under a mask. Default: all experts.
         *
         * @param value the rule
         * @return this builder
         */
        public Builder optWeights(MaskedWeights value) {
            weights = value;
            return this;
        }

        /**
         * Sets what decides every draw. Default: 0.
         *
         * @param value the seed
         * @return this builder
         */
        public Builder optSeed(long value) {
            seed = value;
            return this;
        }

        /**
         * Attaches the parameters to the layers' routers.
         *
         * @return the masks, none in force yet
         * @throws IllegalArgumentException if something is missing or out of range
         * @throws IllegalStateException if a router has mask logits already
         */
        public MaskBlocks build() {
            Checks.require(
                    layers != null && !layers.isEmpty() && manager != null && budget != null,
                    "MaskBlocks needs MoE layers, a manager and a budget");
            int experts = layers.get(0).router().experts();
            int topK = 0;
            for (MoeBlock layer : layers) {
                topK = Math.max(topK, layer.router().topK());
                Checks.require(
                        layer.router().experts() == experts,
                        "The layers have %d and %d experts: masks need equally many",
                        experts,
                        layer.router().experts());
            }
            budget.check(layers.size(), topK, experts);
            Checks.require(
                    estimator != null && estimator.needsBackward(),
                    "The estimator (%s) learns from forward losses, not through backward: use"
                            + " MaskEstimator.gumbel() or dense(), or MaskSearch",
                    estimator);
            Checks.require(samples >= 1, "samples is %d: set 1 or more", samples);
            Checks.require(
                    scale > 0 && Double.isFinite(scale),
                    "scale is %s: it must be finite and above 0",
                    scale);
            Checks.require(
                    temperature > 0 && Double.isFinite(temperature),
                    "temperature is %s: it must be finite and above 0",
                    temperature);
            return new MaskBlocks(this);
        }
    }
}
