package org.djlmoe.serving;

import java.util.List;
import java.util.Set;

/**
 * How text is generated.
 *
 * @param maxTokens the most tokens to generate
 * @param temperature what logits are divided by; 0 takes the likeliest token, always
 * @param topK how many of the likeliest tokens may be drawn; 0 for all
 * @param topP only the likeliest tokens that together reach this probability may be drawn; 1 for
 *     all
 * @param repetitionPenalty makes tokens that are in the text already less likely: a positive logit
 *     is divided by it, a negative one multiplied (N. Keskar et al., "CTRL", arXiv 1909.05858); 1
 *     for none
 * @param stopTokens ids that end the text; they are not part of it
 * @param stopStrings strings that end the text; it ends before them
 * @param seed decides every draw
 * @param promptChunk the most tokens of the prompt that are read at a time
 */
public record GenerationSettings(
        int maxTokens,
        double temperature,
        int topK,
        double topP,
        double repetitionPenalty,
        Set<Integer> stopTokens,
        List<String> stopStrings,
        long seed,
        int promptChunk) {

    /** Checks the ranges and copies the collections. */
    public GenerationSettings {
        if (maxTokens < 1) {
            throw new IllegalArgumentException("maxTokens is " + maxTokens + ": set 1 or more");
        }
        if (!(temperature >= 0) || Double.isInfinite(temperature)) {
            throw new IllegalArgumentException(
                    "temperature is " + temperature + ": it must be finite and 0 or more");
        }
        if (topK < 0) {
            throw new IllegalArgumentException(
                    "topK is " + topK + ": set 1 or more, or 0 for all tokens");
        }
        if (!(topP > 0 && topP <= 1)) {
            throw new IllegalArgumentException(
                    "topP is " + topP + ": it must be above 0 and at most 1");
        }
        if (!(repetitionPenalty > 0) || Double.isInfinite(repetitionPenalty)) {
            throw new IllegalArgumentException(
                    "repetitionPenalty is "
                            + repetitionPenalty
                            + ": it must be finite and above 0");
        }
        if (promptChunk < 1) {
            throw new IllegalArgumentException("promptChunk is " + promptChunk + ": set 1 or more");
        }
        stopTokens = Set.copyOf(stopTokens);
        stopStrings = List.copyOf(stopStrings);
        if (stopStrings.contains("")) {
            throw new IllegalArgumentException("An empty stop string would end every text at once");
        }
    }

    /**
     * Starts the settings.
     *
     * @return a builder with the defaults: 128 tokens, greedy
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Builds {@link GenerationSettings}. */
    public static final class Builder {

        private int maxTokens = 128;
        private double temperature;
        private int topK;
        private double topP = 1;
        private double repetitionPenalty = 1;
        private Set<Integer> stopTokens = Set.of();
        private List<String> stopStrings = List.of();
        private long seed;
        private int promptChunk = 256;

        private Builder() {}

        /**
         * Sets how many tokens are generated at most; default: 128.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder optMaxTokens(int value) {
            maxTokens = value;
            return this;
        }

        /**
         * Sets what logits are divided by; default: 0, greedy.
         *
         * @param value 0 or more
         * @return this builder
         */
        public Builder optTemperature(double value) {
            temperature = value;
            return this;
        }

        /**
         * Sets how many of the likeliest tokens may be drawn; default: 0, all.
         *
         * @param value the number
         * @return this builder
         */
        public Builder optTopK(int value) {
            topK = value;
            return this;
        }

        /**
         * Sets the probability of the likeliest tokens that may be drawn; default: 1, all.
         *
         * @param value above 0, at most 1
         * @return this builder
         */
        public Builder optTopP(double value) {
            topP = value;
            return this;
        }

        /**
         * Sets the penalty of tokens that are in the text already; default: 1, none.
         *
         * @param value above 0
         * @return this builder
         */
        public Builder optRepetitionPenalty(double value) {
            repetitionPenalty = value;
            return this;
        }

        /**
         * Sets the ids that end the text; default: none.
         *
         * @param ids the ids
         * @return this builder
         */
        public Builder optStopTokens(Set<Integer> ids) {
            stopTokens = ids;
            return this;
        }

        /**
         * Sets the strings that end the text; default: none.
         *
         * @param strings the strings, none of them empty
         * @return this builder
         */
        public Builder optStopStrings(List<String> strings) {
            stopStrings = strings;
            return this;
        }

        /**
         * Sets what decides every draw; default: 0.
         *
         * @param value the seed
         * @return this builder
         */
        public Builder optSeed(long value) {
            seed = value;
            return this;
        }

        /**
         * Sets how many tokens of the prompt are read at a time; default: 256.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder optPromptChunk(int value) {
            promptChunk = value;
            return this;
        }

        /**
         * Checks the settings.
         *
         * @return the settings
         */
        public GenerationSettings build() {
            return new GenerationSettings(
                    maxTokens,
                    temperature,
                    topK,
                    topP,
                    repetitionPenalty,
                    stopTokens,
                    stopStrings,
                    seed,
                    promptChunk);
        }
    }
}
