package org.djlmoe.examples.cli;

import java.io.PrintWriter;
import java.util.Locale;
import java.util.function.LongSupplier;

/**
 * Shows how far a long command is: label, done of total, percent, rate and time left.
 *
 * <p>On a terminal one line is redrawn, at most ten times a second; elsewhere, as in a log file, a
 * line is printed every ten seconds. {@link #close} leaves one final line either way. The rate is
 * the mean since the start, so the time left does not jump.
 *
 * <pre>{@code
 * try (ProgressBar bar = options.progress("train", steps).optUnit("tokens").build()) {
 *     for (int step = 0; step < steps; ++step) {
 *         ...
 *         bar.advance(1, tokensOfStep);
 *     }
 * }
 * }</pre>
 *
 * <p>For one thread.
 */
public final class ProgressBar implements AutoCloseable {
    private static final long REDRAW_NANOS = 100_000_000L;
    private static final long LINE_NANOS = 10_000_000_000L;
    private static final int BAR = 20;
    // A line that wraps could not be redrawn.
    private static final int MAX_WIDTH = 79;

    private final PrintWriter out;
    private final LongSupplier nanoClock;
    private final boolean terminal;
    private final boolean quiet;
    private final String label;
    private final long total;
    private final String unit;
    private final long start;
    private final long initial;
    private long done;
    private long units;
    private String note = "";
    private long lastShown;
    private boolean shown;
    private boolean closed;

    private ProgressBar(Builder builder) {
        out = builder.out;
        nanoClock = builder.nanoClock;
        terminal = builder.terminal;
        quiet = builder.quiet;
        label = builder.label;
        total = builder.total;
        unit = builder.unit;
        initial = builder.initial;
        done = initial;
        start = nanoClock.getAsLong();
        lastShown = start;
    }

    /**
     * Starts a builder.
     *
     * @param label what is going on, a word or two
     * @param total number of items to do
     */
    public static Builder builder(String label, long total) {
        return new Builder(label, total);
    }

    /**
     * Counts items done; each is one unit of the rate.
     *
     * @param items number of items
     */
    public void advance(long items) {
        advance(items, items);
    }

    /**
     * Counts items done.
     *
     * @param items number of items, of which the total speaks
     * @param unitsDone what they amount to in the rate's unit
     */
    public void advance(long items, long unitsDone) {
        done += items;
        units += unitsDone;
        show();
    }

    /**
     * Sets a remark behind the figures, such as the current loss.
     *
     * @param text a few words, or the empty string
     */
    public void note(String text) {
        note = text;
        show();
    }

    /** Prints the final line; it says if not everything was done. Further calls do nothing. */
    @Override
    public void close() {
        if (closed) {
            return;
        }
        closed = true;
        if (quiet) {
            return;
        }
        long nanos = nanoClock.getAsLong() - start;
        String end = done < total ? "stopped after " : "in ";
        StringBuilder line = new StringBuilder();
        line.append(label).append(' ').append(done).append('/').append(total).append(' ');
        line.append(end).append(duration(nanos));
        if (nanos > 0 && units > 0) {
            line.append(", ").append(rate(nanos));
        }
        if (!note.isEmpty()) {
            line.append(", ").append(note);
        }
        clearLine();
        out.println(line);
        out.flush();
    }

    private void show() {
        if (quiet || closed) {
            return;
        }
        long now = nanoClock.getAsLong();
        long pause = terminal ? REDRAW_NANOS : LINE_NANOS;
        // The terminal's first line comes at once, so that the user sees something happen.
        if (now - lastShown < pause && (shown || !terminal)) {
            return;
        }
        lastShown = now;
        String line = line(now - start);
        if (terminal) {
            clearLine();
            out.print(line.length() > MAX_WIDTH ? line.substring(0, MAX_WIDTH) : line);
        } else {
            out.println(line);
        }
        out.flush();
        shown = true;
    }

    private void clearLine() {
        if (terminal && shown) {
            out.print("\r\u001b[K");
        }
    }

    private String line(long nanos) {
        double share = total == 0 ? 1 : Math.min(1, (double) done / total);
        StringBuilder line = new StringBuilder(label);
        if (terminal) {
            int full = (int) (share * BAR);
            line.append(" [").append("#".repeat(full)).append("-".repeat(BAR - full)).append(']');
        }
        line.append(' ').append(done).append('/').append(total);
        line.append(' ').append((int) (share * 100)).append('%');
        if (nanos > 0 && units > 0) {
            line.append(' ').append(rate(nanos));
        }
        if (done > initial && done < total) {
            double perItem = (double) nanos / (done - initial);
            line.append(' ').append(duration((long) (perItem * (total - done)))).append(" left");
        }
        if (!note.isEmpty()) {
            line.append(' ').append(note);
        }
        return line.toString();
    }

    private String rate(long nanos) {
        double perSecond = units / (nanos / 1e9);
        String number;
        if (perSecond >= 1e6) {
            number = String.format(Locale.ROOT, "%.1fM", perSecond / 1e6);
        } else if (perSecond >= 1e4) {
            number = String.format(Locale.ROOT, "%.1fk", perSecond / 1e3);
        } else if (perSecond >= 100) {
            number = String.format(Locale.ROOT, "%.0f", perSecond);
        } else {
            number = String.format(Locale.ROOT, "%.2f", perSecond);
        }
        return number + " " + unit + "/s";
    }

    private static String duration(long nanos) {
        long seconds = Math.round(nanos / 1e9);
        if (seconds >= 3600) {
            return String.format(
                    Locale.ROOT, "%d:%02d:%02d", seconds / 3600, seconds / 60 % 60, seconds % 60);
        }
        return String.format(Locale.ROOT, "%d:%02d", seconds / 60, seconds % 60);
    }

    /** Settings of a bar. */
    public static final class Builder {
        private final String label;
        private final long total;
        private String unit = "items";
        private long initial;
        private boolean quiet;
        private PrintWriter out = new PrintWriter(System.err, true);
        private LongSupplier nanoClock = System::nanoTime;
        // Java cannot ask whether stderr is a terminal; the launcher can, and passes it on.
        private boolean terminal = Boolean.getBoolean("moe.terminal");

        private Builder(String label, long total) {
            if (total < 0) {
                throw new IllegalArgumentException("total must not be negative, got " + total);
            }
            this.label = label;
            this.total = total;
        }

        /** Sets what the rate counts, in the plural; {@code items} by default. */
        public Builder optUnit(String unit) {
            this.unit = unit;
            return this;
        }

        /** Sets the items done by an earlier run, which the rate must not count; 0 by default. */
        public Builder optInitial(long initial) {
            if (initial < 0 || initial > total) {
                throw new IllegalArgumentException(
                        "initial must be in [0, " + total + "], got " + initial);
            }
            this.initial = initial;
            return this;
        }

        /** Sets whether nothing is to be shown; false by default. */
        public Builder optQuiet(boolean quiet) {
            this.quiet = quiet;
            return this;
        }

        Builder optOut(PrintWriter out) {
            this.out = out;
            return this;
        }

        Builder optTerminal(boolean terminal) {
            this.terminal = terminal;
            return this;
        }

        Builder optNanoClock(LongSupplier nanoClock) {
            this.nanoClock = nanoClock;
            return this;
        }

        /** Starts the bar, and its clock. */
        public ProgressBar build() {
            return new ProgressBar(this);
        }
    }
}
