package org.djlmoe.examples.tasks;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import org.djlmoe.examples.text.EuroparlCorpus.Document;
import org.djlmoe.examples.text.Language;
import org.djlmoe.examples.text.TextData;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;

class TaskGeneratorTest {

    private static List<Document> documents;

    @BeforeAll
    static void load() throws IOException {
        documents = TextData.documents(TextData.Part.TEST);
    }

    private static List<TaskItem> items(int count, long seed) {
        return new TaskGenerator(documents, Language.GERMAN, count, seed).generate();
    }

    @Test
    void generate_testDocuments_nineTasksOfAtLeastAHundred() {
        Map<String, Long> counts =
                items(120, 42).stream()
                        .collect(Collectors.groupingBy(TaskItem::task, Collectors.counting()));
        assertEquals(Set.copyOf(TaskGenerator.TASKS), counts.keySet());
        assertEquals(9, counts.size());
        counts.forEach((task, n) -> assertTrue(n >= 100 && n <= 120, task + " has " + n));
    }

    @Test
    void generate_sameSeed_sameItems() {
        assertEquals(items(20, 1), items(20, 1));
        assertNotEquals(items(20, 1), items(20, 2));
    }

    @Test
    void generate_items_choicesAreDistinctAndAnswersSpread() {
        Set<Integer> answers = new HashSet<>();
        for (TaskItem item : items(20, 3)) {
            assertEquals(item.choices().size(), Set.copyOf(item.choices()).size(), "" + item);
            answers.add(item.answer());
        }
        assertEquals(Set.of(0, 1, 2, 3), answers);
    }

    /** What the transcript says is the answer. */
    @Test
    void generate_nextWordAndSentence_followInATranscript() {
        List<String> texts =
                documents.stream()
                        .map(d -> d.text().replaceAll("\\s+", " "))
                        .collect(Collectors.toList());
        for (TaskItem item : items(15, 4)) {
            if (List.of(
                            "next_word",
                            "missing_word",
                            "next_sentence",
                            "sentence_order",
                            "word_order",
                            "spelling",
                            "casing")
                    .contains(item.task())) {
                String whole = item.context() + item.choices().get(item.answer());
                assertTrue(texts.stream().anyMatch(t -> t.contains(whole)), "" + item);
            }
        }
    }

    @Test
    void constructor_tooFewDocuments_refused() {
        assertThrows(
                IllegalArgumentException.class,
                () -> new TaskGenerator(documents.subList(0, 5), Language.GERMAN, 10, 1));
        assertThrows(
                IllegalArgumentException.class,
                () -> new TaskGenerator(documents, Language.GERMAN, 0, 1));
    }
}
