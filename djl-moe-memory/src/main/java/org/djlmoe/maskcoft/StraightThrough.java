package org.djlmoe.maskcoft;

import java.util.List;
import java.util.SplittableRandom;
import org.djlmoe.routing.ExpertMask;

/**
 * See {@link MaskEstimator#gumbel()} and {@link MaskEstimator#dense}.
 *
 * @param noisy whether masks are drawn; without noise there is one mask, that of theta itself
 * @param excludedExperts dropped experts a token that run along
 */
record StraightThrough(boolean noisy, int excludedExperts) implements MaskEstimator {

    @Override
    public MaskSample draw(MaskScores scores, int step, int index) {
        double[][] noised = scores.theta();
        double tau = scores.temperature();
        for (int l = 0; noisy && l < noised.length; l++) {
            SplittableRandom random = scores.random(step, index, l);
            for (int e = 0; e < noised[l].length; e++) {
                noised[l][e] += tau * PlackettLuce.gumbel(random);
            }
        }
        ExpertMask mask = scores.budget().top(noised);
        double[][] slopes = new double[noised.length][];
        for (int l = 0; l < noised.length; l++) {
            slopes[l] = slopes(noised[l], mask.kept(l), tau);
        }
        return new MaskSample(step, index, mask, slopes);
    }

    /** ds / dtheta with the threshold half-way between the lowest kept and the highest dropped. */
    private static double[] slopes(double[] scores, boolean[] kept, double tau) {
        double lowest = Double.POSITIVE_INFINITY;
        double highest = Double.NEGATIVE_INFINITY;
        for (int e = 0; e < scores.length; e++) {
            if (kept[e]) {
                lowest = Math.min(lowest, scores[e]);
            } else {
                highest = Math.max(highest, scores[e]);
            }
        }
        double[] slopes = new double[scores.length];
        if (Double.isInfinite(highest)) {
            // Nothing is dropped: there is no threshold, and nothing to learn.
            return slopes;
        }
        double threshold = lowest + (highest - lowest) / 2;
        for (int e = 0; e < slopes.length; e++) {
            double s = 1 / (1 + Math.exp(-(scores[e] - threshold) / tau));
            slopes[e] = s * (1 - s) / tau;
        }
        return slopes;
    }

    @Override
    public double[][] gradient(List<MaskSample> samples, List<MaskOutcome> outcomes) {
        ExpertMask shape = samples.get(0).mask();
        double[][] gradient = new double[shape.numLayers()][shape.numExperts()];
        for (int i = 0; i < samples.size(); i++) {
            double[][] factors = outcomes.get(i).factorGradients();
            for (int l = 0; l < gradient.length; l++) {
                double[] slopes = samples.get(i).credit(l);
                for (int e = 0; e < slopes.length; e++) {
                    gradient[l][e] += factors[l][e] * slopes[e] / samples.size();
                }
            }
        }
        return gradient;
    }

    @Override
    public boolean needsBackward() {
        return true;
    }

    @Override
    public int minSamples() {
        return 1;
    }

    @Override
    public String toString() {
        String name = noisy ? "Gumbel straight-through" : "unsampled straight-through";
        return excludedExperts == 0 ? name : "dense straight-through of " + excludedExperts;
    }
}
