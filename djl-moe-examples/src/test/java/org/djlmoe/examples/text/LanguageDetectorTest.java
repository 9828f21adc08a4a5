package org.djlmoe.examples.text;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.Arrays;
import java.util.HashSet;
import java.util.Locale;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class LanguageDetectorTest {
    private final LanguageDetector detector = new LanguageDetector();

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            value = {
                "ENGLISH | The house that we have seen is on the hill, and it will not be sold.",
                "GERMAN | Das Haus, das wir gesehen haben, ist nicht groß, und es wird auch verkauft.",
                "DUTCH | Het huis dat wij hebben gezien is niet groot, maar het wordt ook verkocht.",
                "FRENCH | La maison que nous avons vue est dans la rue qui mène au port, et elle est à nous.",
                "ITALIAN | La casa che abbiamo visto è nella via che porta al mare, ma non è in vendita.",
                "SPANISH | La casa que hemos visto está en la calle y no es muy grande, pero también es cara.",
                "PORTUGUESE | A casa que vimos não está na rua, mas também não é muito grande para uma família.",
                "DANISH | Huset, som vi har set, er ikke stort, men det kan også være godt at bo der.",
                "SWEDISH | Huset som vi har sett är inte stort, men det kan också vara bra att bo där och här.",
                "FINNISH | Talo, jonka näimme, ei ole suuri, mutta se on myös hyvä, ja sitä voi ostaa.",
                "ESTONIAN | Maja, mida me nägime, ei ole suur, kuid see on ka hea ja seda tuleb osta.",
                "CZECH | Dům, který jsme viděli, není velký, ale je také dobrý, protože se může prodat.",
                "SLOVAK | Dom, ktorý sme videli, nie je veľký, ale je aj dobrý, pretože ho môže kúpiť byť.",
                "POLISH | Dom, który widzieliśmy, nie jest duży, ale jest także dobry i można go kupić.",
                "GREEK | Το σπίτι που είδαμε δεν είναι μεγάλο, αλλά είναι καλό και θα το πάρουμε."
            })
    void detect_sentence_findsItsLanguage(Language language, String text) {
        assertEquals(language, detector.detect(text));
        assertEquals(language, detector.detect(text.toUpperCase(Locale.ROOT)));
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "",
                "12.30 - 15.00",
                "Savary, Corbett, Poettering",
                "The report",
                // Half in one language and half in another.
                "The house is on the hill and it is not sold. "
                        + "Das Haus ist auf dem Hügel und es ist nicht verkauft, sagen wir."
            })
    void detect_undecidedText_isUnknown(String text) {
        assertEquals(Language.UNKNOWN, detector.detect(text));
    }

    @Test
    void readStopWords_everyLanguage_hasEnoughDistinctLowerCaseWords() {
        Map<Language, String[]> words = LanguageDetector.readStopWords();

        assertEquals(Language.values().length - 1, words.size());
        words.forEach(
                (language, list) -> {
                    assertTrue(list.length >= 30, language + " has " + list.length);
                    assertEquals(
                            list.length, new HashSet<>(Arrays.asList(list)).size(), language::name);
                    for (String word : list) {
                        assertEquals(word.toLowerCase(Locale.ROOT), word);
                    }
                });
    }

    @Test
    void of_codeOrName_findsTheLanguage() {
        assertEquals(Language.GERMAN, Language.of("DE"));
        assertEquals(Language.GERMAN, Language.of("german"));
        assertEquals("German", Language.GERMAN.label());
        String message =
                assertThrows(IllegalArgumentException.class, () -> Language.of("xx")).getMessage();
        assertTrue(message.contains("\"xx\"") && message.contains("de, el"), message);
    }
}
