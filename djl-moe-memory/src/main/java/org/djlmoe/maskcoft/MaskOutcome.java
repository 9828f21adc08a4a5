package org.djlmoe.maskcoft;

import java.util.Arrays;

/**
 * What running a model under a sampled mask has told.
 *
 * @param loss mean loss of the batch, with any term of the caller's own
 * @param factorGradients d loss / d factor of each expert's combine weight, [layers, experts]; null
 *     after a forward pass alone
 */
public record MaskOutcome(double loss, double[][] factorGradients) {

    /**
     * The outcome of a forward pass.
     *
     * @param loss mean loss of the batch
     * @return the outcome
     */
    public static MaskOutcome of(double loss) {
        return new MaskOutcome(loss, null);
    }

    boolean isFinite() {
        return Double.isFinite(loss)
                && (factorGradients == null
                        || Arrays.stream(factorGradients)
                                .flatMapToDouble(Arrays::stream)
                                .allMatch(Double::isFinite));
    }
}
