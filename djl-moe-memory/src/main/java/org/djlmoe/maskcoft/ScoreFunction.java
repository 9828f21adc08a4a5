package org.djlmoe.maskcoft;

import java.util.List;
import java.util.stream.IntStream;
import org.djlmoe.routing.ExpertMask;

/** See {@link MaskEstimator#plackettLuce()}. */
record ScoreFunction() implements MaskEstimator {

    @Override
    public MaskSample draw(MaskScores scores, int step, int index) {
        int layers = scores.layers();
        int experts = scores.experts();
        double[][] theta = scores.theta();
        boolean[][] kept = new boolean[layers][experts];
        double[][] credit = new double[layers][];
        for (int l = 0; l < layers; l++) {
            PlackettLuce own =
                    new PlackettLuce(theta[l], scores.temperature(), scores.budget().floor());
            int[] order = own.sample(scores.random(step, index, l));
            for (int e : order) {
                kept[l][e] = true;
            }
            credit[l] = own.gradient(order);
        }
        if (scores.budget().shared() > 0) {
            // Fresh noise: what the first draws have left behind is no longer Gumbel distributed.
            int[] left =
                    IntStream.range(0, layers * experts)
                            .filter(i -> !kept[i / experts][i % experts])
                            .toArray();
            double[] thetaLeft = new double[left.length];
            for (int i = 0; i < left.length; i++) {
                thetaLeft[i] = theta[left[i] / experts][left[i] % experts];
            }
            PlackettLuce pool =
                    new PlackettLuce(thetaLeft, scores.temperature(), scores.budget().shared());
            int[] order = pool.sample(scores.random(step, index, layers));
            double[] g = pool.gradient(order);
            for (int i = 0; i < left.length; i++) {
                credit[left[i] / experts][left[i] % experts] += g[i];
            }
            for (int i : order) {
                kept[left[i] / experts][left[i] % experts] = true;
            }
        }
        return new MaskSample(step, index, ExpertMask.of(kept), credit);
    }

    @Override
    public double[][] gradient(List<MaskSample> samples, List<MaskOutcome> outcomes) {
        int m = samples.size();
        // Each loss divided first: the sum of large finite losses may not be finite.
        double baseline = outcomes.stream().mapToDouble(o -> o.loss() / m).sum();
        ExpertMask shape = samples.get(0).mask();
        double[][] gradient = new double[shape.numLayers()][shape.numExperts()];
        for (int i = 0; i < m; i++) {
            double advantage = (outcomes.get(i).loss() - baseline) / (m - 1);
            for (int l = 0; l < gradient.length; l++) {
                double[] g = samples.get(i).credit(l);
                for (int e = 0; e < g.length; e++) {
                    gradient[l][e] += advantage * g[e];
                }
            }
        }
        return gradient;
    }

    @Override
    public boolean needsBackward() {
        return false;
    }

    @Override
    public int excludedExperts() {
        return 0;
    }

    @Override
    public int minSamples() {
        return 2;
    }

    @Override
    public String toString() {
        return "Plackett-Luce";
    }
}
