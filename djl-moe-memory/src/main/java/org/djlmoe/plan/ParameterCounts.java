package org.djlmoe.plan;

import org.djlmoe.model.MoeConfig;

/**
 * How many numbers a decoder's parameters have on a rank: of the experts, those at home there.
 *
 * @param experts the experts, without shared ones: what may be BF16 when frozen
 * @param routers the routers
 * @param adapters the experts' adapters
 * @param other attention, shared experts and their gates, embedding, norms and vocabulary
 *     projection
 * @param largest the largest parameter that trains
 */
record ParameterCounts(long experts, long routers, long adapters, long other, long largest) {

    static ParameterCounts of(MoeConfig config, PlanSettings settings) {
        long h = config.hiddenSize();
        long i = config.intermediateSize();
        long e = config.numExperts();
        long r = settings.loraRank();
        long layers = config.numLayers();
        long queries = (long) config.numHeads() * config.headDim();
        long keys = (long) config.numKeyValueHeads() * config.headDim();
        long table = config.vocabSize() * h;
        long attention = 2 * h * (queries + keys);
        long own = PlanSettings.ceil(e, settings.ranks());
        long gateUp = own * 2 * i * h;
        long s = settings.sharedWidth();
        long gates = s > 0 && settings.sharedGate() ? layers * h : 0;
        long lora = e * r * (h + 2 * i + i + h);
        long largest =
                settings.trained() == PlanSettings.Trained.ALL
                        ? Math.max(Math.max(gateUp, table), h * Math.max(queries, 2 * s))
                        : Math.max(e * h, e * r * Math.max(h, 2 * i));
        return new ParameterCounts(
                layers * (gateUp + own * h * i),
                layers * e * h,
                layers * lora,
                layers * (attention + 3 * s * h)
                        + (config.tieWordEmbeddings() ? 1 : 2) * table
                        + (2 * layers + 1) * h
                        + gates,
                largest);
    }
}
