package org.djlmoe.examples.cli;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.PrintWriter;
import java.io.StringWriter;
import org.junit.jupiter.api.Test;

class ProgressBarTest {
    private static final long SECOND = 1_000_000_000L;
    private static final String REDRAW = "\r\u001b[K";

    private final StringWriter out = new StringWriter();
    // Not 0: a clock may start anywhere, nanoTime even below 0.
    private long now = -3 * SECOND;

    @Test
    void advance_terminal_redrawsOneLineAtMostTenTimesASecond() {
        try (ProgressBar bar = bar(100).optTerminal(true).optUnit("tokens").build()) {
            for (int i = 0; i < 40; ++i) {
                now += SECOND / 20;
                bar.advance(1, 1000);
            }
        }

        String[] drawn = out.toString().split(REDRAW.replace("[", "\\["));
        // The first call, then every second one, then the end.
        assertEquals(21, drawn.length);
        assertEquals("train [--------------------] 1/100 1% 20.0k tokens/s 0:05 left", drawn[0]);
        assertEquals("train [#######-------------] 39/100 39% 20.0k tokens/s 0:03 left", drawn[19]);
        assertEquals("train 40/100 stopped after 0:02, 20.0k tokens/s\n", drawn[20]);
    }

    @Test
    void advance_noTerminal_printsALineEveryTenSecondsWithoutControlCharacters() {
        try (ProgressBar bar = bar(10).build()) {
            bar.note("loss 3.21");
            for (int i = 0; i < 10; ++i) {
                now += 4 * SECOND;
                bar.advance(1);
            }
        }

        assertEquals(
                """
                train 3/10 30% 0.25 items/s 0:28 left loss 3.21
                train 6/10 60% 0.25 items/s 0:16 left loss 3.21
                train 9/10 90% 0.25 items/s 0:04 left loss 3.21
                train 10/10 in 0:40, 0.25 items/s, loss 3.21
                """,
                out.toString());
    }

    @Test
    void advance_quiet_printsNothing() {
        try (ProgressBar bar = bar(10).optTerminal(true).optQuiet(true).build()) {
            now += 60 * SECOND;
            bar.advance(10);
        }
        assertEquals("", out.toString());
    }

    @Test
    void advance_resumedRun_countsOnlyItsOwnItemsInTheRate() {
        try (ProgressBar bar = bar(100).optInitial(50).build()) {
            now += 10 * SECOND;
            bar.advance(10);
        }
        assertTrue(
                out.toString().startsWith("train 60/100 60% 1.00 items/s 0:40 left\n"),
                out::toString);
    }

    @Test
    void line_longNote_neverWraps() {
        ProgressBar bar = bar(10).optTerminal(true).build();
        bar.note("x".repeat(200));

        assertEquals(79, out.toString().length());
    }

    @Test
    void close_twiceOrWithoutWork_printsOneLine() {
        ProgressBar bar = bar(0).optTerminal(true).build();
        bar.close();
        bar.close();
        bar.advance(1);

        assertEquals("train 0/0 in 0:00\n", out.toString());
    }

    @Test
    void duration_hours_areShown() {
        ProgressBar bar = bar(10_000_000).build();
        now += 4000 * SECOND;
        bar.advance(8_000_000);

        assertEquals("train 8000000/10000000 80% 2000 items/s 16:40 left\n", out.toString());
        now += 4000 * SECOND;
        bar.advance(2_000_000);
        bar.close();
        assertTrue(out.toString().endsWith("in 2:13:20, 1250 items/s\n"), out::toString);
    }

    @Test
    void builder_impossibleNumbers_throws() {
        assertThrows(IllegalArgumentException.class, () -> ProgressBar.builder("a", -1));
        assertThrows(IllegalArgumentException.class, () -> bar(5).optInitial(6));
    }

    private ProgressBar.Builder bar(long total) {
        return ProgressBar.builder("train", total)
                .optOut(new PrintWriter(out))
                .optTerminal(false)
                .optNanoClock(() -> now);
    }
}
