package org.djlmoe.maskcoft;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.routing.SelectionPrior;

/** The options of the whole recipe, with their defaults; see {@link AdaptationValues}. */
final class MaskCoFTValues extends AdaptationValues {

    Integer kept;
    Integer keptTotal;
    MaskEstimator estimator = MaskEstimator.plackettLuce();
    int maskSteps = 60;
    int maskSamples = 6;
    double maskLearningRate = 0.1;
    double temperature = 1;
    double loadWeight;
    double softBeta = 1.5;
    int protectedTop;
    Integer cacheSize;
    EvictionPolicy.Type policy = EvictionPolicy.Type.LFU_LIFETIME;
    double perplexityLimit = Double.NaN;
    List<Double> betas = List.of(0.5, 1.0, 1.25, 1.5, 2.0, 4.0);
    SelectionPrior.Form form = SelectionPrior.Form.ADDITIVE;

    MaskCoFTValues() {
        super(200);
    }

    @Override
    MaskCoFTValues copy() {
        MaskCoFTValues copy = (MaskCoFTValues) super.copy();
        // A caller's list may change, and may have nulls until it is checked.
        copy.betas = betas == null ? null : new ArrayList<>(betas);
        return copy;
    }

    @Override
    Map<String, Object> byName() {
        Map<String, Object> named = super.byName();
        named.put("kept", kept);
        named.put("keptTotal", keptTotal);
        named.put("estimator", estimator);
        named.put("maskSteps", maskSteps);
        named.put("maskSamples", maskSamples);
        named.put("maskLearningRate", maskLearningRate);
        named.put("temperature", temperature);
        named.put("loadWeight", loadWeight);
        named.put("softBeta", softBeta);
        named.put("protectedTop", protectedTop);
        named.put("cacheSize", cacheSize);
        named.put("policy", policy);
        named.put("perplexityLimit", perplexityLimit);
        named.put("betas", betas);
        named.put("form", form);
        return named;
    }

    @Override
    void check() {
        super.check();
        Checks.require(
                kept == null || keptTotal == null,
                "kept and keptTotal are both given: choose the experts a layer, or those of all");
        Checks.require(kept == null || kept >= 1, "kept is %d: set topK or more", kept);
        Checks.require(
                keptTotal == null || keptTotal >= 1,
                "keptTotal is %d: set topK or more",
                keptTotal);
        Checks.require(estimator != null, "estimator is null: name one of MaskEstimator");
        Checks.require(maskSteps >= 0, "maskSteps is %d: set 0 or more", maskSteps);
        Checks.require(
                maskSamples >= estimator.minSamples(),
                "maskSamples is %d: the estimator (%s) needs %d masks",
                maskSamples,
                estimator,
                estimator.minSamples());
        Checks.require(
                maskLearningRate > 0 && Double.isFinite(maskLearningRate),
                "maskLearningRate is %s: it must be finite and above 0",
                maskLearningRate);
        Checks.require(
                temperature > 0 && Double.isFinite(temperature),
                "temperature is %s: it must be finite and above 0",
                temperature);
        Checks.require(
                loadWeight >= 0 && Double.isFinite(loadWeight),
                "loadWeight is %s: it must be finite and 0 or more",
                loadWeight);
        MaskSearch.check(estimator, loadWeight);
        Checks.require(
                softBeta >= 0, "softBeta is %s: it must be 0 or above, or infinity", softBeta);
        Checks.require(protectedTop >= 0, "protectedTop is %d: set 0 or more", protectedTop);
        Checks.require(
                cacheSize == null || cacheSize >= 1, "cacheSize is %d: set 1 or more", cacheSize);
        Checks.require(policy != null, "policy is null: name an eviction policy");
        Checks.require(
                !(perplexityLimit <= 0),
                "perplexityLimit is %s: it must be above 0",
                perplexityLimit);
        Checks.require(betas != null && !betas.isEmpty(), "betas is empty: at least one is tried");
        for (Double beta : betas) {
            Checks.require(
                    beta != null && beta >= 0,
                    "betas has %s: each must be 0 or above, or infinity",
                    beta);
        }
        Checks.require(form != null, "form is null: name one of SelectionPrior.Form");
    }
}
