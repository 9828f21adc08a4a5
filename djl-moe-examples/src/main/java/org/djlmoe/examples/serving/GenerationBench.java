package org.djlmoe.examples.serving;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.serving.ExpertTraffic;
import org.djlmoe.serving.IncrementalDecoder;
import org.djlmoe.serving.KvCache;

/**
 * Time per output token of models and ways of serving them, on given texts.
 *
 * <p>Every token is decoded on its own, as in generation, but the next one is the text's (teacher
 * forcing): all arms then read the same tokens, and their perplexity is that of held-out text. Arms
 * take turns text by text, so that what else the machine does meets all of them. The expert cache
 * of an arm starts empty and stays warm over its texts.
 *
 * <pre>{@code
 * List<Result> results = GenerationBench.run(
 *         List.of(Arm.of("base", base, ServingSettings.offloaded(4)),
 *                 Arm.of("tuned", tuned, ServingSettings.offloaded(4))),
 *         texts, 32);
 * }</pre>
 */
public final class GenerationBench {

    private static final int PROMPT_CHUNK = 256;

    /** The first text's first tokens run in a virtual machine that has not warmed up. */
    private static final int WARM_UP_TOKENS = 16;

    private GenerationBench() {}

    /**
     * What is measured.
     *
     * @param name its name in a report
     * @param folder the checkpoint
     * @param prior ranks the experts; null for the router alone
     * @param settings where the experts are
     */
    public record Arm(String name, Path folder, ExpertPrior prior, ServingSettings settings) {

        /**
         * Takes the prior that the folder comes with, if any.
         *
         * @param name its name in a report
         * @param folder the checkpoint
         * @param settings where the experts are
         * @return the arm
         * @throws IOException if the prior cannot be read
         */
        public static Arm of(String name, Path folder, ServingSettings settings)
                throws IOException {
            return new Arm(name, folder, ExpertPrior.load(folder), settings);
        }
    }

    /**
     * What was measured.
     *
     * @param name the arm
     * @param tokens decoded tokens that were timed: all but the first text's first 16
     * @param millisPerToken mean time per output token
     * @param medianMillisPerToken median of the same
     * @param loadingShare share of the time in which the computation stood still for loads, 0 to 1
     * @param readingShare share of the time in which the loader was reading, hidden behind
     *     computation or not
     * @param loadsPerToken misses per token over all layers, as {@code LoadReplay} counts them
     * @param hitRate share of the experts that were resident when asked for
     * @param bytesPerToken bytes read per token, prefetches included
     * @param perplexity of all decoded tokens
     * @param residentBytes fast memory of the experts
     * @param experts where the experts were
     * @param traffic all that was asked of their tier in the timed tokens
     */
    public record Result(
            String name,
            long tokens,
            double millisPerToken,
            double medianMillisPerToken,
            double loadingShare,
            double readingShare,
            double loadsPerToken,
            double hitRate,
            double bytesPerToken,
            double perplexity,
            long residentBytes,
            String experts,
            ExpertTraffic traffic) {

        @Override
        public String toString() {
            return String.format(
                    Locale.ROOT,
                    "%s: %.3f ms/token (median %.3f), %.1f %% waiting for loads, %.3f loads/token,"
                            + " hit rate %.1f %%, perplexity %.4f (%d tokens, %s)",
                    name,
                    millisPerToken,
                    medianMillisPerToken,
                    100 * loadingShare,
                    loadsPerToken,
                    100 * hitRate,
                    perplexity,
                    tokens,
                    experts);
        }
    }

    /**
     * Measures one way of serving a folder, with the prior it comes with.
     *
     * @param folder the checkpoint
     * @param texts token ids, each longer than the prompt by two or more
     * @param promptTokens how many tokens of each text are read as its prompt, at least 1
     * @param settings where the experts are
     * @return what was measured
     * @throws IOException if a file is missing or broken
     */
    public static Result run(
            Path folder, List<int[]> texts, int promptTokens, ServingSettings settings)
            throws IOException {
        return run(
                        List.of(Arm.of(folder.getFileName().toString(), folder, settings)),
                        texts,
                        promptTokens)
                .get(0);
    }

