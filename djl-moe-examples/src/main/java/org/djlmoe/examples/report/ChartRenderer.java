package org.djlmoe.examples.report;

import java.awt.BasicStroke;
import java.awt.Color;
import java.awt.Font;
import java.awt.Graphics2D;
import java.awt.RenderingHints;
import java.awt.image.BufferedImage;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.math.BigDecimal;
import java.math.MathContext;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.stream.IntStream;
import javax.imageio.ImageIO;
import org.knowm.xchart.CategoryChart;
import org.knowm.xchart.CategoryChartBuilder;
import org.knowm.xchart.CategorySeries;
import org.knowm.xchart.HeatMapChart;
import org.knowm.xchart.HeatMapChartBuilder;
import org.knowm.xchart.XYChart;
import org.knowm.xchart.XYChartBuilder;
import org.knowm.xchart.XYSeries;
import org.knowm.xchart.internal.chartpart.Chart;
import org.knowm.xchart.style.AxesChartStyler;
import org.knowm.xchart.style.markers.SeriesMarkers;

/**
 * Draws charts with XChart, as PNG at twice the given size so that they stay sharp on dense
 * screens.
 *
 * <p>Legend and title are the page's own text, not part of the picture: they wrap, scale and can be
 * read aloud. Needs no display, but fonts: a Java runtime without any fails here.
 */
final class ChartRenderer {

    private static final int SCALE = 2;
    private static final int MAX_LABELLED_BARS = 16;

    private final Palette palette;

    ChartRenderer(Palette palette) {
        this.palette = palette;
    }

    /** Colours of paper and ink. */
    enum Theme {
        LIGHT(0xffffff, 0x3a4250, 0xe4e7ec, 0xf1f4fa, 0x173f8f),
        DARK(0x1b1f27, 0xc3cad6, 0x333a46, 0x232935, 0x8fb4ff);

        final Color paper;
        final Color ink;
        final Color grid;
        final Color low;
        final Color high;

        Theme(int paper, int ink, int grid, int low, int high) {
            this.paper = new Color(paper);
            this.ink = new Color(ink);
            this.grid = new Color(grid);
            this.low = new Color(low);
            this.high = new Color(high);
        }
    }

    /**
     * Draws a chart.
     *
     * @param chart the data
     * @param width in CSS pixels
     * @param theme the colours
     * @return a PNG of twice the width
     */
    byte[] png(ReportChart chart, int width, Theme theme) {
        Chart<?, ?> drawn;
        if (chart instanceof ReportChart.Lines lines) {
            drawn = lines(lines, width, theme);
        } else if (chart instanceof ReportChart.Bars bars) {
            drawn = bars(bars, width, theme);
        } else if (chart instanceof ReportChart.HeatMap map) {
            drawn = heatMap(map, width, theme);
        } else {
            throw new IllegalArgumentException("No drawing for " + chart.getClass());
        }
        int height = drawn.getHeight();
        BufferedImage image =
                new BufferedImage(SCALE * width, SCALE * height, BufferedImage.TYPE_INT_RGB);
        Graphics2D g = image.createGraphics();
        try {
            g.setRenderingHint(
                    RenderingHints.KEY_TEXT_ANTIALIASING, RenderingHints.VALUE_TEXT_ANTIALIAS_ON);
            g.setRenderingHint(
                    RenderingHints.KEY_FRACTIONALMETRICS,
                    RenderingHints.VALUE_FRACTIONALMETRICS_ON);
            g.scale(SCALE, SCALE);
            drawn.paint(g, width, height);
        } finally {
            g.dispose();
        }
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        try {
            ImageIO.write(image, "png", out);
        } catch (IOException e) {
            throw new UncheckedIOException("Cannot encode chart '" + chart.title() + "'", e);
        }
        return out.toByteArray();
    }

    private XYChart lines(ReportChart.Lines data, int width, Theme theme) {
        XYChart chart =
                new XYChartBuilder()
                        .width(width)
                        .height(height(width))
                        .xAxisTitle(data.xLabel())
                        .yAxisTitle(data.yLabel())
                        .build();
        style(chart.getStyler(), theme);
        chart.getStyler().setXAxisTickMarkSpacingHint(90);
        for (int i = 0; i < data.lines().size(); i++) {
            ReportChart.Line line = data.lines().get(i);
            double[] x = splitFirstStep(line.x(), false);
            double[] y = splitFirstStep(line.y(), true);
            XYSeries series = chart.addSeries(i + " " + line.name(), x, y);
            Color color = palette.color(line.name());
            series.setLineColor(color);
            series.setLineStyle(stroke(palette.dashed(line.name())));
            series.setMarkerColor(color);
            series.setMarker(x.length == 1 ? SeriesMarkers.CIRCLE : SeriesMarkers.NONE);
        }
        return chart;
    }

    /**
     * Puts a point in the middle of the first step, where it changes nothing to see.
     *
     * <p>XChart labels evenly spaced points themselves (1, 8, 15); others get round numbers.
     */
    private static double[] splitFirstStep(double[] v, boolean gaps) {
        double[] split = new double[v.length < 2 ? v.length : v.length + 1];
        for (int i = 0, at = 0; i < v.length; i++) {
            if (i == 1) {
                split[at++] = v[0] / 2 + v[1] / 2;
            }
            split[at++] = v[i];
        }
        // XChart leaves NaN out and cannot scale an axis to infinity.
        return gaps
                ? Arrays.stream(split).map(y -> Double.isFinite(y) ? y : Double.NaN).toArray()
                : split;
    }

