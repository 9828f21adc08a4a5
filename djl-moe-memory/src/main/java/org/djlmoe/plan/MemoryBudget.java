package org.djlmoe.plan;

import java.math.BigDecimal;
import java.math.RoundingMode;
import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * How much memory a run may hold at its peak, all of the process.
 *
 * @param bytes the limit, positive
 */
public record MemoryBudget(long bytes) {

    private static final Pattern TEXT =
            Pattern.compile("(\\d+(?:\\.\\d+)?)\\s*(?:([kmgt])(?:i?b)?|b)?");

    /** Checks that there is something to spend. */
    public MemoryBudget {
        if (bytes < 1) {
            throw new IllegalArgumentException("A memory budget must be positive, not " + bytes);
        }
    }

    /**
     * Reads a budget such as {@code 900m}, {@code 2g}, {@code 1500MB}, {@code 1.5 GiB} or a number
     * of bytes. Units are powers of 1024, as for {@code -Xmx}; case does not matter.
     *
     * @param text the text
     * @return the budget
     * @throws IllegalArgumentException if the text is no such amount
     */
    public static MemoryBudget parse(String text) {
        if (text == null) {
            throw new IllegalArgumentException("The memory budget is missing: say 900m or 2g");
        }
        Matcher matcher = TEXT.matcher(text.trim().toLowerCase(Locale.ROOT));
        if (!matcher.matches()) {
            throw new IllegalArgumentException(
                    "\""
                            + text
                            + "\" is no memory budget: say 900m, 2g, 1500MB or a number of bytes");
        }
        int power = matcher.group(2) == null ? 0 : 1 + "kmgt".indexOf(matcher.group(2));
        BigDecimal bytes =
                new BigDecimal(matcher.group(1))
                        .multiply(BigDecimal.valueOf(1024).pow(power))
                        .setScale(0, RoundingMode.DOWN);
        if (bytes.signum() == 0 || bytes.toBigInteger().bitLength() > 63) {
            throw new IllegalArgumentException(
                    "The memory budget \"" + text + "\" must be at least a byte and below 2^63");
        }
        return new MemoryBudget(bytes.longValueExact());
    }

    @Override
    public String toString() {
        return Megabytes.of(bytes) + " MB";
    }
}
