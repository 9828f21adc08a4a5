package org.djlmoe.serving;

import java.util.ArrayList;
import java.util.List;
import java.util.function.Function;

/**
 * Turns tokens into text as they come.
 *
 * <p>A letter may be cut over several tokens, and a token's text may depend on the one before: new
 * text is the difference between decodings of a few tokens with and without the newest, and waits
 * while it ends in U+FFFD. What may become a stop string waits too.
 */
final class TextStream {

    private static final char UNFINISHED = '\uFFFD';

    /** No letter is cut over more tokens; what is unfinished longer is broken for good. */
    private static final int LONGEST_LETTER = 4;

    private final Function<int[], String> detokenizer;
    private final List<String> stops;
    private final List<Integer> ids = new ArrayList<>();
    private final StringBuilder text = new StringBuilder();
    private int context;
    private int decoded;
    private int emitted;
    private boolean stopped;

    TextStream(Function<int[], String> detokenizer, List<String> stops) {
        this.detokenizer = detokenizer;
        this.stops = stops;
    }

    /** Takes a token; returns the text that is certain now. */
    String add(int id) {
        ids.add(id);
        decode(false);
        return emit(false);
    }

    /** Returns the rest of the text. */
    String finish() {
        decode(true);
        return emit(true);
    }

    /** Whether a stop string has come. */
    boolean isStopped() {
        return stopped;
    }

    /** All text handed out so far. */
    String text() {
        return text.substring(0, emitted);
    }

    private void decode(boolean last) {
        String before = detokenizer.apply(range(context, decoded));
        String now = detokenizer.apply(range(context, ids.size()));
        boolean unfinished = !now.isEmpty() && now.charAt(now.length() - 1) == UNFINISHED;
        if (unfinished && !last && ids.size() - decoded < LONGEST_LETTER) {
            return;
        }
        if (now.length() > before.length()) {
            text.append(now, before.length(), now.length());
        }
        context = decoded;
        decoded = ids.size();
    }

    private int[] range(int from, int to) {
        return ids.subList(from, to).stream().mapToInt(Integer::intValue).toArray();
    }

    private String emit(boolean last) {
        int end = text.length();
        for (String stop : stops) {
            int at = text.indexOf(stop, emitted);
            if (at >= 0 && at <= end) {
                end = at;
                stopped = true;
            }
        }
        if (stopped) {
            text.setLength(end);
        } else if (!last) {
            end -= pending();
        }
        String piece = text.substring(emitted, end);
        emitted = end;
        return piece;
    }

    /** How much of the end could be the beginning of a stop string. */
    private int pending() {
        int longest = 0;
        for (String stop : stops) {
            for (int n = Math.min(stop.length() - 1, text.length() - emitted); n > longest; n--) {
                if (text.substring(text.length() - n).equals(stop.substring(0, n))) {
                    longest = n;
                }
            }
        }
        return longest;
    }
}
