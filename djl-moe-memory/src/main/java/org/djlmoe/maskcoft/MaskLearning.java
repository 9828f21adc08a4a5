package org.djlmoe.maskcoft;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.routing.ExpertMask;

/**
 * Stage 1: learns which experts a layer keeps, from a model that runs under sampled masks.
 *
 * <p>Each step draws M masks; the caller runs the same batch under each and hands the losses back:
 *
 * <pre>{@code
 * List<MaskSample> samples = learning.propose(step);
 * double[] losses = ... // one forward pass under samples.get(i).mask() each
 * learning.update(samples, losses);
 * }</pre>
 *
 * A {@link MaskEstimator} makes a gradient of theta from it, and Adam moves theta; it takes the
 * scale of the losses out, so that one learning rate serves all models. A term of the caller's own,
 * such as lambda times replayed loads, is simply added to L_i; the estimators that run backward do
 * not see it.
 *
 * <p>One loss credits all layers at once, so the variance grows with the number of layers: more
 * layers want more samples or steps. When the right mask is that of the most used experts anyway,
 * {@link ExpertMask#mostFrequent} costs nothing; compare with it.
 *
 * <p>The randomness of a sample comes from (seed, step, sample, layer) alone, so what {@link #save}
 * writes is all that another process needs to go on, to the bit. Not thread safe.
 */
public final class MaskLearning {

    private static final double BETA1 = 0.9;
    private static final double BETA2 = 0.99;
    private static final double EPSILON = 1e-12;

    private final int experts;
    private final MaskBudget budget;
    private final MaskEstimator estimator;
    private final int samples;
    private final double temperature;
    private final double learningRate;
    private final long seed;

    /** Mask logits, [layers, experts]. */
    private final double[][] theta;

    private final double[][] mean;
    private final double[][] variance;
    private final List<Double> losses = new ArrayList<>();
    private long updates;
    private long dropped;

    private MaskLearning(Builder b) {
        experts = b.experts;
        budget = b.budget;
        estimator = b.estimator;
        samples = b.samples;
        temperature = b.temperature;
        learningRate = b.learningRate;
        seed = b.seed;
        theta = new double[b.layers][experts];
        mean = new double[b.layers][experts];
        variance = new double[b.layers][experts];
        for (int l = 0; l < b.layers; l++) {
            if (b.theta != null) {
                theta[l] = b.theta[l].clone();
            } else if (b.usage != null) {
                theta[l] = standardisedLog(b.usage[l], b.usageScale);
            }
        }
    }

    /**
     * Starts the settings.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Draws the masks of a step.
     *
     * @param step the step, at least 0; the same step before the same update draws the same masks
     * @return M samples
     */
    public List<MaskSample> propose(int step) {
        if (step < 0) {
            throw new IllegalArgumentException("Step " + step + " is below 0");
        }
        MaskScores scores = new MaskScores(theta, temperature, budget, seed);
        List<MaskSample> proposed = new ArrayList<>();
        for (int i = 0; i < samples; i++) {
            proposed.add(estimator.draw(scores, step, i).drawnAfter(updates));
        }
        return proposed;
    }

    /**
     * Moves theta towards masks of lower loss, for estimators that need losses alone.
     *
     * @param proposed what {@link #propose} returned since the last update
     * @param losses the loss of each, all on the same batch
     * @throws IllegalArgumentException as {@link #update(List, List)}
     */
    public void update(List<MaskSample> proposed, double[] losses) {
        update(proposed, outcomes(losses));
    }

