package org.djlmoe.maskcoft;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.lang.reflect.Field;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.routing.MaskedWeights;
import org.djlmoe.routing.SelectionPrior;
import org.junit.jupiter.api.Test;

class MaskCoFTSettingsTest {

    private static MaskCoFTSettings.Builder nothingIsDefault() {
        return MaskCoFTSettings.builder()
                .optSteps(3)
                .optSoftShare(0.25)
                .optAdapters(4, 5)
                .optLearningRate(0.5)
                .optWeights(MaskedWeights.KEPT)
                .optHalfExperts(true)
                .optSeed(9)
                .optKept(5)
                .optEstimator(MaskEstimator.dense(2))
                .optMaskSteps(7)
                .optMaskSamples(2)
                .optMaskLearningRate(0.2)
                .optTemperature(2)
                .optSoftBeta(3)
                .optProtectedTop(1)
                .optCacheSize(6)
                .optPolicy(EvictionPolicy.Type.LRU)
                .optPerplexityLimit(12)
                .optBetas(new ArrayList<>(List.of(1.0, 2.0)))
                .optForm(SelectionPrior.Form.SCALED);
    }

    /** All options by name, whatever options there are. */
    private static Map<String, Object> options(MaskCoFTSettings settings) throws Exception {
        Map<String, Object> all = new TreeMap<>();
        for (Class<?> c = MaskCoFTValues.class; c != Object.class; c = c.getSuperclass()) {
            for (Field field : c.getDeclaredFields()) {
                if (!field.isSynthetic()) {
                    all.put(field.getName(), String.valueOf(field.get(settings.values())));
                }
            }
        }
        return all;
    }

    @Test
    void optSettings_everyOption_isTakenOver() throws Exception {
        MaskCoFTSettings settings = nothingIsDefault().build();
        Map<String, Object> expected = options(settings);
        Map<String, Object> defaults = options(MaskCoFTSettings.builder().build());
        expected.forEach(
                (name, value) -> {
                    // These two exclude what is set here.
                    if (!List.of("keptTotal", "loadWeight").contains(name)) {
                        assertNotEquals(defaults.get(name), value, name);
                    }
                });

        assertEquals(expected, options(MaskCoFTSettings.builder().optSettings(settings).build()));
        MaskCoFTSettings other =
                MaskCoFTSettings.builder().optKeptTotal(11).optLoadWeight(0.5).optSeed(1).build();
        assertEquals(options(other), options(nothingIsDefault().optSettings(other).build()));
    }

    @Test
    void build_changesAfterIt_reachNeitherSettingsNorTheirSource() throws Exception {
        List<Double> betas = new ArrayList<>(List.of(1.0, 2.0));
        MaskCoFTSettings.Builder builder = nothingIsDefault().optBetas(betas);
        MaskCoFTSettings settings = builder.build();
        Map<String, Object> before = options(settings);

        betas.set(0, 7.0);
        builder.optSeed(77).optBetas(List.of(3.0));
        MaskCoFTSettings changed =
                MaskCoFTSettings.builder().optSettings(settings).optSteps(8).build();

        assertEquals(before, options(settings));
        assertEquals(8, changed.steps());
        assertThrows(UnsupportedOperationException.class, () -> settings.betas().set(0, 7.0));
    }

    @Test
    void build_betaThatIsNone_isRefused() {
        MaskCoFTSettings.Builder builder =
                MaskCoFTSettings.builder().optBetas(Arrays.asList(1.0, null));
        String message = assertThrows(IllegalArgumentException.class, builder::build).getMessage();
        assertTrue(message.contains("betas has null"), message);
    }
}
