package org.djlmoe.examples.text;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.InputStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Random;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class ByteLevelTokenizerTest {
    private static ByteLevelTokenizer tokenizer;

    @BeforeAll
    static void load() throws IOException {
        tokenizer = new ByteLevelTokenizer();
    }

    @AfterAll
    static void close() {
        tokenizer.close();
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "",
                " ",
                "  two leading spaces",
                "trailing  \n",
                "\r\n\t\u0000\u0001\u007f\u0085\u00ad\u200b\ufeff",
                "Schönes Grüß Gott, žluťoučký kůň, Ευρώπη, здравей",
                "family \ud83d\udc68\u200d\ud83d\udc69\u200d\ud83d\udc67 and flag \ud83c\uddea\ud83c\uddfa",
                "e\u0301 stays decomposed",
                "<|endoftext|><|padding|>",
                "he 's n't , . ! ?"
            })
    void encode_anyText_isItsBytesAndComesBack(String text) {
        int[] ids = tokenizer.encode(text);

        assertArrayEquals(bytes(text), ids);
        assertEquals(text, tokenizer.decode(ids));
    }

    @Test
    void encode_randomCodePoints_isTheirBytesAndComesBack() {
        Random random = new Random(42);
        for (int i = 0; i < 200; ++i) {
            String text =
                    random.ints(random.nextInt(100), 0, Character.MAX_CODE_POINT + 1)
                            .filter(c -> c < Character.MIN_SURROGATE || c > Character.MAX_SURROGATE)
                            .collect(
                                    StringBuilder::new,
                                    StringBuilder::appendCodePoint,
                                    StringBuilder::append)
                            .toString();
            assertArrayEquals(bytes(text), tokenizer.encode(text));
            assertEquals(text, tokenizer.decode(bytes(text)));
        }
    }

    // DJL cuts at 512 tokens unless told not to.
    @Test
    void encode_longText_isNotTruncated() {
        String text = "über ".repeat(40_000);

        assertArrayEquals(bytes(text), tokenizer.encode(text));
    }

    @Test
    void encode_unpairedSurrogate_namesThePlace() {
        for (String text : new String[] {"ab\ud83d", "ab\ud83dc", "ab\ude00"}) {
            String message =
                    assertThrows(IllegalArgumentException.class, () -> tokenizer.encode(text))
                            .getMessage();
            assertTrue(message.contains("surrogate at position 2"), message);
        }
    }

    @Test
    void decode_specialIds_areLeftOut() {
        assertEquals("ab", tokenizer.decode(new int[] {'a', tokenizer.endOfText(), 'b', 257, 257}));
        assertEquals(257, tokenizer.padding());
    }

    @Test
    void decode_halfALetter_givesTheReplacementCharacter() {
        assertEquals("a\ufffd", tokenizer.decode(new int[] {'a', 0xc3}));
    }

    @Test
    void decode_idOutside_throws() {
        for (int id : new int[] {-1, tokenizer.vocabSize()}) {
            String message =
                    assertThrows(
                                    IllegalArgumentException.class,
                                    () -> tokenizer.decode(new int[] {id}))
                            .getMessage();
            assertTrue(message.contains("id " + id), message);
        }
    }

    @Test
    void resource_committedFile_isWhatTheGeneratorMakes(@TempDir Path directory)
            throws IOException {
        try (InputStream in =
                ByteLevelTokenizer.class.getResourceAsStream(ByteLevelTokenizer.FILE)) {
            assertEquals(
                    ByteLevelTokenizerFile.json(),
                    new String(in.readAllBytes(), StandardCharsets.UTF_8));
        }
        assertEquals(ByteLevelTokenizerFile.json(), Files.readString(tokenizer.save(directory)));
    }

    private static int[] bytes(String text) {
        byte[] bytes = text.getBytes(StandardCharsets.UTF_8);
        int[] ids = new int[bytes.length];
        for (int i = 0; i < ids.length; ++i) {
            ids[i] = bytes[i] & 0xff;
        }
        return ids;
    }
}