    private CategoryChart bars(ReportChart.Bars data, int width, Theme theme) {
        CategoryChart chart =
                new CategoryChartBuilder()
                        .width(width)
                        .height(height(width))
                        .xAxisTitle(data.xLabel())
                        .yAxisTitle(data.yLabel())
                        .build();
        style(chart.getStyler(), theme);
        int groups = data.groups().size();
        int bars = groups * data.series().size();
        chart.getStyler()
                .setAvailableSpaceFill(groups == 1 ? 0.5 : 0.8)
                .setOverlapped(false)
                .setLabelsFont(font(11))
                .setLabelsPosition(0.94);
        double largest = 0;
        double smallest = Double.POSITIVE_INFINITY;
        for (int i = 0; i < data.series().size(); i++) {
            ReportChart.BarSeries bar = data.series().get(i);
            List<Double> values = new ArrayList<>();
            for (double v : bar.values()) {
                largest = Double.isFinite(v) ? Math.max(largest, v) : largest;
                smallest = Math.min(smallest, Double.isNaN(v) ? 0 : v);
                // XChart leaves a null out.
                values.add(Double.isFinite(v) ? threeDigits(v) : null);
            }
            CategorySeries series = chart.addSeries(i + " " + bar.name(), data.groups(), values);
            series.setFillColor(palette.color(bar.name()));
        }
        boolean negative =
                data.series().stream()
                        .flatMapToDouble(b -> Arrays.stream(b.values()))
                        .anyMatch(v -> v < 0);
        if (!negative) {
            chart.getStyler().setYAxisMin(0.0);
            chart.getStyler().setYAxisMax(largest > 0 ? 1.08 * largest : 1);
        }
        // The value stands inside its bar's end, so every bar must be high enough.
        chart.getStyler().setLabelsVisible(bars <= MAX_LABELLED_BARS && smallest > largest / 10);
        if (longestLabel(data.groups()) * groups * 8 > width - 80) {
            chart.getStyler().setXAxisLabelRotation(30);
        }
        return chart;
    }

    private HeatMapChart heatMap(ReportChart.HeatMap data, int width, Theme theme) {
        double[][] values = data.values();
        int rows = values.length;
        int columns = values[0].length;
        HeatMapChart chart =
                new HeatMapChartBuilder()
                        .width(width)
                        .height(Math.min(640, 90 + Math.max(18, 200 / rows) * rows))
                        .xAxisTitle(data.columnLabel())
                        .yAxisTitle(data.rowLabel())
                        .build();
        style(chart.getStyler(), theme);
        chart.getStyler()
                .setRangeColors(new Color[] {theme.low, theme.high})
                .setMin(0)
                .setMax(data.max())
                .setDrawBorder(false);
        chart.getStyler().setPlotGridLinesVisible(false);
        chart.getStyler().setPlotContentSize(1.0);
        List<Number[]> cells = new ArrayList<>();
        for (int r = 0; r < rows; r++) {
            for (int c = 0; c < columns; c++) {
                double v = Double.isFinite(values[r][c]) ? Math.min(values[r][c], data.max()) : 0;
                // XChart counts rows from below.
                cells.add(new Number[] {c, rows - 1 - r, v});
            }
        }
        chart.addSeries(data.title(), labels(columns), reversed(labels(rows)), cells);
        return chart;
    }

    /** What a bar is labelled with has to fit on it; the table has all digits. */
    private static double threeDigits(double value) {
        return new BigDecimal(value).round(new MathContext(3)).doubleValue();
    }

    /** At most 12 labels, at multiples of a power of two; the others are blank and distinct. */
    private static List<String> labels(int n) {
        int step = 1;
        while (n > 12 * step) {
            step *= 2;
        }
        int every = step;
        return IntStream.range(0, n)
                .mapToObj(i -> i % every == 0 ? String.valueOf(i) : " ".repeat(i))
                .toList();
    }

    private static List<String> reversed(List<String> list) {
        List<String> copy = new ArrayList<>(list);
        Collections.reverse(copy);
        return copy;
    }

    private static void style(AxesChartStyler styler, Theme theme) {
        styler.setAxisTitleFont(font(13))
                .setAxisTickLabelsFont(font(12))
                .setAxisTickLabelsColor(theme.ink)
                .setAxisTickMarksColor(theme.grid)
                .setAxisTicksLineVisible(false)
                .setPlotGridLinesColor(theme.grid)
                .setPlotGridLinesStroke(new BasicStroke(1f))
                .setPlotGridVerticalLinesVisible(false)
                .setPlotTicksMarksVisible(false)
                .setAxisTitlePadding(8)
                .setLocale(Locale.ROOT);
        styler.setXAxisTitleColor(theme.ink)
                .setYAxisTitleColor(theme.ink)
                .setChartTitleVisible(false)
                .setLegendVisible(false)
                .setChartBackgroundColor(theme.paper)
                .setPlotBackgroundColor(theme.paper)
                .setChartFontColor(theme.ink)
                .setPlotBorderVisible(false)
                .setChartPadding(8)
                .setAntiAlias(true);
    }

    private static BasicStroke stroke(boolean dashed) {
        return new BasicStroke(
                2.2f,
                BasicStroke.CAP_ROUND,
                BasicStroke.JOIN_ROUND,
                10f,
                dashed ? new float[] {7f, 6f} : null,
                0f);
    }

    private static Font font(int size) {
        return new Font(Font.SANS_SERIF, Font.PLAIN, size);
    }

    private static int height(int width) {
        return Math.max(280, width * 9 / 20);
    }

    private static int longestLabel(List<String> labels) {
        return labels.stream().mapToInt(String::length).max().orElse(0);
    }
}
