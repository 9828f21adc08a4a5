package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.nio.charset.StandardCharsets;
import java.util.List;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.junit.jupiter.api.Test;

class TextStreamTest {

    /** A token a byte. */
    private static String decode(int[] ids) {
        byte[] bytes = new byte[ids.length];
        for (int i = 0; i < ids.length; i++) {
            bytes[i] = (byte) ids[i];
        }
        return new String(bytes, StandardCharsets.UTF_8);
    }

    private static TextStream stream(String... stops) {
        return new TextStream(TextStreamTest::decode, List.of(stops));
    }

    private static String feed(TextStream stream, String text) {
        StringBuilder out = new StringBuilder();
        for (byte b : text.getBytes(StandardCharsets.UTF_8)) {
            if (!stream.isStopped()) {
                String piece = stream.add(b & 0xff);
                assertFalse(piece.contains("\uFFFD"), piece);
                out.append(piece);
            }
        }
        return out.toString();
    }

    @Property(tries = 300)
    void add_anyText_comesBackWhole(@ForAll String text) {
        // Lone surrogates have no bytes.
        String valid =
                new String(text.getBytes(StandardCharsets.UTF_8), StandardCharsets.UTF_8)
                        .replace("\uFFFD", "?");
        TextStream stream = stream();
        String out = feed(stream, valid) + stream.finish();
        assertEquals(valid, out);
        assertEquals(valid, stream.text());
    }

    @Property(tries = 300)
    void add_stopString_textUpToItWhereverItIsAndNoPieceOfItBefore(
            @ForAll @IntRange(max = 12) int before,
            @ForAll @IntRange(min = 1, max = 6) int length) {
        String stop = "abacab".substring(0, length);
        String prefix = "xaxabxabaxab".substring(0, before);
        int at = (prefix + stop).indexOf(stop);
        TextStream stream = stream(stop);
        String out = feed(stream, prefix + stop + "rest");
        assertTrue(stream.isStopped());
        assertEquals((prefix + stop).substring(0, at), out);
        assertEquals(out, stream.text());
    }

    @Test
    void add_letterOfSeveralTokens_waitsForTheLast() {
        TextStream stream = stream();
        byte[] euro = "€".getBytes(StandardCharsets.UTF_8);
        assertEquals("", stream.add(euro[0] & 0xff));
        assertEquals("", stream.add(euro[1] & 0xff));
        assertEquals("€", stream.add(euro[2] & 0xff));
    }

    @Test
    void add_brokenLetter_replacedAndTheTextGoesOn() {
        TextStream stream = stream();
        StringBuilder out = new StringBuilder();
        out.append(stream.add(0xe2));
        for (char c : "abcdef".toCharArray()) {
            out.append(stream.add(c));
        }
        out.append(stream.finish());
        assertEquals("\uFFFDabcdef", out.toString());
        TextStream endless = stream();
        out.setLength(0);
        for (int i = 0; i < 8; i++) {
            out.append(endless.add(0x80));
        }
        assertTrue(out.length() >= 4, "nothing came of 8 broken bytes");
    }

    @Test
    void finish_beginningOfAStopString_isText() {
        TextStream stream = stream("STOP");
        assertEquals("go ", feed(stream, "go STO"));
        assertEquals("STO", stream.finish());
        assertFalse(stream.isStopped());
    }

    @Test
    void add_twoStopStrings_theEarlierOneEnds() {
        TextStream stream = stream("later", "soon");
        assertEquals("a ", feed(stream, "a soon later"));
    }
}
