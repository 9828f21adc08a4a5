package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.DoubleRange;
import net.jqwik.api.constraints.FloatRange;
import net.jqwik.api.constraints.IntRange;
import net.jqwik.api.constraints.Size;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class SamplerTest {

    private static final float[] LOGITS = {1, 3, 2, 3, -1};

    private static Sampler sampler(GenerationSettings.Builder builder) {
        return new Sampler(builder.build());
    }

    private static int[] draw(Sampler sampler, float[] logits, int count) {
        int[] tokens = new int[count];
        Arrays.setAll(tokens, i -> sampler.next(logits));
        return tokens;
    }

    private static Set<Integer> drawn(GenerationSettings.Builder builder, float[] logits) {
        Set<Integer> all = new TreeSet<>();
        for (int token : draw(sampler(builder), logits, 2000)) {
            all.add(token);
        }
        return all;
    }

    private static GenerationSettings.Builder hot() {
        return GenerationSettings.builder().optTemperature(1);
    }

    @Test
    void next_greedy_likeliestAndOfEqualOnesTheLowerId() {
        assertArrayEquals(
                new int[] {1, 1, 1}, draw(sampler(GenerationSettings.builder()), LOGITS, 3));
    }

    @Property(tries = 200)
    void next_topOne_greedyWhateverTheTemperature(
            @ForAll @Size(min = 1, max = 20) List<@FloatRange(min = -50, max = 50) Float> z,
            @ForAll @DoubleRange(min = 0.01, max = 100) double temperature,
            @ForAll long seed) {
        float[] logits = new float[z.size()];
        for (int i = 0; i < logits.length; i++) {
            logits[i] = z.get(i);
        }
        int greedy = sampler(GenerationSettings.builder()).next(logits);
        assertEquals(
                greedy,
                sampler(hot().optTemperature(temperature).optTopK(1).optSeed(seed)).next(logits));
        assertEquals(
                greedy,
                sampler(hot().optTemperature(temperature).optTopP(1e-9).optSeed(seed))
                        .next(logits));
    }

    @Test
    void next_topK_onlyTheLikeliest() {
        assertEquals(Set.of(1, 3), drawn(hot().optTopK(2), LOGITS));
        assertEquals(Set.of(1, 2, 3), drawn(hot().optTopK(3), LOGITS));
        assertEquals(Set.of(0, 1, 2, 3, 4), drawn(hot().optTemperature(3).optTopK(99), LOGITS));
    }

    @Test
    void next_topP_fewestThatReachIt() {
        float[] logits = {(float) Math.log(0.5), (float) Math.log(0.3), (float) Math.log(0.2)};
        assertEquals(Set.of(0), drawn(hot().optTopP(0.49), logits));
        assertEquals(Set.of(0, 1), drawn(hot().optTopP(0.51), logits));
        assertEquals(Set.of(0, 1), drawn(hot().optTopP(0.79), logits));
        assertEquals(Set.of(0, 1, 2), drawn(hot().optTopP(0.81), logits));
        // top-p counts within what top-k leaves
        assertEquals(Set.of(0), drawn(hot().optTopK(2).optTopP(0.6), logits));
    }

    @ParameterizedTest
    @ValueSource(doubles = {0.5, 1, 2})
    void next_temperature_sharesOfTheSoftmax(double temperature) {
        int count = 40_000;
        int[] tokens = draw(sampler(hot().optTemperature(temperature)), LOGITS, count);
        double sum = 0;
        for (float z : LOGITS) {
            sum += Math.exp(z / temperature);
        }
        for (int id = 0; id < LOGITS.length; id++) {
            int wanted = id;
            double share = (double) Arrays.stream(tokens).filter(t -> t == wanted).count() / count;
            // four standard deviations at most
            assertEquals(Math.exp(LOGITS[id] / temperature) / sum, share, 0.01, "token " + id);
        }
    }

    @Test
    void next_repetitionPenalty_dividesPositiveAndMultipliesNegativeLogits() {
        Sampler sampler = sampler(GenerationSettings.builder().optRepetitionPenalty(2));
        sampler.see(1);
        assertEquals(3, sampler.next(LOGITS));
        sampler.see(3);
        assertEquals(2, sampler.next(LOGITS));
        float[] negative = {-1, -1.5f};
        Sampler other = sampler(GenerationSettings.builder().optRepetitionPenalty(2));
        assertEquals(0, other.next(negative));
        other.see(0);
        assertEquals(1, other.next(negative));
    }

    @Property(tries = 50)
    void next_sameSeed_sameTokens(@ForAll long seed, @ForAll @IntRange(max = 5) int topK) {
        assertArrayEquals(
                draw(sampler(hot().optSeed(seed).optTopK(topK)), LOGITS, 50),
                draw(sampler(hot().optSeed(seed).optTopK(topK)), LOGITS, 50));
    }

    @Test
    void next_otherSeed_otherTokens() {
        assertTrue(
                !Arrays.equals(
                        draw(sampler(hot().optSeed(1)), LOGITS, 50),
                        draw(sampler(hot().optSeed(2)), LOGITS, 50)));
    }

    @Test
    void next_infinitelyUnlikely_neverDrawn() {
        float[] logits = {0, Float.NEGATIVE_INFINITY, 0};
        assertEquals(Set.of(0, 2), drawn(hot(), logits));
        Sampler penalized = sampler(hot().optRepetitionPenalty(2));
        penalized.see(1);
        assertTrue(Arrays.stream(draw(penalized, logits, 100)).noneMatch(t -> t == 1));
    }

    @Test
    void next_notANumber_errorNamesTheToken() {
        IllegalStateException e =
                assertThrows(
                        IllegalStateException.class,
                        () -> sampler(hot()).next(new float[] {0, Float.NaN}));
        assertTrue(e.getMessage().contains("token 1"), e.getMessage());
    }

    @Test
    void settings_outOfRange_refused() {
        List<GenerationSettings.Builder> wrong =
                List.of(
                        hot().optMaxTokens(0),
                        hot().optTemperature(-1),
                        hot().optTemperature(Double.NaN),
                        hot().optTopK(-1),
                        hot().optTopP(0),
                        hot().optTopP(1.1),
                        hot().optRepetitionPenalty(0),
                        hot().optPromptChunk(0),
                        hot().optStopStrings(List.of("a", "")));
        for (GenerationSettings.Builder builder : wrong) {
            assertThrows(IllegalArgumentException.class, builder::build);
        }
    }
}