    /**
     * Moves theta towards masks of lower loss.
     *
     * <p>A sample whose outcome is not finite is left out and counted, see {@link
     * #droppedSamples()}.
     *
     * @param proposed what {@link #propose} returned since the last update; any of them, as many as
     *     the estimator needs
     * @param outcomes of each, all on the same batch
     * @throws IllegalArgumentException if too few outcomes are finite, if they lack what the
     *     estimator needs, or if a sample was drawn before the last update (its probability has
     *     changed). Theta is then as before
     */
    public void update(List<MaskSample> proposed, List<MaskOutcome> outcomes) {
        double[][] gradient = gradient(proposed, outcomes);
        losses.add(outcomes.stream().mapToDouble(MaskOutcome::loss).average().orElseThrow());
        dropped += outcomes.stream().filter(outcome -> !outcome.isFinite()).count();
        updates++;
        double correction1 = 1 - Math.pow(BETA1, updates);
        double correction2 = 1 - Math.pow(BETA2, updates);
        for (int l = 0; l < theta.length; l++) {
            for (int e = 0; e < experts; e++) {
                double g = gradient[l][e];
                mean[l][e] = BETA1 * mean[l][e] + (1 - BETA1) * g;
                variance[l][e] = BETA2 * variance[l][e] + (1 - BETA2) * g * g;
                theta[l][e] -=
                        learningRate
                                * (mean[l][e] / correction1)
                                / (Math.sqrt(variance[l][e] / correction2) + EPSILON);
            }
        }
    }

    private static List<MaskOutcome> outcomes(double[] losses) {
        return Arrays.stream(losses).mapToObj(MaskOutcome::of).toList();
    }

    double[][] gradient(List<MaskSample> proposed, double[] losses) {
        return gradient(proposed, outcomes(losses));
    }

    /** Returns the estimate of d E[loss] / d theta, [layers, experts]. */
    double[][] gradient(List<MaskSample> proposed, List<MaskOutcome> outcomes) {
        if (proposed.size() != outcomes.size()) {
            throw new IllegalArgumentException(
                    "%d samples but %d losses".formatted(proposed.size(), outcomes.size()));
        }
        List<MaskSample> samplesLeft = new ArrayList<>();
        List<MaskOutcome> finite = new ArrayList<>();
        for (int i = 0; i < outcomes.size(); i++) {
            MaskSample s = proposed.get(i);
            MaskOutcome outcome = outcomes.get(i);
            if (s.updates() != updates) {
                throw new IllegalArgumentException(
                        "Sample %d of step %d was drawn after %d updates, now there are %d: propose anew after each update"
                                .formatted(s.index(), s.step(), s.updates(), updates));
            }
            if (estimator.needsBackward() && outcome.factorGradients() == null) {
                throw new IllegalArgumentException(
                        "The estimator ("
                                + estimator
                                + ") needs d loss / d factor, not losses alone");
            }
            if (outcome.isFinite()) {
                samplesLeft.add(s);
                finite.add(outcome);
            }
        }
        if (finite.size() < estimator.minSamples()) {
            throw new IllegalArgumentException(
                    "Only %d of %d losses are finite %s: %d are needed to tell masks apart"
                            .formatted(
                                    finite.size(),
                                    outcomes.size(),
                                    outcomes.stream().map(MaskOutcome::loss).toList(),
                                    estimator.minSamples()));
        }
        return estimator.gradient(samplesLeft, finite);
    }

    /**
     * Returns what has been learnt: the top of theta within the budget, of equals the lower id.
     *
     * @return the mask
     */
    public ExpertMask mask() {
        return budget.top(theta);
    }

    /**
     * Returns how gradients are estimated.
     *
     * @return the estimator
     */
    public MaskEstimator estimator() {
        return estimator;
    }

    /**
     * Returns how many experts are kept.
     *
     * @return the budget
     */
    public MaskBudget budget() {
        return budget;
    }

    /**
     * Returns the mask logits.
     *
     * @return [layers, experts]; a copy
     */
    public double[][] theta() {
        return Arrays.stream(theta).map(double[]::clone).toArray(double[][]::new);
    }

    /**
     * Returns how many updates were made.
     *
     * @return the number of updates
     */
    public long updates() {
        return updates;
    }

    /**
     * Returns how many samples were left out because their loss was not finite.
     *
     * @return the number over all updates
     */
    public long droppedSamples() {
        return dropped;
    }

    /**
     * Returns the mean loss of the samples of every update, those whose loss was not finite
     * included.
     *
     * @return [updates]; a copy
     */
    public double[] losses() {
        return losses.stream().mapToDouble(Double::doubleValue).toArray();
    }

