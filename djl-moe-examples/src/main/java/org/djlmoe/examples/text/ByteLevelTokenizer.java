package org.djlmoe.examples.text;

import ai.djl.huggingface.tokenizers.HuggingFaceTokenizer;
import ai.djl.huggingface.tokenizers.jni.TokenizersLibrary;
import ai.djl.util.Utils;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Map;
import org.djlmoe.io.AtomicFiles;

/**
 * A tokenizer whose tokens are the 256 bytes of UTF-8: id = byte value, then end-of-text and
 * padding. It needs no training, no download and no unknown token, and every text comes back as it
 * was. The price is length: about one token a letter, where a learned vocabulary needs one for
 * four.
 *
 * <p>It is an ordinary Hugging Face {@code tokenizer.json} (byte-level BPE without merges) read by
 * DJL's {@link HuggingFaceTokenizer}, so a checkpoint that carries the file can be used elsewhere.
 * The two special ids are in the vocabulary but are no "added tokens": a text that spells {@code
 * <|endoftext|>} is encoded as thirteen bytes and cannot end a document.
 *
 * <p>Encoding runs at about 5 MB/s. Safe for several threads. Close it to free native memory.
 */
public final class ByteLevelTokenizer implements AutoCloseable {
    /** The file that {@link #save} writes. */
    public static final String FILE = "tokenizer.json";

    private static final int END_OF_TEXT = 256;
    private static final int PADDING = 257;

    /** Bytes, end of text, padding. */
    public static final int VOCAB_SIZE = 258;

    private final HuggingFaceTokenizer tokenizer;

    /**
     * Loads the tokenizer from the class path.
     *
     * @throws IOException if the tokenizer's file cannot be read
     */
    public ByteLevelTokenizer() throws IOException {
        // On a CUDA machine DJL would fetch a CUDA build of the library; the CPU build is in its
        // jar and does all that a tokenizer needs.
        if (Utils.getEnvOrSystemProperty("RUST_FLAVOR") == null) {
            System.setProperty("RUST_FLAVOR", "cpu");
        }
        try (InputStream in = open()) {
            // Truncation is on by default, at 512 tokens.
            tokenizer =
                    HuggingFaceTokenizer.newInstance(
                            in,
                            Map.of(
                                    "addSpecialTokens", "false",
                                    "truncation", "false",
                                    "padding", "false"));
        }
    }

    /**
     * Encodes a text: its UTF-8 bytes, nothing before or after. A lone surrogate, which UTF-8
     * cannot express, is an error.
     *
     * @param text any text, the empty one included
     * @return ids in [0, 256)
     * @throws IllegalArgumentException if the text has an unpaired surrogate
     */
    public int[] encode(String text) {
        checkSurrogates(text);
        // The public encode() also builds a string and a span for every token: five times slower.
        TokenizersLibrary library = TokenizersLibrary.LIB;
        long encoding = library.encode(tokenizer.getHandle(), text, false);
        try {
            long[] ids = library.getTokenIds(encoding);
            int[] result = new int[ids.length];
            for (int i = 0; i < ids.length; ++i) {
                result[i] = (int) ids[i];
            }
            return result;
        } finally {
            library.deleteEncoding(encoding);
        }
    }

    /**
     * Decodes ids. End-of-text and padding are left out; bytes that are no valid UTF-8, such as a
     * letter cut in two, become U+FFFD.
     *
     * @param ids ids in [0, vocabSize)
     * @return the text
     * @throws IllegalArgumentException if an id is outside the vocabulary
     */
    public String decode(int[] ids) {
        for (int id : ids) {
            if (id < 0 || id >= VOCAB_SIZE) {
                throw new IllegalArgumentException(
                        "id " + id + " is outside the vocabulary of " + VOCAB_SIZE);
            }
        }
        long[] bytes = Arrays.stream(ids).filter(id -> id < END_OF_TEXT).asLongStream().toArray();
        return tokenizer.decode(bytes, false);
    }

    /** Returns the number of ids, 258. */
    public int vocabSize() {
        return VOCAB_SIZE;
    }

    /** Returns the id that ends a document. */
    public int endOfText() {
        return END_OF_TEXT;
    }

    /** Returns the id that fills up a row; it stands for no text. */
    public int padding() {
        return PADDING;
    }

    /**
     * Writes {@code tokenizer.json} beside a checkpoint.
     *
     * @param directory an existing directory; a file of that name in it is replaced
     * @return the file
     * @throws IOException if the file cannot be written
     */
    public Path save(Path directory) throws IOException {
        Path file = directory.resolve(FILE);
        try (InputStream in = open()) {
            AtomicFiles.write(file, in::transferTo);
        }
        return file;
    }

    @Override
    public void close() {
        tokenizer.close();
    }

    private static InputStream open() throws IOException {
        InputStream in = ByteLevelTokenizer.class.getResourceAsStream(FILE);
        if (in == null) {
            throw new FileNotFoundException(FILE + " is missing from the class path");
        }
        return in;
    }

    private static void checkSurrogates(String text) {
        for (int i = 0; i < text.length(); ++i) {
            char c = text.charAt(i);
            if (Character.isSurrogate(c)) {
                boolean paired =
                        Character.isHighSurrogate(c)
                                && i + 1 < text.length()
                                && Character.isLowSurrogate(text.charAt(i + 1));
                if (!paired) {
                    throw new IllegalArgumentException(
                            "the text has an unpaired surrogate at position " + i);
                }
                ++i;
            }
        }
    }
}
