package org.djlmoe.plan;

import java.util.Locale;

/** How sizes are written for people: in MB of 2^20 bytes. */
final class Megabytes {

    static final long MB = 1L << 20;

    private Megabytes() {}

    /** Whole megabytes; one decimal below 10, since small parts would all read 0. */
    static String of(long bytes) {
        double value = (double) bytes / MB;
        return String.format(Locale.ROOT, Math.abs(value) < 9.95 ? "%.1f" : "%,.0f", value);
    }
}
