package org.djlmoe.serving;

import org.djlmoe.model.MoeConfig;

/**
 * How a store keeps experts: one contiguous record an expert and layer, gate and up [2 I, H] (the
 * rows of gate first), then down [H, I].
 *
 * @param layers MoE layers
 * @param experts E, experts a layer
 * @param hidden H
 * @param inner I as stored, zero padding included
 * @param half whether weights are BF16 and not F32
 */
public record ExpertLayout(int layers, int experts, int hidden, int inner, boolean half) {

    /** Checks that a record can be read at once. */
    public ExpertLayout {
        if (layers < 1 || experts < 1 || hidden < 1 || inner < 1) {
            throw new IllegalArgumentException(
                    "Layers, experts, hidden and inner must be positive: %d, %d, %d, %d"
                            .formatted(layers, experts, hidden, inner));
        }
        // DJL's buffers end at 2 GiB.
        if (3L * hidden * inner * (half ? 2 : 4) > Integer.MAX_VALUE) {
            throw new IllegalArgumentException(
                    "An expert of %d x %d takes more than 2 GiB: pad less, or store it in BF16"
                            .formatted(hidden, inner));
        }
    }

    /**
     * Returns the weights of one expert.
     *
     * @return 3 I H
     */
    public int elements() {
        return 3 * hidden * inner;
    }

    /**
     * Returns the size of one expert.
     *
     * @return bytes a record
     */
    public int bytes() {
        return elements() * (half ? 2 : 4);
    }

    /**
     * Makes sure that these are the experts of a model, possibly padded.
     *
     * @param config the model
     * @throws IllegalArgumentException if they are not
     */
    public void requireFor(MoeConfig config) {
        if (layers != config.numLayers()
                || experts != config.numExperts()
                || hidden != config.hiddenSize()
                || inner < config.intermediateSize()) {
            throw new IllegalArgumentException(
                    "The store has %d layers of %d experts, H %d, I %d; the model has %d of %d, H %d, I %d: pack it again"
                            .formatted(
                                    layers,
                                    experts,
                                    hidden,
                                    inner,
                                    config.numLayers(),
                                    config.numExperts(),
                                    config.hiddenSize(),
                                    config.intermediateSize()));
        }
    }
}
