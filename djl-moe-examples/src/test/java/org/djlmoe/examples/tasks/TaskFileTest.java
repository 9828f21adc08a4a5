package org.djlmoe.examples.tasks;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.training.ChoiceQuestion;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

class TaskFileTest {

    private static final String GOOD =
            "{\"task\": \"t\", \"context\": \"a\", \"choices\": [\"b\", \"c\"], \"answer\": 1}";

    @TempDir Path folder;

    private Path file(String... lines) throws IOException {
        return Files.write(folder.resolve("tasks.jsonl"), List.of(lines));
    }

    @Test
    void write_items_readAsTheyWere() throws IOException {
        List<TaskItem> items =
                List.of(
                        new TaskItem("one", "Ein <b>\"Wort\"</b>\nund", List.of(" ä", " 中"), 1),
                        new TaskItem("two", "", List.of("x", "y", "z"), 0));
        Path file = folder.resolve("new.jsonl");
        TaskFile.write(file, items);
        assertEquals(items, TaskFile.read(file));
        assertEquals(2, Files.readAllLines(file).size());
    }

    @Test
    void read_blankLinesAndFurtherFields_passedOver() throws IOException {
        String more = GOOD.replace("{", "{\"source\": {\"x\": 1}, ");
        assertEquals(2, TaskFile.read(file("", GOOD, "  ", more)).size());
        assertThrows(IllegalArgumentException.class, () -> TaskFile.read(file("", " ")));
    }

    @ParameterizedTest
    @CsvSource(
            delimiter = '|',
            quoteCharacter = '\0',
            value = {
                "{                                                             | not a JSON object",
                "[1]                                                           | not one JSON object",
                "{\"task\": \"t\"}                                             | \"choices\" is missing",
                "{\"choices\": \"x\"}                                          | \"choices\" must be a list",
                "{\"choices\": [\"a\", 2]}                                     | \"choices\"[1] must be a text, not 2",
                "{\"choices\": [\"a\", \"b\"], \"context\": \"\", \"answer\": 0} | \"task\" is missing",
                "{\"choices\": [\"a\", \"b\"], \"task\": \"t\", \"answer\": 0} | \"context\" is missing",
                "{\"choices\": [\"a\", \"b\"], \"task\": 3, \"context\": \"\"} | \"task\" must be a text, not 3",
                "{\"choices\": [\"a\"], \"task\": \"t\", \"context\": \"\", \"answer\": 0} | \"choices\" must list two",
                "{\"choices\": [\"a\", \"\"], \"task\": \"t\", \"context\": \"\", \"answer\": 0} | \"choices\"[1] is missing or empty",
                "{\"choices\": [\"a\", \"b\"], \"task\": \"t\", \"context\": \"\", \"answer\": 2} | \"answer\" is 2",
                "{\"choices\": [\"a\", \"b\"], \"task\": \"t\", \"context\": \"\", \"answer\": 0.5} | \"answer\" must be a whole number, not 0.5",
                "{\"choices\": [\"a\", \"b\"], \"task\": \"t\", \"context\": \"\", \"answer\": \"0\"} | \"answer\" must be a whole number"
            })
    void read_brokenLine_namesFileLineAndField(String line, String problem) throws IOException {
        Path file = file(GOOD, "", line.strip());
        String message =
                assertThrows(IllegalArgumentException.class, () -> TaskFile.read(file))
                        .getMessage();
        assertTrue(message.startsWith(file + ", line 3: " + problem.strip()), message);
    }

    @Test
    void read_bytesThatAreNoUtf8_namesTheFile() throws IOException {
        Path file = Files.write(folder.resolve("latin1"), new byte[] {'"', (byte) 0xe4, '"'});
        String message =
                assertThrows(IllegalArgumentException.class, () -> TaskFile.read(file))
                        .getMessage();
        assertEquals(file + " is not text in UTF-8", message);
    }

    @Test
    void tokenize_items_beginBehindTheEndOfAText() throws IOException {
        try (ByteLevelTokenizer tokenizer = new ByteLevelTokenizer()) {
            ChoiceQuestion question =
                    TaskFile.tokenize(
                                    List.of(new TaskItem("t", "ab", List.of(" ä", "c"), 1)),
                                    tokenizer)
                            .get(0);
            assertArrayEquals(new int[] {256, 'a', 'b'}, question.context());
            assertArrayEquals(new int[] {' ', 0xc3, 0xa4}, question.choices().get(0));
            assertEquals(1, question.answer());
        }
    }
}
