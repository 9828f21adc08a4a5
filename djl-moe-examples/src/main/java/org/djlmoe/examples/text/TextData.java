package org.djlmoe.examples.text;

import java.io.IOException;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import java.util.SplittableRandom;
import org.djlmoe.data.PackedTokens;
import org.djlmoe.data.TokenCorpus;

/**
 * The parliament transcripts of one language or of all, as token rows for training, validation and
 * test.
 *
 * <p>Which part a document belongs to is decided by its place in the transcripts alone, not by a
 * seed and not by the language: what a model was trained on never turns up in the test text of
 * another run.
 *
 * @param train 92 % of the documents
 * @param validation 4 %
 * @param test 4 %
 */
public record TextData(PackedTokens train, PackedTokens validation, PackedTokens test) {

    private static final long SPLIT = 20051;
    private static final double HELD_OUT = 0.04;

    /**
     * Reads and tokenizes the transcripts.
     *
     * @param language the language, or null for all
     * @param sequenceLength tokens a row
     * @return the rows
     * @throws IOException if the transcripts are not on the class path
     */
    public static TextData load(Language language, int sequenceLength) throws IOException {
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
            TokenCorpus.Builder[] parts = new TokenCorpus.Builder[3];
            Arrays.setAll(parts, i -> TokenCorpus.builder(tokenizer.endOfText()));
            Map<Part, List<EuroparlCorpus.Document>> split = split();
            for (Part part : Part.values()) {
                for (EuroparlCorpus.Document document : split.get(part)) {
                    if (language == null || document.language() == language) {
                        parts[part.ordinal()].add(tokenizer.encode(document.text()));
                    }
                }
            }
            return new TextData(
                    parts[0].build().pack(sequenceLength),
                    parts[1].build().pack(sequenceLength),
                    parts[2].build().pack(sequenceLength));
        }
    }

    /** What a document is for. */
    public enum Part {
        /** To be trained on. */
        TRAIN,
        /** To choose by. */
        VALIDATION,
        /** To report on. */
        TEST
    }

    /**
     * Reads the transcripts of one part, in all languages.
     *
     * @param part which part
     * @return the documents in the order of the transcripts
     * @throws IOException if the transcripts are not on the class path
     */
    public static List<EuroparlCorpus.Document> documents(Part part) throws IOException {
        return List.copyOf(split().get(part));
    }

    private static Map<Part, List<EuroparlCorpus.Document>> split() throws IOException {
        Map<Part, List<EuroparlCorpus.Document>> parts = new EnumMap<>(Part.class);
        for (Part part : Part.values()) {
            parts.put(part, new ArrayList<>());
        }
        SplittableRandom random = new SplittableRandom(SPLIT);
        for (EuroparlCorpus.Document document : EuroparlCorpus.load().documents()) {
            double place = random.nextDouble();
            Part part =
                    place < HELD_OUT
                            ? Part.TEST
                            : place < 2 * HELD_OUT ? Part.VALIDATION : Part.TRAIN;
            parts.get(part).add(document);
        }
        return parts;
    }
}
