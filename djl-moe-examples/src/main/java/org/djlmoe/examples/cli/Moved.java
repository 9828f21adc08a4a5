package org.djlmoe.examples.cli;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import org.djlmoe.moe.MoeBlock;
import org.djlmoe.training.LanguageModel;

/**
 * How much of a model fine-tuning has moved: a run in which nothing did looks like any other.
 *
 * @param adapters experts whose adapters have moved, over all layers
 * @param experts experts of all layers
 * @param router_weights weights of routers that have moved
 * @param routers weights of all routers
 * @param expert_weights weights of experts that merging the adapters has changed
 * @param weights weights of all experts
 */
record Moved(
        long adapters,
        long experts,
        long router_weights,
        long routers,
        long expert_weights,
        long weights) {

    /** The routers as they are now. */
    static List<float[]> routers(LanguageModel model) {
        List<float[]> routers = new ArrayList<>();
        for (MoeBlock layer : model.decoder().moeBlocks()) {
            routers.add(layer.router().weight().getArray().toFloatArray());
        }
        return routers;
    }

    /**
     * Counts, and merges the adapters.
     *
     * @param before routers before the run
     */
    static Moved merging(LanguageModel model, List<float[]> before) {
        long adapters = 0;
        long experts = 0;
        long moved = 0;
        long routers = 0;
        long weights = 0;
        List<float[]> after = routers(model);
        for (int l = 0; l < after.size(); l++) {
            for (int i = 0; i < after.get(l).length; i++) {
                moved += after.get(l)[i] != before.get(l)[i] ? 1 : 0;
            }
            routers += after.get(l).length;
            MoeBlock layer = model.decoder().moeBlocks().get(l);
            for (boolean one : layer.experts().adapters().moved()) {
                adapters += one ? 1 : 0;
                experts++;
            }
            weights += layer.experts().gateUp().getShape().size();
            weights += layer.experts().down().getShape().size();
        }
        return new Moved(adapters, experts, moved, routers, model.mergeAdapters(), weights);
    }

    @Override
    public String toString() {
        return String.format(
                Locale.ROOT,
                "moved: adapters of %d of %d experts, %d of %d router weights; merged into %d of %d"
                        + " expert weights",
                adapters,
                experts,
                router_weights,
                routers,
                expert_weights,
                weights);
    }
}