    /** Returns how many masks are tried a step. */
    int samples() {
        return samples;
    }

    /**
     * Writes what has been learnt, with Adam's state.
     *
     * @param file the file; its folder must exist
     * @throws IOException if writing fails
     */
    public void save(Path file) throws IOException {
        MaskLearningFile.write(file, settings(), dropped, state(), losses());
    }

    /**
     * Goes on where another learner of the same settings was saved. What {@link #propose} returned
     * before is of no more use.
     *
     * @param file what {@link #save} has written
     * @throws SafetensorsException if it is no such file or is broken, or is of a learner with
     *     other settings, layers or experts; nothing has changed then
     * @throws IOException if it cannot be read; nothing has changed then
     */
    public void load(Path file) throws IOException {
        Map<String, double[][]> state = state();
        MaskLearningFile.Contents read = MaskLearningFile.read(file, settings(), state);
        state.forEach(
                (name, matrix) -> {
                    for (int l = 0; l < matrix.length; l++) {
                        System.arraycopy(read.matrices().get(name)[l], 0, matrix[l], 0, experts);
                    }
                });
        losses.clear();
        Arrays.stream(read.losses()).forEach(losses::add);
        updates = losses.size();
        dropped = read.dropped();
    }

    /** The live arrays that an update changes. */
    private Map<String, double[][]> state() {
        Map<String, double[][]> state = new LinkedHashMap<>();
        state.put("theta", theta);
        state.put("exp_avg", mean);
        state.put("exp_avg_sq", variance);
        return state;
    }

    private String settings() {
        return "%s, %s, %d samples, temperature %s, learning rate %s, seed %d"
                .formatted(estimator, budget, samples, temperature, learningRate, seed);
    }

    @Override
    public String toString() {
        return "MaskLearning (%s) keeps %s of %d, %d samples a step, temperature %s, learning rate %s, %d updates, %d samples dropped%n%s"
                .formatted(
                        estimator,
                        budget,
                        experts,
                        samples,
                        temperature,
                        learningRate,
                        updates,
                        dropped,
                        mask());
    }

    private static double[] standardisedLog(long[] usage, double scale) {
        double[] log = Arrays.stream(usage).mapToDouble(Math::log1p).toArray();
        double mean = Arrays.stream(log).average().orElseThrow();
        double sd =
                Math.sqrt(
                        Arrays.stream(log)
                                .map(v -> (v - mean) * (v - mean))
                                .average()
                                .orElseThrow());
        return Arrays.stream(log).map(v -> sd > 1e-12 ? scale * (v - mean) / sd : 0).toArray();
    }

    /** Settings of the learner. */
    public static final class Builder {

        private int layers;
        private int experts;
        private MaskBudget budget;
        private MaskEstimator estimator = MaskEstimator.plackettLuce();
        private int topK;
        private int samples = 8;
        private double temperature = 1;
        private double learningRate = 0.1;
        private long seed;
        private double[][] theta;
        private long[][] usage;
        private double usageScale;

        private Builder() {}

        /**
         * Sets the number of MoE layers.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder setNumLayers(int value) {
            layers = value;
            return this;
        }

        /**
         * Sets the number of experts a layer.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder setNumExperts(int value) {
            experts = value;
            return this;
        }

        /**
         * Sets how many experts a layer keeps.
         *
         * @param n topK to the number of experts
         * @return this builder
         */
        public Builder setKept(int n) {
            // Out of range is an error of build().
            return setBudget(n < 1 ? null : MaskBudget.perLayer(n));
        }

        /**
         * Sets how many experts are kept, in place of {@link #setKept}.
         *
         * @param value every layer keeps topK at least
         * @return this builder
         */
        public Builder setBudget(MaskBudget value) {
            budget = value;
            return this;
        }

        /**
         * Sets how gradients are estimated; default: Plackett-Luce.
         *
         * @param value the estimator
         * @return this builder
         */
        public Builder optEstimator(MaskEstimator value) {
            estimator = value;
            return this;
        }

