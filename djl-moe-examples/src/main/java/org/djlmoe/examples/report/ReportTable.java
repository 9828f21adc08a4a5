package org.djlmoe.examples.report;

import java.math.BigDecimal;
import java.math.MathContext;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Objects;

/**
 * A table as data.
 *
 * @param header plain text
 * @param rows as many cells as the header; numbers are aligned and rounded to five digits, all else
 *     is plain text. A cell is not null
 */
public record ReportTable(List<String> header, List<List<?>> rows) {

    /** Copies and checks. */
    public ReportTable {
        header = List.copyOf(header);
        List<List<?>> copy = new ArrayList<>();
        for (List<?> row : rows) {
            if (row.size() != header.size()) {
                throw new IllegalArgumentException(
                        "A row of %d cells under %d headings: %s"
                                .formatted(row.size(), header.size(), row));
            }
            row.forEach(c -> Objects.requireNonNull(c, "A table cell is null"));
            copy.add(List.copyOf(row));
        }
        rows = Collections.unmodifiableList(copy);
    }

    /** Writes a cell as text. */
    static String text(Object cell) {
        if (cell instanceof Double || cell instanceof Float) {
            double v = ((Number) cell).doubleValue();
            if (!Double.isFinite(v)) {
                return Double.isNaN(v) ? "not a number" : v > 0 ? "infinite" : "-infinite";
            }
            if (v == Math.rint(v) && Math.abs(v) < 1e15) {
                return String.valueOf((long) v);
            }
            BigDecimal rounded = new BigDecimal(v).round(new MathContext(5));
            boolean plain = Math.abs(v) >= 1e-4 && Math.abs(v) < 1e15;
            return plain
                    ? rounded.stripTrailingZeros().toPlainString()
                    : rounded.stripTrailingZeros().toString();
        }
        return String.valueOf(cell);
    }
}
