package org.djlmoe.data;

import java.util.Arrays;

/**
 * An immutable list of documents as token ids, kept as one stream in which every document is
 * followed by the end-of-text id.
 *
 * <p>Memory: 4 bytes a token; {@link #pack} shares the stream and copies nothing. A corpus holds at
 * most 2^31 - 1 tokens: a larger one belongs in several corpora, or on disk.
 */
public final class TokenCorpus {
    // Keeps the division's draws apart from those that order the rows under the same seed.
    private static final long SPLIT = 0x73706c6974L;

    private final int[] stream;
    private final int length;
    // Document i is stream[starts[i] .. starts[i + 1] - 1), its end-of-text id the one after it.
    private final int[] starts;
    private final int documents;
    private final int endOfText;

    private TokenCorpus(int[] stream, int length, int[] starts, int documents, int endOfText) {
        this.stream = stream;
        this.length = length;
        this.starts = starts;
        this.documents = documents;
        this.endOfText = endOfText;
    }

    /**
     * Starts a corpus.
     *
     * @param endOfText the id put behind every document
     * @return an empty builder
     * @throws IllegalArgumentException if the id is negative
     */
    public static Builder builder(int endOfText) {
        return new Builder(endOfText);
    }

    /** Returns the number of documents. */
    public int documents() {
        return documents;
    }

    /** Returns the number of tokens, the end-of-text ids included. */
    public int tokens() {
        return length;
    }

    /** Returns the id that follows every document. */
    public int endOfText() {
        return endOfText;
    }

    /**
     * Returns a copy of one document, without its end-of-text id.
     *
     * @param index the document's place, in the order of adding
     * @throws IndexOutOfBoundsException if there is no such document
     */
    public int[] document(int index) {
        if (index < 0 || index >= documents) {
            throw new IndexOutOfBoundsException(
                    "document " + index + " of a corpus of " + documents);
        }
        return Arrays.copyOfRange(stream, starts[index], starts[index + 1] - 1);
    }

    /**
     * Divides the documents in three. Where a document goes is decided by the seed and its own
     * index alone, so the parts are disjoint and documents added later move none of the earlier
     * ones. The parts' sizes are therefore close to the shares, not equal to them.
     *
     * @param validation share of the validation part, 0 or more
     * @param test share of the test part, 0 or more; the rest is for training
     * @param seed decides the division
     * @return the parts, each in this corpus's order; a part may be empty
     * @throws IllegalArgumentException if a share is negative or nothing is left for training
     */
    public Split split(double validation, double test, long seed) {
        if (!(validation >= 0) || !(test >= 0) || !(validation + test < 1)) {
            throw new IllegalArgumentException(
                    "validation and test shares must be at least 0 and sum to less than 1, got "
                            + validation
                            + " and "
                            + test);
        }
        Builder train = builder(endOfText);
        Builder validationPart = builder(endOfText);
        Builder testPart = builder(endOfText);
        for (int i = 0; i < documents; ++i) {
            double draw = new SplitMix64(seed ^ SPLIT, i).nextDouble();
            Builder part =
                    draw < test ? testPart : draw < test + validation ? validationPart : train;
            part.append(stream, starts[i], starts[i + 1] - 1);
        }
        return new Split(train.build(), validationPart.build(), testPart.build());
    }

    /**
     * Cuts the stream into rows for training or evaluation.
     *
     * @param sequenceLength tokens a row predicts
     * @return the rows
     * @throws IllegalArgumentException if the length is not positive or the corpus is too short for
     *     one row
     */
    public PackedTokens pack(int sequenceLength) {
        return new PackedTokens(stream, length, sequenceLength);
    }

    @Override
    public String toString() {
        return "TokenCorpus[documents=" + documents + ", tokens=" + length + "]";
    }

    /**
     * The parts of a corpus; no document is in two of them.
     *
     * @param train documents to learn from
     * @param validation documents to choose settings by
     * @param test documents for the final figure
     */
    public record Split(TokenCorpus train, TokenCorpus validation, TokenCorpus test) {}

    /** Collects documents; one builder makes one corpus. */
    public static final class Builder {
        private final int endOfText;
        private int[] stream = new int[1024];
        private int length;
        private int[] starts = new int[64];
        private int documents;
        private boolean built;

        private Builder(int endOfText) {
            if (endOfText < 0) {
                throw new IllegalArgumentException(
                        "end-of-text id must not be negative, got " + endOfText);
            }
            this.endOfText = endOfText;
        }

        /**
         * Adds a document.
         *
         * @param document token ids, at least one, without the end-of-text id
         * @return this
         * @throws IllegalArgumentException if the document is empty or holds a negative id or the
         *     end-of-text id, or if the corpus would pass 2^31 - 1 tokens
         */
        public Builder add(int[] document) {
            if (document.length == 0) {
                throw new IllegalArgumentException(
                        "document " + documents + " has no tokens; leave empty documents out");
            }
            for (int i = 0; i < document.length; ++i) {
                int id = document[i];
                if (id < 0 || id == endOfText) {
                    throw new IllegalArgumentException(
                            "document "
                                    + documents
                                    + " has id "
                                    + id
                                    + " at position "
                                    + i
                                    + (id < 0
                                            ? "; ids must not be negative"
                                            : ", the end-of-text id, which the corpus adds itself"));
                }
            }
            return append(document, 0, document.length);
        }

        private Builder append(int[] source, int from, int to) {
            if (built) {
                throw new IllegalStateException("this builder has already built its corpus");
            }
            int size = to - from;
            long needed = (long) length + size + 1;
            if (needed > Integer.MAX_VALUE - 8) {
                throw new IllegalArgumentException(
                        "the corpus would pass 2^31 tokens at document "
                                + documents
                                + "; split it into several corpora");
            }
            if (needed > stream.length) {
                long larger = Math.max(needed, stream.length + (stream.length >> 1));
                stream = Arrays.copyOf(stream, (int) Math.min(larger, Integer.MAX_VALUE - 8));
            }
            if (documents + 1 == starts.length) {
                starts = Arrays.copyOf(starts, 2 * starts.length);
            }
            System.arraycopy(source, from, stream, length, size);
            stream[length + size] = endOfText;
            length += size + 1;
            starts[++documents] = length;
            return this;
        }

        /** Returns the corpus; the builder takes no more documents. */
        public TokenCorpus build() {
            if (built) {
                throw new IllegalStateException("this builder has already built its corpus");
            }
            built = true;
            return new TokenCorpus(stream, length, starts, documents, endOfText);
        }
    }
}
