package org.djlmoe.examples.report;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.awt.image.BufferedImage;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import javax.imageio.ImageIO;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class HtmlReportTest {

    private static final List<String> ARMS =
            List.of(
                    "base",
                    "control",
                    "random mask",
                    "most-frequent mask",
                    "MaskCoFT",
                    "cache prior",
                    "MaskCoFT + cache prior");

    /** One of each kind of chart. */
    private static HtmlReport.Builder page() {
        double[] loss = new double[200];
        double[] control = new double[200];
        for (int i = 0; i < loss.length; i++) {
            loss[i] = 1.3 + 2.5 * Math.exp(-i / 40.0) + 0.03 * Math.sin(i);
            control[i] = 1.25 + 2.4 * Math.exp(-i / 50.0) + 0.03 * Math.cos(i);
        }
        List<String> policies =
                List.of(
                        "lru",
                        "lfu",
                        "lfu_lifetime",
                        "fifo",
                        "random",
                        "discounted",
                        "static",
                        "belady");
        List<ReportChart.BarSeries> arms =
                ARMS.stream()
                        .map(
                                a ->
                                        new ReportChart.BarSeries(
                                                a,
                                                policies.stream()
                                                        .mapToDouble(
                                                                p ->
                                                                        2
                                                                                + Math.floorMod(
                                                                                                (a
                                                                                                                + p)
                                                                                                        .hashCode(),
                                                                                                200)
                                                                                        / 100.0)
                                                        .toArray()))
                        .toList();
        long[][] before = new long[4][64];
        long[][] after = new long[4][64];
        for (int l = 0; l < 4; l++) {
            for (int e = 0; e < 64; e++) {
                before[l][e] = 100 + (l * 37 + e * 61) % 90;
                after[l][e] = (l * 37 + e * 61) % 90 < 68 ? 160 : 12;
            }
        }
        return HtmlReport.builder()
                .setTitle("MaskCoFT: fewer expert loads at equal quality")
                .addParagraph("Loads per token are misses over all layers, divided by tokens.")
                .addTable(
                        new ReportTable(
                                List.of("arm", "perplexity", "loads/token"),
                                List.of(
                                        List.of("base", 4.466, 4.0),
                                        List.of("control", 3.675, 4.04),
                                        List.of("MaskCoFT", 3.7768123, 2.64))))
                .addHeading("Training")
                .addCharts(
                        new ReportChart.Lines(
                                "Loss by step",
                                "step",
                                "loss, nats per byte",
                                List.of(
                                        ReportChart.Line.overSteps("MaskCoFT", loss),
                                        ReportChart.Line.overSteps("control", control))))
                .addHeading("Serving")
                .addCharts(
                        new ReportChart.Bars(
                                "Loads by eviction policy, cache of 4 of 8",
                                "eviction policy",
                                "expert loads per token",
                                policies,
                                arms))
                .addCharts(ReportChart.HeatMap.usageBeforeAndAfter(before, after))
                .addHeading("Memory")
                .addCharts(
                        ReportChart.Bars.memory(
                                "Planned and measured peaks",
                                List.of("logits", "dispatch", "boundaries", "optimizer"),
                                new long[] {310L << 20, 120L << 20, 64L << 20, 512L << 20},
                                new long[] {301L << 20, 118L << 20, 64L << 20, 520L << 20}))
                .addPreformatted("layer 0  ##.##.##\nlayer 1  #.######");
    }

    @Test
    void write_page_isSelfContainedWithAnImageAChart(@TempDir Path dir) throws IOException {
        Path file = dir.resolve("a/b/report.html");
        page().build().write(file);
        String html = Files.readString(file, StandardCharsets.UTF_8);
        assertEquals(5, count(html, "<img "));
        assertEquals(5, count(html, "<figure"));
        for (String outside :
                List.of("http:", "https:", "//", "<script", "<link", "@import", "url(")) {
            assertFalse(withoutPictures(html).contains(outside), outside);
        }
        for (String uri : matches(html, "(?:src|srcset)=\"([^\"]*)\"")) {
            assertTrue(uri.startsWith("data:image/png;base64,"));
        }
        assertEquals(html, page().build().toHtml());
    }

    /** Each picture decodes, is drawn at twice the size it is shown at, and is no blank sheet. */
    @Test
    void toHtml_pictures_haveTwiceTheShownWidth() throws IOException {
        String html = page().build().toHtml();
        Matcher m =
                Pattern.compile("<img width=\"(\\d+)\"[^>]* src=\"data:image/png;base64,([^\"]*)\"")
                        .matcher(html);
        int images = 0;
        while (m.find()) {
            BufferedImage image =
                    ImageIO.read(new ByteArrayInputStream(Base64.getDecoder().decode(m.group(2))));
            assertEquals(2 * Integer.parseInt(m.group(1)), image.getWidth());
            long colours =
                    Arrays.stream(
                                    image.getRGB(
                                            0,
                                            0,
                                            image.getWidth(),
                                            image.getHeight(),
                                            null,
                                            0,
                                            image.getWidth()))
                            .distinct()
                            .count();
            assertTrue(colours > 4, colours + " colours");
            images++;
        }
        assertEquals(5, images);
    }

    @Test
    void toHtml_arm_hasOneColourInAllCharts() {
        String html = page().build().toHtml();
        List<String> colours = matches(html, "background:(#[0-9a-f]{6})\"></i>MaskCoFT</li>");
        assertEquals(2, colours.size());
        assertEquals(colours.get(0), colours.get(1));
        assertNotEquals(
                colours.get(0),
                matches(html, "background:(#[0-9a-f]{6})\"></i>control</li>").get(0));
    }

    @Test
    void toHtml_text_isEscaped() {
        String evil = "<b>&\"'x";
        String safe = "&lt;b&gt;&amp;&quot;&#39;x";
        String html =
                HtmlReport.builder()
                        .setTitle(evil)
                        .addHeading(evil)
                        .addParagraph(evil)
                        .addPreformatted(evil)
                        .addTable(new ReportTable(List.of(evil), List.of(List.of(evil))))
                        .addCharts(
                                new ReportChart.Lines(
                                        evil,
                                        evil,
                                        evil,
                                        List.of(ReportChart.Line.overSteps(evil, 1, 2))))
                        .build()
                        .toHtml();
        assertFalse(html.contains("<b>"));
        // title twice, heading, paragraph, pre, table 2, caption, legend, alt, chart table 2
        assertEquals(12, count(html, safe));
    }

    @Test
    void toHtml_runtimeWithoutFonts_writesTablesAndSaysWhy() {
        for (Throwable cause :
                List.of(
                        new NullPointerException("fontconfig"),
                        new InternalError("no fonts <here>"),
                        new NoClassDefFoundError("sun.awt.X11FontManager"),
                        new InternalError(new IllegalStateException("no fontconfig")),
                        new UnsatisfiedLinkError("libfreetype"))) {
            String html =
                    page().renderer(
                                    (chart, width, theme, palette) -> {
                                        if (cause instanceof Error e) {
                                            throw e;
                                        }
                                        throw (RuntimeException) cause;
                                    })
                            .build()
                            .toHtml();
            assertEquals(0, count(html, "<img "));
            assertEquals(5, count(html, "<details open>"));
            assertEquals(5, count(html, "No picture: this Java runtime could not draw it"));
            Throwable root = cause.getCause() == null ? cause : cause.getCause();
            assertTrue(html.contains("(" + HtmlReport.escape(root.toString()) + ")"));
            assertTrue(html.contains("<td>lfu_lifetime</td>"));
        }
    }

    /** A diverged run is what a report is read for: its chart must neither fail nor hang. */
    @Test
    void toHtml_nonFiniteValues_areGaps() {
        double nan = Double.NaN;
        double inf = Double.POSITIVE_INFINITY;
        String html =
                HtmlReport.builder()
                        .setTitle("Diverged")
                        .addCharts(
                                new ReportChart.Lines(
                                        "a",
                                        "step",
                                        "loss",
                                        List.of(ReportChart.Line.overSteps("x", 3, inf, nan, 2))),
                                new ReportChart.Lines(
                                        "only one point",
                                        "step",
                                        "loss",
                                        List.of(ReportChart.Line.overSteps("x", 3))),
                                new ReportChart.Lines(
                                        "no point",
                                        "step",
                                        "loss",
                                        List.of(ReportChart.Line.overSteps("x", nan, nan))),
                                new ReportChart.Bars(
                                        "b",
                                        "arm",
                                        "loads",
                                        List.of("p", "q"),
                                        List.of(
                                                new ReportChart.BarSeries("x", nan, 1),
                                                new ReportChart.BarSeries("y", inf, nan))),
                                new ReportChart.HeatMap(
                                        "c", "layer", "expert", "%", new double[][] {{nan, 9}}, 4))
                        .build()
                        .toHtml();
        assertEquals(5, count(html, "<img "), matches(html, "(No picture[^<]*)").toString());
        assertTrue(html.contains("<td class=\"n\">not a number</td>"));
        assertTrue(html.contains("<td class=\"n\">infinite</td>"));
    }

    @Test
    void table_sentenceInACell_mayBreakIntoLinesAndNamesMayNot() {
        String sentence = "Loads under lfu_lifetime are at least 23.7 % below the base's";
        String html =
                HtmlReport.builder()
                        .setTitle("t")
                        .addTable(
                                new ReportTable(
                                        List.of("arm", "claim"),
                                        List.of(List.of("random mask", sentence))))
                        .build()
                        .toHtml();
        assertTrue(html.contains("<td>random mask</td><td class=\"w\">Loads under"), html);
    }

    @Test
    void table_longCurve_keepsFirstAndLastPoint() {
        double[] y = new double[1000];
        Arrays.setAll(y, i -> i);
        ReportTable table =
                new ReportChart.Lines(
                                "t", "step", "loss", List.of(ReportChart.Line.overSteps("x", y)))
                        .table();
        assertEquals(50, table.rows().size());
        assertEquals(List.of(1.0, 0.0), table.rows().get(0));
        assertEquals(List.of(1000.0, 999.0), table.rows().get(49));
    }

    @Test
    void text_numbers_areRoundedAndPlain() {
        assertEquals("3.7768", ReportTable.text(3.7768123));
        assertEquals("4", ReportTable.text(4.0));
        assertEquals("0.00012", ReportTable.text(0.00012));
        assertEquals("1.5E-7", ReportTable.text(1.5e-7));
        assertEquals("123460", ReportTable.text(123456.7));
        assertEquals("123456789", ReportTable.text(123456789L));
        assertEquals("-2.5", ReportTable.text(-2.5f));
    }

    @Test
    void usageBeforeAndAfter_shareOneScale() {
        ReportChart.HeatMap[] maps =
                ReportChart.HeatMap.usageBeforeAndAfter(
                        new long[][] {{1, 1}, {0, 0}}, new long[][] {{3, 1}, {1, 1}});
        assertEquals(75, maps[0].max());
        assertEquals(75, maps[1].max());
        assertEquals(25, maps[1].values()[0][1]);
        assertEquals(0, maps[0].values()[1][0]);
    }

    @Test
    void memory_largestAtLeastFourGib_isInGib() {
        ReportChart.Bars bars =
                ReportChart.Bars.memory("m", List.of("a"), new long[] {8L << 30}, new long[] {1});
        assertTrue(bars.yLabel().contains("GiB"));
        assertEquals(8.0, bars.series().get(0).values()[0]);
    }

    @Test
    void charts_badShapes_areRefused() {
        assertThrows(
                IllegalArgumentException.class,
                () -> new ReportChart.Lines("t", "x", "y", List.of()));
        assertThrows(
                IllegalArgumentException.class,
                () -> new ReportChart.Line("l", new double[2], new double[1]));
        assertThrows(
                IllegalArgumentException.class,
                () ->
                        new ReportChart.Bars(
                                "t",
                                "x",
                                "y",
                                List.of("a", "b"),
                                List.of(new ReportChart.BarSeries("s", 1))));
        assertThrows(
                IllegalArgumentException.class,
                () -> new ReportChart.HeatMap("t", "x", "y", "%", new double[][] {{1}, {1, 2}}, 1));
        assertThrows(
                IllegalArgumentException.class,
                () -> new ReportTable(List.of("a"), List.of(List.of(1, 2))));
        assertThrows(IllegalArgumentException.class, () -> HtmlReport.builder().build());
        assertThrows(IllegalArgumentException.class, () -> HtmlReport.builder().addCharts());
    }

    private static int count(String text, String part) {
        return text.split(Pattern.quote(part), -1).length - 1;
    }

    private static String withoutPictures(String html) {
        return html.replaceAll("data:image/png;base64,[A-Za-z0-9+/=]*", "");
    }

    private static List<String> matches(String text, String regex) {
        return Pattern.compile(regex).matcher(text).results().map(r -> r.group(1)).toList();
    }
}
