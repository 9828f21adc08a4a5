package org.djlmoe.serving;

import java.util.ArrayList;
import java.util.List;
import java.util.function.Consumer;
import java.util.function.Function;

/**
 * Continues a text, one token at a time.
 *
 * <p>The same model, prompt and settings give the same text: also from another cache size, policy
 * or prefetch. Experts that were loaded stay for the next text. One thread uses it.
 */
public final class Generator {

    private final IncrementalDecoder decoder;
    private final Function<int[], String> detokenizer;

    /**
     * Creates a generator.
     *
     * @param decoder the model
     * @param detokenizer turns ids into text; letters that are cut in two may become U+FFFD
     */
    public Generator(IncrementalDecoder decoder, Function<int[], String> detokenizer) {
        this.decoder = decoder;
        this.detokenizer = detokenizer;
    }

    /** Why a text ended. */
    public enum StopReason {
        /** It has as many tokens as were allowed. */
        MAX_TOKENS,
        /** A stop token came. */
        STOP_TOKEN,
        /** A stop string came. */
        STOP_STRING
    }

    /**
     * A text and what it took.
     *
     * @param tokens the generated ids; a stop token is not among them
     * @param text their text, up to a stop string
     * @param reason why it ended
     * @param promptTokens tokens of the prompt
     * @param promptSeconds time to read the prompt and draw the first token
     * @param decodeSeconds time of all further tokens
     * @param decodedTokens how many tokens were read in that time: the drawn ones but the last
     * @param prompt what the prompt asked of the experts' tier
     * @param decode what the further tokens asked of it
     */
    public record Result(
            List<Integer> tokens,
            String text,
            StopReason reason,
            int promptTokens,
            double promptSeconds,
            double decodeSeconds,
            int decodedTokens,
            ExpertTraffic prompt,
            ExpertTraffic decode) {

        /** Copies the list. */
        public Result {
            tokens = List.copyOf(tokens);
        }

        /**
         * Returns the time per output token.
         *
         * @return milliseconds; NaN if only the first token was generated
         */
        public double millisPerToken() {
            return decodedTokens == 0 ? Double.NaN : 1e3 * decodeSeconds / decodedTokens;
        }

        /**
         * Returns the share of that time in which the computation stood still for loads.
         *
         * @return 0 to 1
         */
        public double loadingShare() {
            return decodeSeconds == 0 ? 0 : decode.waitNanos() / 1e9 / decodeSeconds;
        }
    }

    /**
     * Continues a prompt.
     *
     * @param prompt its ids, at least one
     * @param settings how to draw, and when to stop
     * @param listener takes the text piece by piece as soon as it is certain
     * @return the text and what it took
     * @throws IllegalArgumentException if the prompt is empty or, with the tokens to come, longer
     *     than the model's positions
     */
    public Result generate(int[] prompt, GenerationSettings settings, Consumer<String> listener) {
        if (prompt.length == 0) {
            throw new IllegalArgumentException(
                    "The prompt is empty: give at least one token, such as the end of a text");
        }
        Sampler sampler = new Sampler(settings);
        TextStream stream = new TextStream(detokenizer, settings.stopStrings());
        List<Integer> tokens = new ArrayList<>();
        ServedExperts experts = decoder.experts();
        ExpertTraffic promptBefore = experts.promptTraffic();
        ExpertTraffic decodeBefore = experts.decodeTraffic();
        int longest = Math.addExact(prompt.length, settings.maxTokens() - 1);
        long start = System.nanoTime();
        try (KvCache cache = decoder.newCache(1, longest)) {
            for (int id : prompt) {
                sampler.see(id);
            }
            float[] logits =
                    decoder.prefill(cache, new int[][] {prompt}, settings.promptChunk())[0];
            long first = 0;
            StopReason reason = StopReason.MAX_TOKENS;
            int decoded = 0;
            while (true) {
                int token = sampler.next(logits);
                first = first == 0 ? System.nanoTime() : first;
                if (settings.stopTokens().contains(token)) {
                    reason = StopReason.STOP_TOKEN;
                    break;
                }
                sampler.see(token);
                tokens.add(token);
                hand(stream.add(token), listener);
                if (stream.isStopped()) {
                    reason = StopReason.STOP_STRING;
                    break;
                }
                if (tokens.size() == settings.maxTokens()) {
                    break;
                }
                logits = decoder.decode(cache, token)[0];
                decoded++;
            }
            if (reason != StopReason.STOP_STRING) {
                hand(stream.finish(), listener);
                if (stream.isStopped()) {
                    reason = StopReason.STOP_STRING;
                }
            }
            long end = System.nanoTime();
            return new Result(
                    tokens,
                    stream.text(),
                    reason,
                    prompt.length,
                    (first - start) / 1e9,
                    (end - first) / 1e9,
                    decoded,
                    experts.promptTraffic().minus(promptBefore),
                    experts.decodeTraffic().minus(decodeBefore));
        }
    }

    private static void hand(String piece, Consumer<String> listener) {
        if (!piece.isEmpty()) {
            listener.accept(piece);
        }
    }
}
