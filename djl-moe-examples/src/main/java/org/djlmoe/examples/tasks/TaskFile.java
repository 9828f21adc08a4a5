package org.djlmoe.examples.tasks;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParseException;
import com.google.gson.JsonPrimitive;
import com.google.gson.Strictness;
import com.google.gson.stream.JsonReader;
import com.google.gson.stream.JsonToken;
import java.io.BufferedWriter;
import java.io.IOException;
import java.io.OutputStreamWriter;
import java.io.StringReader;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.io.AtomicFiles;
import org.djlmoe.training.ChoiceQuestion;

/**
 * A file of {@link TaskItem}s: JSON lines in UTF-8, one question a line, blank lines passed over.
 *
 * <pre>{@code
 * {"task": "next_word", "context": "Das Parlament hat", "choices": [" den", " Haus"], "answer": 0}
 * }</pre>
 *
 * <p>All four fields are required, in any order; further ones are passed over. The answer counts
 * from 0. A choice follows the context directly, so most begin with a space.
 */
public final class TaskFile {

    private static final Gson GSON = new GsonBuilder().disableHtmlEscaping().create();

    private TaskFile() {}

    /**
     * Reads a file.
     *
     * @param file the file
     * @return its items, at least one
     * @throws IllegalArgumentException if a line is no item; the message names the file, the line
     *     counted from 1 and the field
     * @throws IOException if the file cannot be read
     */
    public static List<TaskItem> read(Path file) throws IOException {
        List<TaskItem> items = new ArrayList<>();
        List<String> lines;
        try {
            lines = Files.readAllLines(file);
        } catch (CharacterCodingException e) {
            throw new IllegalArgumentException(file + " is not text in UTF-8", e);
        }
        for (int i = 0; i < lines.size(); i++) {
            if (lines.get(i).isBlank()) {
                continue;
            }
            try {
                items.add(item(lines.get(i)));
            } catch (IllegalArgumentException e) {
                throw new IllegalArgumentException(
                        file + ", line " + (i + 1) + ": " + e.getMessage(), e);
            }
        }
        if (items.isEmpty()) {
            throw new IllegalArgumentException(file + " has no question: one JSON object a line");
        }
        return items;
    }

    private static TaskItem item(String line) {
        JsonObject json;
        try {
            JsonReader reader = new JsonReader(new StringReader(line));
            reader.setStrictness(Strictness.STRICT);
            JsonElement element = GSON.getAdapter(JsonElement.class).read(reader);
            if (!element.isJsonObject() || reader.peek() != JsonToken.END_DOCUMENT) {
                throw new IllegalArgumentException("not one JSON object");
            }
            json = element.getAsJsonObject();
        } catch (IOException | JsonParseException e) {
            throw new IllegalArgumentException("not a JSON object", e);
        }
        JsonElement list = require(json, "choices");
        if (!list.isJsonArray()) {
            throw new IllegalArgumentException("\"choices\" must be a list of texts");
        }
        JsonArray array = list.getAsJsonArray();
        List<String> choices = new ArrayList<>();
        for (int c = 0; c < array.size(); c++) {
            choices.add(text(array.get(c), "\"choices\"[" + c + "]"));
        }
        return new TaskItem(
                text(require(json, "task"), "\"task\""),
                text(require(json, "context"), "\"context\""),
                choices,
                number(require(json, "answer")));
    }

    private static JsonElement require(JsonObject json, String field) {
        JsonElement value = json.get(field);
        if (value == null || value.isJsonNull()) {
            throw new IllegalArgumentException("\"" + field + "\" is missing");
        }
        return value;
    }

    private static String text(JsonElement value, String field) {
        if (value instanceof JsonPrimitive primitive && primitive.isString()) {
            return primitive.getAsString();
        }
        throw new IllegalArgumentException(field + " must be a text, not " + value);
    }

    private static int number(JsonElement value) {
        if (value instanceof JsonPrimitive primitive && primitive.isNumber()) {
            double number = primitive.getAsDouble();
            if (number == Math.rint(number) && Math.abs(number) < Integer.MAX_VALUE) {
                return (int) number;
            }
        }
        throw new IllegalArgumentException("\"answer\" must be a whole number, not " + value);
    }

    /**
     * Writes a file that {@link #read} reads.
     *
     * @param file the file, replaced if it exists
     * @param items its items
     * @throws IOException if writing fails; then an old file is untouched
     */
    public static void write(Path file, List<TaskItem> items) throws IOException {
        AtomicFiles.write(
                file,
                out -> {
                    BufferedWriter writer =
                            new BufferedWriter(new OutputStreamWriter(out, StandardCharsets.UTF_8));
                    for (TaskItem item : items) {
                        writer.write(GSON.toJson(item));
                        writer.write('\n');
                    }
                    writer.flush();
                });
    }

    /**
     * Turns items into tokens. A question begins like a document: behind the end of another.
     *
     * @param items the items
     * @param tokenizer the model's tokenizer
     * @return a question an item
     */
    public static List<ChoiceQuestion> tokenize(
            List<TaskItem> items, ByteLevelTokenizer tokenizer) {
        List<ChoiceQuestion> questions = new ArrayList<>();
        for (TaskItem item : items) {
            int[] text = tokenizer.encode(item.context());
            int[] context = new int[text.length + 1];
            context[0] = tokenizer.endOfText();
            System.arraycopy(text, 0, context, 1, text.length);
            questions.add(
                    new ChoiceQuestion(
                            item.task(),
                            context,
                            item.choices().stream().map(tokenizer::encode).toList(),
                            item.answer()));
        }
        return questions;
    }
}
