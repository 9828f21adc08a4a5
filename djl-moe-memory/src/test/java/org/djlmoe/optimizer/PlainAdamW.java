package org.djlmoe.optimizer;

/** The rule of {@code torch.optim.AdamW} for one parameter, in double precision. */
final class PlainAdamW {

    final double[] weight;
    final double[] mean;
    final double[] square;
    private int step;

    PlainAdamW(float[] start) {
        weight = new double[start.length];
        for (int i = 0; i < start.length; i++) {
            weight[i] = start[i];
        }
        mean = new double[start.length];
        square = new double[start.length];
    }

    void step(
            float[] gradient,
            double scale,
            double lr,
            double beta1,
            double beta2,
            double epsilon,
            double decay) {
        step++;
        for (int i = 0; i < weight.length; i++) {
            double g = gradient[i] * scale;
            weight[i] -= lr * decay * weight[i];
            mean[i] = beta1 * mean[i] + (1 - beta1) * g;
            square[i] = beta2 * square[i] + (1 - beta2) * g * g;
            double correctedMean = mean[i] / (1 - Math.pow(beta1, step));
            double correctedSquare = square[i] / (1 - Math.pow(beta2, step));
            weight[i] -= lr * correctedMean / (Math.sqrt(correctedSquare) + epsilon);
        }
    }
}
