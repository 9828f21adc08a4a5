package org.djlmoe.examples.text;

import java.io.BufferedReader;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.util.EnumMap;
import java.util.EnumSet;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;

/**
 * Tells the language of a text by its stop words, the few dozen short words that make up much of
 * running text in any language.
 *
 * <p>A stop word found adds 1 / (number of languages that have it) to each of them. The best
 * language wins if it has a score of at least 2 and at least 1.5 times the second's; otherwise the
 * answer is UNKNOWN. One pass over the text, no state: safe for several threads.
 *
 * <p>Meant for paragraphs. A title or a list of names holds too few stop words.
 */
public final class LanguageDetector {
    private static final double MIN_SCORE = 2;
    private static final double MIN_MARGIN = 1.5;
    private static final Language[] LANGUAGES = Language.values();

    private final Map<String, int[]> languagesOfWord;
    private final int longestWord;

    /** Reads the stop words from the class path. */
    public LanguageDetector() {
        Map<String, Set<Language>> words = new HashMap<>();
        readStopWords()
                .forEach(
                        (language, list) -> {
                            for (String word : list) {
                                words.computeIfAbsent(word, w -> EnumSet.noneOf(Language.class))
                                        .add(language);
                            }
                        });
        languagesOfWord = new HashMap<>();
        words.forEach(
                (word, set) ->
                        languagesOfWord.put(
                                word, set.stream().mapToInt(Language::ordinal).toArray()));
        longestWord = words.keySet().stream().mapToInt(String::length).max().orElseThrow();
    }

    /**
     * Tells the language of a text.
     *
     * @param text running text of any length
     * @return its language, or UNKNOWN if the text does not decide
     */
    public Language detect(String text) {
        double[] score = new double[LANGUAGES.length];
        char[] word = new char[longestWord];
        int length = 0;
        for (int i = 0; i <= text.length(); ++i) {
            char c = i < text.length() ? text.charAt(i) : ' ';
            if (isInWord(c)) {
                if (length < longestWord) {
                    word[length] = Character.toLowerCase(c);
                }
                ++length;
            } else if (length > 0) {
                if (length <= longestWord) {
                    count(new String(word, 0, length), score);
                }
                length = 0;
            }
        }
        int best = 0;
        int second = 1;
        for (int i = 1; i < score.length; ++i) {
            if (score[i] > score[best]) {
                second = best;
                best = i;
            } else if (score[i] > score[second]) {
                second = i;
            }
        }
        boolean decided = score[best] >= MIN_SCORE && score[best] >= MIN_MARGIN * score[second];
        return decided ? LANGUAGES[best] : Language.UNKNOWN;
    }

    private void count(String word, double[] score) {
        int[] languages = languagesOfWord.get(word);
        if (languages != null) {
            for (int language : languages) {
                score[language] += 1.0 / languages.length;
            }
        }
    }

    // The hyphen keeps abbreviations such as the Bulgarian "г-н" whole.
    private static boolean isInWord(char c) {
        return Character.isLetter(c) || c == '-';
    }

    static Map<Language, String[]> readStopWords() {
        String name = "stop-words.txt";
        Map<Language, String[]> result = new EnumMap<>(Language.class);
        try (InputStream in = LanguageDetector.class.getResourceAsStream(name)) {
            if (in == null) {
                throw new FileNotFoundException(name + " is missing from the class path");
            }
            BufferedReader reader =
                    new BufferedReader(new InputStreamReader(in, StandardCharsets.UTF_8));
            for (String line = reader.readLine(); line != null; line = reader.readLine()) {
                if (!line.startsWith("#")) {
                    String[] parts = line.split(" ", 2);
                    result.put(Language.of(parts[0]), parts[1].split(" "));
                }
            }
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        return result;
    }
}
