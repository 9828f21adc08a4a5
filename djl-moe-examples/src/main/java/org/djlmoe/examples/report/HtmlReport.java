package org.djlmoe.examples.report;

import java.awt.AWTError;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import org.djlmoe.io.AtomicFiles;

/**
 * One HTML page that needs nothing but itself: texts, tables and charts, the pictures inside.
 *
 * <p>All text given here is plain text and is escaped. Each chart comes with its numbers as a
 * folded table. On a Java runtime that cannot draw (one without fonts, for instance) the tables are
 * open, and a line says why the pictures are missing. The page follows the reader's light or dark
 * setting.
 *
 * <p>Charts are drawn without a display: making a builder asks AWT for headless mode unless the
 * system property {@code java.awt.headless} is set already.
 */
public final class HtmlReport {
    /** Characters from which a cell is a sentence. */
    private static final int SENTENCE = 40;

    private static final int FULL_WIDTH = 940;
    private static final int HALF_WIDTH = 520;

    private final String title;
    private final List<Part> parts;
    private final Renderer renderer;

    private HtmlReport(Builder b) {
        title = b.title;
        parts = List.copyOf(b.parts);
        renderer = b.renderer;
    }

    /**
     * Starts a page.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Writes the page, in UTF-8, over what is there.
     *
     * @param file the HTML file; its directories are made
     * @throws IOException if it cannot be written
     */
    public void write(Path file) throws IOException {
        Path parent = file.toAbsolutePath().getParent();
        if (parent != null) {
            Files.createDirectories(parent);
        }
        AtomicFiles.writeString(file, toHtml());
    }

    /**
     * Draws the page.
     *
     * @return the whole document
     */
    public String toHtml() {
        StringBuilder html = new StringBuilder(1 << 16);
        html.append("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n")
                .append(
                        "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n")
                .append("<meta name=\"color-scheme\" content=\"light dark\">\n<title>")
                .append(escape(title))
                .append("</title>\n<style>\n")
                .append(CSS)
                .append("</style>\n</head>\n<body>\n<main>\n<h1>")
                .append(escape(title))
                .append("</h1>\n");
        Palette palette = new Palette();
        for (Part part : parts) {
            part.append(html, palette, renderer);
        }
        return html.append("</main>\n</body>\n</html>\n").toString();
    }

    static String escape(String text) {
        return text.replace("&", "&amp;")
                .replace("<", "&lt;")
                .replace(">", "&gt;")
                .replace("\"", "&quot;")
                .replace("'", "&#39;");
    }

    /** Makes a PNG; tests put a failing one in. */
    interface Renderer {
        byte[] png(ReportChart chart, int width, ChartRenderer.Theme theme, Palette palette);
    }

    private interface Part {
        void append(StringBuilder html, Palette palette, Renderer renderer);
    }

    private record Text(String tag, String text) implements Part {
        @Override
        public void append(StringBuilder html, Palette palette, Renderer renderer) {
            html.append("<%s>%s</%s>\n".formatted(tag, escape(text), tag));
        }
    }

    private record Table(ReportTable table) implements Part {
        @Override
        public void append(StringBuilder html, Palette palette, Renderer renderer) {
            html.append("<div class=\"card\">");
            appendTable(html, table);
            html.append("</div>\n");
        }
    }

    private record Row(List<ReportChart> charts) implements Part {
        @Override
        public void append(StringBuilder html, Palette palette, Renderer renderer) {
            html.append("<div class=\"row\">\n");
            for (ReportChart chart : charts) {
                appendFigure(
                        html,
                        chart,
                        charts.size() > 1 ? HALF_WIDTH : FULL_WIDTH,
                        palette,
                        renderer);
            }
            html.append("</div>\n");
        }
    }

