package org.djlmoe.examples.tasks;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashSet;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Locale;
import java.util.Random;
import java.util.Set;
import java.util.function.Function;
import java.util.stream.Collectors;
import org.djlmoe.examples.text.EuroparlCorpus.Document;
import org.djlmoe.examples.text.Language;

/**
 * Nine small tasks made of transcripts. The right answer is what the transcript says; the wrong
 * ones come from other transcripts of the same language, or are the right one spoilt.
 *
 * <table>
 * <caption>Tasks</caption>
 * <tr><th>name</th><th>choose</th><th>choices</th></tr>
 * <tr><td>next_word</td><td>the word that follows</td><td>4</td></tr>
 * <tr><td>missing_word</td><td>the word before a given continuation</td><td>4</td></tr>
 * <tr><td>next_sentence</td><td>the sentence that follows</td><td>4</td></tr>
 * <tr><td>sentence_order</td><td>the order of the next two sentences</td><td>2</td></tr>
 * <tr><td>word_order</td><td>the order of the next words</td><td>3</td></tr>
 * <tr><td>spelling</td><td>the spelling of the next word</td><td>3</td></tr>
 * <tr><td>casing</td><td>whether the next word begins with a capital</td><td>2</td></tr>
 * <tr><td>language</td><td>words of the language so far (any language)</td><td>4</td></tr>
 * <tr><td>title</td><td>the agenda item behind a speech</td><td>4</td></tr>
 * </table>
 *
 * <p>All documents are asked about before one is again. Everything is decided by the documents and
 * the seed. Contexts are short ({@value #CONTEXT} characters), for models of short memory.
 */
public final class TaskGenerator {

    /** Characters of a context, roughly. */
    static final int CONTEXT = 100;

    private static final int LONGEST_SENTENCE = 260;

    /** How often the documents are gone through for more questions. */
    private static final int PASSES = 30;

    /** The tasks in their order. */
    public static final List<String> TASKS =
            List.of(
                    "next_word",
                    "missing_word",
                    "next_sentence",
                    "sentence_order",
                    "word_order",
                    "spelling",
                    "casing",
                    "language",
                    "title");

    private final List<Document> all;
    private final List<Document> own;
    private final int items;
    private final long seed;

    /**
     * Prepares the tasks.
     *
     * @param documents held-out documents of all languages
     * @param language the language of all tasks but the one about languages
     * @param items questions a task at most; a task has fewer if there are not enough documents
     * @param seed decides everything random
     * @throws IllegalArgumentException if there are no 8 documents in the language
     */
    public TaskGenerator(List<Document> documents, Language language, int items, long seed) {
        if (items < 1) {
            throw new IllegalArgumentException("items is " + items + ": set 1 or more");
        }
        all = documents.stream().filter(d -> d.language() != Language.UNKNOWN).toList();
        own = all.stream().filter(d -> d.language() == language).toList();
        if (own.size() < 8) {
            throw new IllegalArgumentException(
                    "There are %d documents in %s: tasks take 8 or more"
                            .formatted(own.size(), language.label()));
        }
        this.items = items;
        this.seed = seed;
    }

    /**
     * Makes all tasks.
     *
     * @return the items, task by task
     */
    public List<TaskItem> generate() {
        List<TaskItem> made = new ArrayList<>();
        for (String task : TASKS) {
            made.addAll(generate(task));
        }
        return made;
    }

    private List<TaskItem> generate(String task) {
        Random random = new Random(31 * seed + task.hashCode());
        List<Document> order = new ArrayList<>(task.equals("language") ? all : own);
        List<TaskItem> made = new ArrayList<>();
        Set<String> asked = new HashSet<>();
        for (int pass = 0; pass < PASSES && made.size() < items; pass++) {
            Collections.shuffle(order, random);
            for (Document document : order) {
                Question question = made.size() == items ? null : question(task, document, random);
                if (question != null && asked.add(question.context + question.choices.get(0))) {
                    made.add(question.item(task, random));
                }
            }
        }
        return made;
    }