    /**
     * Measures several arms in turn.
     *
     * @param arms the arms
     * @param texts token ids, each longer than the prompt by two or more
     * @param promptTokens how many tokens of each text are read as its prompt, at least 1
     * @return what was measured, in the order of the arms
     * @throws IOException if a file is missing or broken
     * @throws IllegalArgumentException if the texts are too few or too short to time anything
     */
    public static List<Result> run(List<Arm> arms, List<int[]> texts, int promptTokens)
            throws IOException {
        if (promptTokens < 1) {
            throw new IllegalArgumentException(
                    "promptTokens is " + promptTokens + ": set 1 or more");
        }
        long decoded = 0;
        for (int[] text : texts) {
            if (text.length < promptTokens + 2) {
                throw new IllegalArgumentException(
                        "A text of %d tokens leaves nothing to decode behind a prompt of %d"
                                .formatted(text.length, promptTokens));
            }
            decoded += text.length - promptTokens - 1;
        }
        if (decoded <= WARM_UP_TOKENS) {
            throw new IllegalArgumentException(
                    "The texts leave %d tokens to decode, and the first %d are not timed: give more"
                            .formatted(decoded, WARM_UP_TOKENS));
        }
        List<Run> runs = new ArrayList<>();
        try {
            for (Arm arm : arms) {
                runs.add(new Run(arm));
            }
            for (int t = 0; t < texts.size(); t++) {
                // Whoever goes first in a round goes last in the next.
                for (int i = 0; i < runs.size(); i++) {
                    runs.get((t + i) % runs.size()).read(texts.get(t), promptTokens);
                }
            }
            return runs.stream().map(Run::result).toList();
        } finally {
            for (Run run : runs) {
                run.close();
            }
        }
    }

    private static final class Run implements AutoCloseable {

        private final Arm arm;
        private final ServedCheckpoint served;
        private double[] nanos = new double[1024];
        private int timed;
        private int decoded;
        private double negativeLog;
        private ExpertTraffic before = ExpertTraffic.NONE;

        Run(Arm arm) throws IOException {
            this.arm = arm;
            served = ServedCheckpoint.open(arm.folder(), arm.prior(), arm.settings());
        }

        void read(int[] text, int promptTokens) {
            IncrementalDecoder decoder = served.decoder();
            try (KvCache cache = decoder.newCache(1, text.length - 1)) {
                int[][] prompt = {Arrays.copyOf(text, promptTokens)};
                decoder.prefill(cache, prompt, PROMPT_CHUNK);
                for (int t = promptTokens; t < text.length - 1; t++) {
                    long start = System.nanoTime();
                    float[] logits = decoder.decode(cache, text[t])[0];
                    long end = System.nanoTime();
                    negativeLog += negativeLog(logits, text[t + 1]);
                    decoded++;
                    if (decoded == WARM_UP_TOKENS) {
                        before = decoder.experts().decodeTraffic();
                    } else if (decoded > WARM_UP_TOKENS) {
                        if (timed == nanos.length) {
                            nanos = Arrays.copyOf(nanos, 2 * timed);
                        }
                        nanos[timed++] = end - start;
                    }
                }
            }
        }

        private static double negativeLog(float[] logits, int token) {
            double max = Double.NEGATIVE_INFINITY;
            for (float z : logits) {
                max = Math.max(max, z);
            }
            double sum = 0;
            for (float z : logits) {
                sum += Math.exp(z - max);
            }
            return max + Math.log(sum) - logits[token];
        }

        Result result() {
            double[] sorted = Arrays.copyOf(nanos, timed);
            double total = Arrays.stream(sorted).sum();
            Arrays.sort(sorted);
            ExpertTraffic traffic = served.decoder().experts().decodeTraffic().minus(before);
            return new Result(
                    arm.name(),
                    timed,
                    total / timed / 1e6,
                    (sorted[(timed - 1) / 2] + sorted[timed / 2]) / 2e6,
                    traffic.waitNanos() / total,
                    traffic.loadNanos() / total,
                    traffic.loadsPerToken(),
                    traffic.hitRate(),
                    (double) traffic.bytes() / timed,
                    Math.exp(negativeLog / decoded),
                    served.decoder().experts().residentBytes(),
                    served.decoder().experts().describe(),
                    traffic);
        }

        @Override
        public void close() throws IOException {
            served.close();
        }
    }
}