    private static void appendFigure(
            StringBuilder html, ReportChart chart, int width, Palette palette, Renderer renderer) {
        html.append("<figure class=\"card\">\n<figcaption>")
                .append(escape(chart.title()))
                .append("</figcaption>\n");
        String failure = null;
        try {
            byte[] light = renderer.png(chart, width, ChartRenderer.Theme.LIGHT, palette);
            byte[] dark = renderer.png(chart, width, ChartRenderer.Theme.DARK, palette);
            appendLegend(html, chart, palette);
            html.append(
                            "<div class=\"scroll\"><picture><source media=\"(prefers-color-scheme: dark)\" srcset=\"")
                    .append(dataUri(dark))
                    .append("\"><img width=\"")
                    .append(width)
                    .append("\" style=\"min-width:")
                    .append(width * 3 / 5)
                    .append("px\" alt=\"")
                    .append(escape(chart.title()))
                    .append("\" src=\"")
                    .append(dataUri(light))
                    .append("\"></picture></div>\n");
        } catch (RuntimeException | LinkageError | InternalError | AWTError e) {
            // What AWT throws without fonts or its native part differs by runtime.
            failure = rootCause(e).toString();
        }
        if (failure != null) {
            html.append("<p class=\"note\">No picture: this Java runtime could not draw it (")
                    .append(escape(failure))
                    .append(
                            "). Drawing takes fonts: on a bare system fontconfig and one font are enough. The numbers:</p>\n");
        }
        html.append(failure != null ? "<details open>" : "<details>")
                .append("<summary>Numbers</summary>");
        appendTable(html, chart.table());
        html.append("</details>\n</figure>\n");
    }

    private static Throwable rootCause(Throwable e) {
        Throwable root = e;
        while (root.getCause() != null) {
            root = root.getCause();
        }
        return root;
    }

    private static void appendLegend(StringBuilder html, ReportChart chart, Palette palette) {
        if (chart instanceof ReportChart.HeatMap map) {
            html.append("<p class=\"legend\">0 <span class=\"scale\"></span> ")
                    .append(escape(ReportTable.text(map.max()) + " " + map.unit()))
                    .append("</p>\n");
            return;
        }
        html.append("<ul class=\"legend\">");
        for (String name : chart.seriesNames()) {
            html.append(
                    "<li><i style=\"background:%s\"></i>%s</li>"
                            .formatted(palette.css(name), escape(name)));
        }
        html.append("</ul>\n");
    }

    /** Sentences are broken into lines, so that the columns behind them stay in sight. */
    private static String cellOf(String text) {
        return text.length() > SENTENCE ? "<td class=\"w\">" : "<td>";
    }

    private static void appendTable(StringBuilder html, ReportTable table) {
        html.append("<div class=\"scroll\"><table>\n<thead><tr>");
        for (int c = 0; c < table.header().size(); c++) {
            int column = c;
            boolean number = table.rows().stream().anyMatch(r -> r.get(column) instanceof Number);
            html.append(number ? "<th class=\"n\">" : "<th>")
                    .append(escape(table.header().get(c)))
                    .append("</th>");
        }
        html.append("</tr></thead>\n<tbody>\n");
        for (List<?> row : table.rows()) {
            html.append("<tr>");
            for (Object cell : row) {
                String text = ReportTable.text(cell);
                html.append(cell instanceof Number ? "<td class=\"n\">" : cellOf(text))
                        .append(escape(text))
                        .append("</td>");
            }
            html.append("</tr>\n");
        }
        html.append("</tbody>\n</table></div>\n");
    }

    private static String dataUri(byte[] png) {
        return "data:image/png;base64," + Base64.getEncoder().encodeToString(png);
    }

    /** Parts of the page, in the order in which they are added. */
    public static final class Builder {

        private String title;
        private final List<Part> parts = new ArrayList<>();
        private Renderer renderer =
                (chart, width, theme, palette) ->
                        new ChartRenderer(palette).png(chart, width, theme);

        private Builder() {
            if (System.getProperty("java.awt.headless") == null) {
                System.setProperty("java.awt.headless", "true");
            }
        }