    private Question question(String task, Document document, Random random) {
        return switch (task) {
            case "next_word" -> nextWord(document, random);
            case "missing_word" -> missingWord(document, random);
            case "next_sentence" -> nextSentence(document, random);
            case "sentence_order" -> sentenceOrder(document, random);
            case "word_order" -> wordOrder(document, random);
            case "spelling" -> spelling(document, random);
            case "casing" -> casing(document, random);
            case "language" -> language(document, random);
            case "title" -> title(document, random);
            default -> throw new IllegalArgumentException("No task " + task);
        };
    }

    /** Choices with the right one first. */
    private record Question(String context, List<String> choices) {

        TaskItem item(String task, Random random) {
            List<String> shuffled = new ArrayList<>(choices);
            Collections.shuffle(shuffled, random);
            return new TaskItem(task, context, shuffled, shuffled.indexOf(choices.get(0)));
        }
    }

    private Question nextWord(Document document, Random random) {
        Place place = place(document, random, 1);
        if (place == null) {
            return null;
        }
        List<String> words = withOthers(place.words[0], random, 4, this::anyWord);
        return words == null ? null : new Question(place.context, spaced(words));
    }

    private Question missingWord(Document document, Random random) {
        Place place = place(document, random, 6);
        if (place == null) {
            return null;
        }
        String rest = " " + join(Arrays.copyOfRange(place.words, 1, 6));
        List<String> words = withOthers(place.words[0], random, 4, this::anyWord);
        return words == null
                ? null
                : new Question(
                        place.context, spaced(words).stream().map(word -> word + rest).toList());
    }

    private Question nextSentence(Document document, Random random) {
        String[] run = run(document, 2, random);
        if (run == null) {
            return null;
        }
        List<String> choices = withOthers(run[1], random, 4, r -> anySentence(document, r));
        return choices == null ? null : new Question(run[0], spaced(choices));
    }

    private Question sentenceOrder(Document document, Random random) {
        String[] run = run(document, 3, random);
        return run == null || run[1].equals(run[2])
                ? null
                : new Question(
                        run[0], List.of(" " + run[1] + " " + run[2], " " + run[2] + " " + run[1]));
    }

    private Question wordOrder(Document document, Random random) {
        Place place = place(document, random, 6);
        if (place == null) {
            return null;
        }
        String right = join(place.words);
        List<String> choices =
                withOthers(
                        right,
                        random,
                        3,
                        r -> {
                            List<String> words = new ArrayList<>(List.of(place.words));
                            Collections.shuffle(words, r);
                            return String.join(" ", words);
                        });
        return choices == null ? null : new Question(place.context, spaced(choices));
    }

    private Question spelling(Document document, Random random) {
        Place place = place(document, random, 1);
        if (place == null || place.words[0].length() < 5) {
            return null;
        }
        String word = place.words[0];
        List<String> choices =
                withOthers(
                        word,
                        random,
                        3,
                        r -> {
                            int i = 1 + r.nextInt(word.length() - 2);
                            char[] letters = word.toCharArray();
                            char letter = letters[i];
                            letters[i] = letters[i + 1];
                            letters[i + 1] = letter;
                            return new String(letters);
                        });
        return choices == null ? null : new Question(place.context, spaced(choices));
    }

    private Question casing(Document document, Random random) {
        Place place = place(document, random, 1);
        if (place == null || place.words[0].length() < 3) {
            return null;
        }
        String word = place.words[0];
        String first = word.substring(0, 1);
        // A letter whose other case is a single letter as well, in whatever script.
        String other =
                Character.isUpperCase(word.charAt(0))
                        ? first.toLowerCase(Locale.ROOT)
                        : first.toUpperCase(Locale.ROOT);
        return other.equals(first) || other.length() != 1
                ? null
                : new Question(place.context, List.of(" " + word, " " + other + word.substring(1)));
    }

