package org.djlmoe.examples.text;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonNull;
import com.google.gson.JsonObject;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;

/**
 * Makes the committed {@code tokenizer.json}. {@link #main} writes it to the path given; a test
 * compares the two.
 */
final class ByteLevelTokenizerFile {
    private ByteLevelTokenizerFile() {}

    public static void main(String[] args) throws IOException {
        Files.writeString(Path.of(args[0]), json());
    }

    static String json() {
        JsonObject vocab = new JsonObject();
        // A byte is written as a printable character: itself where it is one, else the next free
        // character from U+0100 on (the convention of GPT-2).
        int next = 256;
        for (int b = 0; b < 256; ++b) {
            boolean printable = b >= 33 && b <= 126 || b >= 161 && b != 173;
            vocab.addProperty(Character.toString(printable ? b : next++), b);
        }
        vocab.addProperty("<|endoftext|>", 256);
        vocab.addProperty("<|padding|>", 257);

        JsonObject model = new JsonObject();
        model.addProperty("type", "BPE");
        model.add("dropout", JsonNull.INSTANCE);
        model.add("unk_token", JsonNull.INSTANCE);
        model.add("continuing_subword_prefix", JsonNull.INSTANCE);
        model.add("end_of_word_suffix", JsonNull.INSTANCE);
        model.addProperty("fuse_unk", false);
        model.addProperty("byte_fallback", false);
        model.addProperty("ignore_merges", false);
        model.add("vocab", vocab);
        model.add("merges", new JsonArray());

        // Without merges, cutting the text at word boundaries first would change nothing.
        JsonObject byteLevel = new JsonObject();
        byteLevel.addProperty("type", "ByteLevel");
        byteLevel.addProperty("add_prefix_space", false);
        byteLevel.addProperty("trim_offsets", true);
        byteLevel.addProperty("use_regex", false);

        JsonObject file = new JsonObject();
        file.addProperty("version", "1.0");
        file.add("truncation", JsonNull.INSTANCE);
        file.add("padding", JsonNull.INSTANCE);
        file.add("added_tokens", new JsonArray());
        file.add("normalizer", JsonNull.INSTANCE);
        file.add("pre_tokenizer", byteLevel);
        file.add("post_processor", JsonNull.INSTANCE);
        file.add("decoder", byteLevel);
        file.add("model", model);
        Gson gson =
                new GsonBuilder()
                        .setPrettyPrinting()
                        .disableHtmlEscaping()
                        .serializeNulls()
                        .create();
        return gson.toJson(file) + "\n";
    }
}
