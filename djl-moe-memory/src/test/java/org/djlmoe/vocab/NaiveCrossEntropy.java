package org.djlmoe.vocab;

/**
 * The loss and its gradients from all logits, in double precision, written straight from the
 * formulas.
 */
final class NaiveCrossEntropy {

    double scale = 1;
    double cap;
    double smoothing;
    double zLoss;
    long ignored = -100;

    /** Losses of tokens, times their factors, and gradients of their sum. */
    record Result(
            double[] losses,
            double[] hidden,
            double[] weight,
            double[] bias,
            double zLoss,
            double total) {}

    /**
     * Computes the result.
     *
     * @param hidden (N, H)
     * @param weight (V, H)
     * @param bias (V) or null
     * @param labels (N)
     * @param factors (N), what each token's loss is multiplied with
     */
    Result compute(
            double[] hidden, double[] weight, double[] bias, long[] labels, double[] factors) {
        int n = labels.length;
        int h = n == 0 ? 1 : hidden.length / n;
        int vocab = weight.length / h;
        double[] losses = new double[n];
        double[] dHidden = new double[hidden.length];
        double[] dWeight = new double[weight.length];
        double[] dBias = new double[vocab];
        double zPart = 0;
        for (int t = 0; t < n; t++) {
            if (labels[t] == ignored) {
                continue;
            }
            double[] logits = new double[vocab];
            double[] slope = new double[vocab];
            double highest = Double.NEGATIVE_INFINITY;
            double sum = 0;
            for (int v = 0; v < vocab; v++) {
                double raw = bias == null ? 0 : bias[v];
                for (int i = 0; i < h; i++) {
                    raw += hidden[t * h + i] * weight[v * h + i];
                }
                logits[v] = scale * raw;
                slope[v] = scale;
                if (cap > 0) {
                    double tanh = Math.tanh(logits[v] / cap);
                    logits[v] = cap * tanh;
                    slope[v] *= 1 - tanh * tanh;
                }
                highest = Math.max(highest, logits[v]);
                sum += logits[v];
            }
            double z = 0;
            for (double logit : logits) {
                z += Math.exp(logit - highest);
            }
            double lse = highest + Math.log(z);
            int label = (int) labels[t];
            losses[t] =
                    factors[t]
                            * ((1 - smoothing) * (lse - logits[label])
                                    + smoothing * (lse - sum / vocab)
                                    + zLoss * lse * lse);
            zPart += factors[t] * zLoss * lse * lse;
            for (int v = 0; v < vocab; v++) {
                double target = smoothing / vocab + (v == label ? 1 - smoothing : 0);
                double p = Math.exp(logits[v] - lse);
                double d = factors[t] * ((1 + 2 * zLoss * lse) * p - target) * slope[v];
                dBias[v] += d;
                for (int i = 0; i < h; i++) {
                    dHidden[t * h + i] += d * weight[v * h + i];
                    dWeight[v * h + i] += d * hidden[t * h + i];
                }
            }
        }
        double total = 0;
        for (double loss : losses) {
            total += loss;
        }
        return new Result(losses, dHidden, dWeight, dBias, zPart, total);
    }
}