    private Question language(Document document, Random random) {
        Place place = place(document, random, 0);
        List<String> choices = new ArrayList<>();
        Set<Language> taken = new LinkedHashSet<>();
        for (int attempt = 0; attempt < 200 && choices.size() < 4; attempt++) {
            Document other = all.get(random.nextInt(all.size()));
            boolean wanted =
                    choices.isEmpty()
                            ? other.language() == document.language()
                            : !taken.contains(other.language());
            if (wanted && other != document) {
                Place words = place(other, random, 5);
                if (words != null) {
                    taken.add(other.language());
                    choices.add(join(words.words));
                }
            }
        }
        return place == null || choices.size() < 4
                ? null
                : new Question(place.context, spaced(choices));
    }

    private Question title(Document document, Random random) {
        Place place = isTitle(document.title()) ? place(document, random, 0) : null;
        if (place == null) {
            return null;
        }
        List<String> choices =
                withOthers(
                        document.title(),
                        random,
                        4,
                        r -> {
                            String other = own.get(r.nextInt(own.size())).title();
                            return isTitle(other) ? other : null;
                        });
        return choices == null
                ? null
                : new Question(place.context, choices.stream().map(c -> "\n" + c).toList());
    }

    /** Some titles are whole speeches. */
    private static boolean isTitle(String title) {
        return title.length() >= 8 && title.length() <= 100;
    }

    /** A context that ends with a whole word, and what follows. */
    private record Place(String context, String[] words) {}

    /** Draws a place with that many plain words behind it, or null if the document has none. */
    private static Place place(Document document, Random random, int words) {
        String[] all = document.text().split("\\s+");
        for (int attempt = 0; attempt < 20; attempt++) {
            int at = 8 + random.nextInt(Math.max(1, all.length - 8));
            if (at + words > all.length) {
                continue;
            }
            String[] next = Arrays.copyOfRange(all, at, at + words);
            if (words == 0 || isWord(next[0])) {
                int from = at;
                int length = 0;
                while (from > 0 && length + all[from - 1].length() + 1 <= CONTEXT) {
                    length += all[--from].length() + 1;
                }
                return new Place(join(Arrays.copyOfRange(all, from, at)), next);
            }
        }
        return null;
    }

    private static boolean isWord(String word) {
        return word.length() > 1 && word.chars().allMatch(Character::isLetter);
    }

    /** Draws sentences of ordinary length that follow each other, or null if there are none. */
    private static String[] run(Document document, int count, Random random) {
        String[] parts = document.text().split("(?<=[.!?])\\s+");
        List<Integer> starts = new ArrayList<>();
        // The first and the last may be cut by the excerpt.
        for (int i = 1, length = 0; i < parts.length - 1; i++) {
            parts[i] = parts[i].replaceAll("\\s+", " ").strip();
            boolean ordinary = parts[i].length() >= 20 && parts[i].length() <= LONGEST_SENTENCE;
            length = ordinary ? length + 1 : 0;
            if (length >= count) {
                starts.add(i - count + 1);
            }
        }
        if (starts.isEmpty()) {
            return null;
        }
        int start = starts.get(random.nextInt(starts.size()));
        return Arrays.copyOfRange(parts, start, start + count);
    }

    private String anyWord(Random random) {
        Place place = place(own.get(random.nextInt(own.size())), random, 1);
        return place == null ? null : place.words[0];
    }

    private String anySentence(Document but, Random random) {
        Document other = own.get(random.nextInt(own.size()));
        String[] sentence = other == but ? null : run(other, 1, random);
        return sentence == null ? null : sentence[0];
    }

    /** The right text and distinct others, or null if they cannot be found. */
    private static List<String> withOthers(
            String right, Random random, int count, Function<Random, String> draw) {
        Set<String> texts = new LinkedHashSet<>(List.of(right));
        for (int attempt = 0; attempt < 50 && texts.size() < count; attempt++) {
            String other = draw.apply(random);
            if (other != null) {
                texts.add(other);
            }
        }
        return texts.size() < count ? null : List.copyOf(texts);
    }

    private static List<String> spaced(List<String> words) {
        return words.stream().map(word -> " " + word).collect(Collectors.toList());
    }

    private static String join(String[] words) {
        return String.join(" ", words);
    }
}