        /**
         * Sets how many experts a token selects, the least that can be kept.
         *
         * @param k at least 1
         * @return this builder
         */
        public Builder setTopK(int k) {
            topK = k;
            return this;
        }

        /**
         * Sets how many masks are tried a step; default: 8.
         *
         * @param m at least 2, or 1 where the estimator runs backward
         * @return this builder
         */
        public Builder optSamples(int m) {
            samples = m;
            return this;
        }

        /**
         * Sets the temperature tau: how far samples stray from the top n of theta; default: 1.
         *
         * @param tau above 0, in the unit of theta
         * @return this builder
         */
        public Builder optTemperature(double tau) {
            temperature = tau;
            return this;
        }

        /**
         * Sets how far Adam moves theta an update, roughly; default: 0.1.
         *
         * @param rate above 0, in the unit of theta
         * @return this builder
         */
        public Builder optLearningRate(double rate) {
            learningRate = rate;
            return this;
        }

        /**
         * Sets what decides every sample; default: 0.
         *
         * @param value the seed
         * @return this builder
         */
        public Builder optSeed(long value) {
            seed = value;
            return this;
        }

        /**
         * Sets where theta begins; default: all 0, that is, every mask equally likely.
         *
         * @param initial [layers, experts], finite
         * @return this builder
         */
        public Builder optTheta(double[][] initial) {
            theta = initial;
            return this;
        }

        /**
         * Lets theta begin at the usage of the base model: log(1 + count), standardised within the
         * layer to mean 0 and the given standard deviation. Equal counts give 0.
         *
         * @param counts how often an expert was selected, [layers, experts]
         * @param scale the standard deviation, at least 0. At the scale of the temperature, 1 by
         *     default, frequent experts are clearly favoured and rare ones are still drawn often
         *     enough to be judged
         * @return this builder
         */
        public Builder optInitialUsage(long[][] counts, double scale) {
            usage = counts;
            usageScale = scale;
            return this;
        }

        /**
         * Checks the settings.
         *
         * @return the learner, before its first update
         */
        public MaskLearning build() {
            Checks.require(layers >= 1, "numLayers is %d: set 1 or more", layers);
            Checks.require(experts >= 1, "numExperts is %d: set 1 or more", experts);
            Checks.require(topK >= 1, "topK is %d: set 1 or more", topK);
            Checks.require(budget != null, "kept is missing or below 1: set topK to numExperts");
            budget.check(layers, topK, experts);
            Checks.require(estimator != null, "estimator is null: name one of MaskEstimator");
            Checks.require(
                    samples >= estimator.minSamples(),
                    "samples is %d: the estimator (%s) needs %d masks",
                    samples,
                    estimator,
                    estimator.minSamples());
            Checks.require(
                    temperature > 0 && Double.isFinite(temperature),
                    "temperature is %s: it must be finite and above 0",
                    temperature);
            Checks.require(
                    learningRate > 0 && Double.isFinite(learningRate),
                    "learningRate is %s: it must be finite and above 0",
                    learningRate);
            Checks.require(
                    theta == null || usage == null,
                    "theta and usage are both given: choose one to begin with");
            if (theta != null) {
                Checks.require(theta.length == layers, "theta has %d layers", theta.length);
                for (double[] row : theta) {
                    Checks.require(
                            row.length == experts, "theta has a layer of %d experts", row.length);
                    Checks.require(
                            Arrays.stream(row).allMatch(Double::isFinite),
                            "theta is not finite: %s",
                            Arrays.toString(row));
                }
            }
            if (usage != null) {
                Checks.require(
                        usageScale >= 0 && Double.isFinite(usageScale),
                        "The usage scale is %s: it must be finite and at least 0",
                        usageScale);
                Checks.require(usage.length == layers, "usage has %d layers", usage.length);
                for (long[] row : usage) {
                    Checks.require(
                            row.length == experts, "usage has a layer of %d experts", row.length);
                    Checks.require(
                            Arrays.stream(row).allMatch(c -> c >= 0),
                            "usage counts are below 0: %s",
                            Arrays.toString(row));
                }
            }
            return new MaskLearning(this);
        }
    }
}
