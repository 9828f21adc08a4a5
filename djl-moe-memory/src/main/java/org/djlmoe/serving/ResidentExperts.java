package org.djlmoe.serving;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import java.io.IOException;
import org.djlmoe.expert.Experts;
import org.djlmoe.kernel.DecodeKernels;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;

/** All experts in fast memory: nothing is ever loaded. What offloading is measured against. */
public final class ResidentExperts extends ServedExperts {

    private final int layers;
    private final int experts;
    private final int hidden;
    private final int inner;
    private final long bytes;
    private final NDArray[][] gateUp;
    private final NDArray[][] down;
    private final Runnable memory;
    private int topK;
    private int layer;
    private Routes routes;

    private ResidentExperts(
            int layers, int experts, int hidden, int inner, long bytes, Runnable memory) {
        this.layers = layers;
        this.experts = experts;
        this.hidden = hidden;
        this.inner = inner;
        this.bytes = bytes;
        this.memory = memory;
        gateUp = new NDArray[layers][experts];
        down = new NDArray[layers][experts];
    }

    /**
     * Reads all experts of a store.
     *
     * @param store the store; not needed afterwards
     * @return the experts
     * @throws IOException if reading fails
     */
    public static ResidentExperts load(ExpertStore store) throws IOException {
        ExpertLayout layout = store.layout();
        int count = Math.multiplyExact(layout.layers(), layout.experts());
        ExpertSlots slots = new ExpertSlots(layout, count);
        try {
            ResidentExperts resident =
                    new ResidentExperts(
                            layout.layers(),
                            layout.experts(),
                            layout.hidden(),
                            layout.inner(),
                            slots.bytes(),
                            slots::close);
            for (int s = 0; s < count; s++) {
                int l = s / layout.experts();
                int e = s % layout.experts();
                store.read(l, e, slots.memory(s));
                resident.gateUp[l][e] = slots.gateUp(s);
                resident.down[l][e] = slots.down(s);
            }
            return resident;
        } catch (IOException | RuntimeException e) {
            slots.close();
            throw e;
        }
    }

    /**
     * Uses the experts of a model in memory, as they are.
     *
     * @param decoder the model, initialized; it must outlive the result
     * @return the experts
     * @throws IllegalArgumentException if the experts have adapters, or lie on several ranks
     */
    public static ResidentExperts of(MoeDecoder decoder) {
        if (!decoder.adapterParameters().isEmpty()) {
            throw new IllegalArgumentException(
                    "The experts have adapters, which are not served: merge them first"
                            + " (Experts.mergeAdapters)");
        }
        MoeConfig config = decoder.config();
        NDArray first = decoder.moeBlocks().get(0).experts().gateUp().getArray();
        if (first.getShape().get(0) != config.numExperts()) {
            throw new IllegalArgumentException(
                    "The experts lie on several ranks, which are not served: serve a model that has"
                            + " all of them");
        }
        NDManager views = first.getManager().newSubManager();
        long count = 3L * config.intermediateSize() * config.hiddenSize() * config.numExperts();
        ResidentExperts resident =
                new ResidentExperts(
                        config.numLayers(),
                        config.numExperts(),
                        config.hiddenSize(),
                        config.intermediateSize(),
                        4 * count * config.numLayers(),
                        views::close);
        for (int l = 0; l < config.numLayers(); l++) {
            Experts stacked = decoder.moeBlocks().get(l).experts();
            for (int e = 0; e < config.numExperts(); e++) {
                resident.gateUp[l][e] = view(views, stacked.gateUp().getArray(), e);
                resident.down[l][e] = view(views, stacked.down().getArray(), e);
            }
        }
        return resident;
    }

    private static NDArray view(NDManager manager, NDArray stacked, int expert) {
        try (NDArray detached = stacked.stopGradient()) {
            NDArray view = detached.get(expert);
            view.attach(manager);
            return view;
        }
    }

    @Override
    void requireFor(MoeConfig config) {
        new ExpertLayout(layers, experts, hidden, inner, true).requireFor(config);
        topK = config.topK();
    }

    @Override
    void begin(int layer, long[] ids, boolean decoding) {
        this.layer = layer;
        routes = new Routes(ids, experts);
        int tokens = layer == 0 ? ids.length / topK : 0;
        countAs(decoding);
        count(new ExpertTraffic(tokens, ids.length, 0, 0, 0, 0, 0, 0, 0));
    }

    @Override
    boolean wantsForecast() {
        return false;
    }

    @Override
    void prefetch(int layer, long[] ids) {
        // All are here.
    }

    @Override
    void compute(NDArray h, NDArray out) {
        for (int e : routes.experts()) {
            DecodeKernels.expert(h, gateUp[layer][e], down[layer][e], routes.of(e), topK, out);
        }
    }

    @Override
    public long residentBytes() {
        return bytes;
    }

    @Override
    public String describe() {
        return "all experts resident";
    }

    @Override
    public void close() {
        memory.run();
    }
}
