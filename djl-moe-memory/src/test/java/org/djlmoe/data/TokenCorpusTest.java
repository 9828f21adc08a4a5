package org.djlmoe.data;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.ArrayList;
import java.util.List;
import java.util.stream.IntStream;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.function.Executable;

class TokenCorpusTest {
    private static final int END = 100;

    @Test
    void pack_documents_joinsThemWithEndOfText() {
        TokenCorpus corpus =
                TokenCorpus.builder(END).add(new int[] {1, 2, 3}).add(new int[] {4}).build();

        assertEquals(2, corpus.documents());
        assertEquals(6, corpus.tokens());
        assertArrayEquals(new int[] {4}, corpus.document(1));
        assertArrayEquals(new int[] {1, 2, 3, END, 4, END}, corpus.pack(5).row(0));
    }

    @Test
    void add_documentArrayChangedLater_corpusUnchanged() {
        int[] document = {1, 2};
        TokenCorpus corpus = TokenCorpus.builder(END).add(document).build();
        document[0] = 9;
        corpus.document(0)[1] = 9;

        assertArrayEquals(new int[] {1, 2}, corpus.document(0));
    }

    @Test
    void add_unusableDocument_namesDocumentAndPlace() {
        TokenCorpus.Builder builder = TokenCorpus.builder(END).add(new int[] {1});

        assertMessage(() -> builder.add(new int[0]), "document 1 has no tokens");
        assertMessage(() -> builder.add(new int[] {5, -3}), "id -3 at position 1");
        assertMessage(() -> builder.add(new int[] {END}), "end-of-text id");
        assertMessage(() -> TokenCorpus.builder(-1), "end-of-text id must not be negative");
        // A refused document leaves nothing behind.
        assertEquals(2, builder.build().tokens());
    }

    @Test
    void builder_usedAfterBuild_throws() {
        TokenCorpus.Builder builder = TokenCorpus.builder(END).add(new int[] {1});
        builder.build();

        assertThrows(IllegalStateException.class, () -> builder.add(new int[] {2}));
        assertThrows(IllegalStateException.class, builder::build);
    }

    @Test
    void document_indexOutside_throws() {
        TokenCorpus corpus = TokenCorpus.builder(END).add(new int[] {1}).build();

        assertThrows(IndexOutOfBoundsException.class, () -> corpus.document(1));
        assertThrows(IndexOutOfBoundsException.class, () -> corpus.document(-1));
    }

    @Property(tries = 50)
    void split_anySeed_partsAreDisjointAndComplete(
            @ForAll long seed, @ForAll @IntRange(min = 0, max = 300) int documents) {
        TokenCorpus.Split split = numbered(documents).split(0.2, 0.1, seed);

        List<Integer> all = new ArrayList<>();
        for (TokenCorpus part : List.of(split.train(), split.validation(), split.test())) {
            List<Integer> ids = ids(part);
            assertEquals(ids.stream().sorted().toList(), ids);
            all.addAll(ids);
        }
        assertEquals(
                IntStream.range(0, documents).boxed().toList(), all.stream().sorted().toList());
    }

    @Test
    void split_manyDocuments_sharesAreClose() {
        TokenCorpus.Split split = numbered(20_000).split(0.2, 0.1, 7);

        // Four standard deviations.
        assertEquals(4000, split.validation().documents(), 230);
        assertEquals(2000, split.test().documents(), 170);
    }

    @Test
    void split_sameSeedAndMoreDocuments_keepsEarlierPlaces() {
        List<Integer> few = ids(numbered(500).split(0.2, 0.1, 3).validation());
        List<Integer> many = ids(numbered(900).split(0.2, 0.1, 3).validation());

        assertEquals(few, many.stream().filter(id -> id < 500).toList());
        assertNotEquals(few, ids(numbered(500).split(0.2, 0.1, 4).validation()));
    }

    @Test
    void split_zeroShares_everythingTrains() {
        TokenCorpus.Split split = numbered(50).split(0, 0, 1);

        assertEquals(50, split.train().documents());
        assertEquals(0, split.test().documents());
        assertMessage(() -> split.test().pack(4), "too few tokens for one row: there are 0");
    }

    @Test
    void split_sharesThatLeaveNothing_throws() {
        TokenCorpus corpus = numbered(5);

        assertMessage(() -> corpus.split(0.5, 0.5, 1), "sum to less than 1");
        assertMessage(() -> corpus.split(-0.1, 0.5, 1), "at least 0");
        assertMessage(() -> corpus.split(Double.NaN, 0.5, 1), "at least 0");
    }

    private static TokenCorpus numbered(int documents) {
        TokenCorpus.Builder builder = TokenCorpus.builder(1_000_000);
        for (int i = 0; i < documents; ++i) {
            builder.add(new int[] {i, i});
        }
        return builder.build();
    }

    private static List<Integer> ids(TokenCorpus corpus) {
        return IntStream.range(0, corpus.documents())
                .map(i -> corpus.document(i)[0])
                .boxed()
                .toList();
    }

    static void assertMessage(Executable action, String part) {
        String message = assertThrows(IllegalArgumentException.class, action).getMessage();
        assertTrue(message.contains(part), message);
    }
}