        /**
         * Sets the title.
         *
         * @param text plain text
         * @return this builder
         */
        public Builder setTitle(String text) {
            title = text;
            return this;
        }

        /**
         * Adds a heading.
         *
         * @param text plain text
         * @return this builder
         */
        public Builder addHeading(String text) {
            parts.add(new Text("h2", text));
            return this;
        }

        /**
         * Adds a paragraph.
         *
         * @param text plain text
         * @return this builder
         */
        public Builder addParagraph(String text) {
            parts.add(new Text("p", text));
            return this;
        }

        /**
         * Adds text whose line breaks and columns count, such as a plan that draws itself.
         *
         * @param text plain text
         * @return this builder
         */
        public Builder addPreformatted(String text) {
            parts.add(new Text("pre", text));
            return this;
        }

        /**
         * Adds a table.
         *
         * @param table the table
         * @return this builder
         */
        public Builder addTable(ReportTable table) {
            parts.add(new Table(table));
            return this;
        }

        /**
         * Adds a chart, or several side by side where the window is wide enough.
         *
         * @param charts at least one
         * @return this builder
         */
        public Builder addCharts(ReportChart... charts) {
            if (charts.length == 0) {
                throw new IllegalArgumentException("No chart to add");
            }
            parts.add(new Row(List.of(charts)));
            return this;
        }

        Builder renderer(Renderer other) {
            renderer = other;
            return this;
        }

        /**
         * Checks the page.
         *
         * @return the report
         */
        public HtmlReport build() {
            if (title == null || title.isBlank()) {
                throw new IllegalArgumentException("A report needs a title: call setTitle");
            }
            return new HtmlReport(this);
        }
    }

    private static final String CSS =
            """
            :root{color-scheme:light dark;--bg:#f6f7f9;--card:#fff;--ink:#1d2430;--soft:#5b6575;\
            --line:#e4e7ec;--low:#f1f4fa;--high:#173f8f}
            @media (prefers-color-scheme:dark){:root{--bg:#12151b;--card:#1b1f27;--ink:#e3e8f0;\
            --soft:#9aa4b4;--line:#333a46;--low:#232935;--high:#8fb4ff}}
            *{box-sizing:border-box}
            body{margin:0;background:var(--bg);color:var(--ink);\
            font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
            main{max-width:1040px;margin:0 auto;padding:40px 20px 64px}
            h1{font-size:1.9rem;line-height:1.2;margin:0 0 20px;letter-spacing:-.01em}
            h2{font-size:1.25rem;margin:40px 0 12px}
            p{max-width:72ch;margin:0 0 14px}
            pre{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px;\
            overflow-x:auto;font-size:.82rem;line-height:1.4}
            .card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:18px;\
            margin:0 0 18px;min-width:0}
            .row{display:grid;gap:18px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}
            figcaption{font-weight:600;margin-bottom:6px}
            img{display:block;max-width:100%;height:auto;margin:0 auto}
            .legend{display:flex;flex-wrap:wrap;align-items:center;gap:4px 18px;list-style:none;\
            margin:0 0 8px;padding:0;color:var(--soft);font-size:.88rem}
            p.legend{gap:8px}
            .legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:7px;\
            vertical-align:-1px}
            .scale{display:inline-block;width:140px;height:10px;border-radius:5px;\
            border:1px solid var(--line);background:linear-gradient(90deg,var(--low),var(--high))}
            .note{color:var(--soft);font-size:.9rem}
            details{margin-top:8px}
            summary{cursor:pointer;color:var(--soft);font-size:.88rem}
            .scroll{overflow-x:auto}
            table{border-collapse:collapse;width:100%;font-size:.9rem}
            th,td{text-align:left;padding:7px 12px;border-bottom:1px solid var(--line);white-space:nowrap}
            th{color:var(--soft);font-weight:600}
            .w{white-space:normal;min-width:28ch}
            .n{text-align:right;font-variant-numeric:tabular-nums}
            tbody tr:last-child td{border-bottom:0}
            """;
}
