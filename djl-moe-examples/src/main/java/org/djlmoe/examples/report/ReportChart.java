package org.djlmoe.examples.report;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.stream.IntStream;
import java.util.stream.Stream;

/**
 * A chart as data: what is drawn, and the table that says the same in numbers.
 *
 * <p>Axis labels name the unit. A series of the same name has the same colour in all charts of a
 * report, so that an arm is told by its colour.
 */
public sealed interface ReportChart {

    /**
     * Returns the title.
     *
     * @return plain text
     */
    String title();

    /**
     * Returns the names that take a colour.
     *
     * @return the series in their order, empty where colour means a value
     */
    List<String> seriesNames();

    /**
     * Returns the numbers behind the chart.
     *
     * @return the table
     */
    ReportTable table();

    /**
     * Curves, for instance losses over steps.
     *
     * @param title plain text
     * @param xLabel the x axis and its unit
     * @param yLabel the y axis and its unit
     * @param lines at least one
     */
    record Lines(String title, String xLabel, String yLabel, List<Line> lines)
            implements ReportChart {

        /** How many rows the table of a long curve has. */
        private static final int MAX_ROWS = 50;

        /** Copies and checks. */
        public Lines {
            lines = List.copyOf(lines);
            require(!lines.isEmpty(), title, "needs a line");
        }

        @Override
        public List<String> seriesNames() {
            return lines.stream().map(Line::name).toList();
        }

        /** Evenly spaced points, the first and the last among them; one column a line. */
        @Override
        public ReportTable table() {
            double[] xs =
                    lines.stream()
                            .flatMapToDouble(l -> Arrays.stream(l.x))
                            .sorted()
                            .distinct()
                            .toArray();
            int rows = Math.min(MAX_ROWS, xs.length);
            List<String> header = new ArrayList<>(List.of(xLabel));
            header.addAll(seriesNames());
            List<List<?>> body = new ArrayList<>();
            for (int r = 0; r < rows; r++) {
                double x = xs[rows == 1 ? 0 : (int) ((long) r * (xs.length - 1) / (rows - 1))];
                List<Object> row = new ArrayList<>(List.of(x));
                for (Line l : lines) {
                    row.add(
                            IntStream.range(0, l.x.length)
                                    .filter(i -> l.x[i] == x)
                                    .mapToObj(i -> (Object) l.y[i])
                                    .findFirst()
                                    .orElse(""));
                }
                body.add(row);
            }
            return new ReportTable(header, body);
        }
    }

    /**
     * One curve. A y that is not finite is a gap.
     *
     * @param name the series
     * @param x finite
     * @param y as many
     */
    record Line(String name, double[] x, double[] y) {

        /** Copies and checks. */
        public Line {
            x = x.clone();
            y = y.clone();
            require(
                    x.length > 0 && x.length == y.length,
                    name,
                    "needs as many x as y, at least one");
            require(
                    Arrays.stream(x).allMatch(Double::isFinite),
                    name,
                    "has an x that is not finite");
        }

        /**
         * A curve over 1, 2, 3 and so on.
         *
         * @param name the series
         * @param y a value a step
         * @return the line
         */
        public static Line overSteps(String name, double... y) {
            return new Line(name, IntStream.rangeClosed(1, y.length).asDoubleStream().toArray(), y);
        }

        @Override
        public double[] x() {
            return x.clone();
        }

        @Override
        public double[] y() {
            return y.clone();
        }
    }

    /**
     * Bars side by side, for instance loads per token by policy (groups) and arm (series).
     *
     * @param title plain text
     * @param xLabel what the groups are
     * @param yLabel the y axis and its unit
     * @param groups the group names
     * @param series at least one, each with a value a group
     */
    record Bars(
            String title, String xLabel, String yLabel, List<String> groups, List<BarSeries> series)
            implements ReportChart {

        /** Copies and checks. */
        public Bars {
            groups = List.copyOf(groups);
            series = List.copyOf(series);
            require(!groups.isEmpty() && !series.isEmpty(), title, "needs a group and a series");
            for (BarSeries s : series) {
                require(
                        s.values.length == groups.size(),
                        title,
                        "needs a value a group in series '" + s.name + "'");
            }
        }

        /**
         * Planned beside measured memory, in MiB or, from 4 GiB on, in GiB.
         *
         * @param title plain text
         * @param components what the memory is for
         * @param planned bytes a component
         * @param measured bytes a component
         * @return the bars
         */
        public static Bars memory(
                String title, List<String> components, long[] planned, long[] measured) {
            long largest =
                    Math.max(
                            Arrays.stream(planned).max().orElse(0),
                            Arrays.stream(measured).max().orElse(0));
            boolean gib = largest >= 4L << 30;
            double unit = gib ? 1L << 30 : 1L << 20;
            return new Bars(
                    title,
                    "component",
                    "peak memory, " + (gib ? "GiB" : "MiB"),
                    components,
                    List.of(
                            new BarSeries("planned", inUnits(planned, unit)),
                            new BarSeries("measured", inUnits(measured, unit))));
        }

        /** To a tenth: what the bars are labelled with. */
        private static double[] inUnits(long[] bytes, double unit) {
            return Arrays.stream(bytes)
                    .mapToDouble(b -> Math.round(10 * b / unit) / 10.0)
                    .toArray();
        }

        @Override
        public List<String> seriesNames() {
            return series.stream().map(BarSeries::name).toList();
        }

        @Override
        public ReportTable table() {
            List<String> header = new ArrayList<>(List.of(xLabel));
            header.addAll(seriesNames());
            List<List<?>> rows = new ArrayList<>();
            for (int g = 0; g < groups.size(); g++) {
                List<Object> row = new ArrayList<>(List.of(groups.get(g)));
                for (BarSeries s : series) {
                    row.add(s.values[g]);
                }
                rows.add(row);
            }
            return new ReportTable(header, rows);
        }
    }

    /**
     * One bar a group.
     *
     * @param name the series
     * @param values a value a group; one that is not finite has no bar
     */
    record BarSeries(String name, double... values) {

        /** Copies. */
        public BarSeries {
            values = values.clone();
        }

        @Override
        public double[] values() {
            return values.clone();
        }
    }

    /**
     * A value a cell, for instance the usage of each expert (columns) in each layer (rows).
     *
     * @param title plain text
     * @param rowLabel what the rows are, row 0 on top
     * @param columnLabel what the columns are
     * @param unit of the values
     * @param values [rows, columns], at least 0; one that is not finite is drawn as 0
     * @param max the value of the strongest colour, above 0: charts to be compared share it
     */
    record HeatMap(
            String title,
            String rowLabel,
            String columnLabel,
            String unit,
            double[][] values,
            double max)
            implements ReportChart {

        /** Copies and checks. */
        public HeatMap {
            values = Arrays.stream(values).map(double[]::clone).toArray(double[][]::new);
            require(values.length > 0 && values[0].length > 0, title, "needs a cell");
            for (double[] row : values) {
                require(row.length == values[0].length, title, "has rows of unequal length");
            }
            require(max > 0 && Double.isFinite(max), title, "needs a finite max above 0");
        }

        /**
         * The share of selections that each expert of a layer got, in percent.
         *
         * @param title plain text
         * @param usage how often an expert was selected, [layers, experts]
         * @param max the percentage of the strongest colour
         * @return the chart
         */
        public static HeatMap usage(String title, long[][] usage, double max) {
            return new HeatMap(title, "layer", "expert", "% of selections", percent(usage), max);
        }

        /**
         * The usage before and after, on one colour scale that ends at the largest share of both.
         *
         * @param before how often an expert was selected, [layers, experts]
         * @param after the same later
         * @return two charts, for {@link HtmlReport.Builder#addCharts}
         */
        public static HeatMap[] usageBeforeAndAfter(long[][] before, long[][] after) {
            double max =
                    Stream.of(percent(before), percent(after))
                            .flatMap(Arrays::stream)
                            .flatMapToDouble(Arrays::stream)
                            .max()
                            .orElse(0);
            double scale = max > 0 ? Math.ceil(max) : 100;
            return new HeatMap[] {
                usage("Expert usage before", before, scale),
                usage("Expert usage after", after, scale)
            };
        }

        private static double[][] percent(long[][] usage) {
            double[][] percent = new double[usage.length][];
            for (int l = 0; l < usage.length; l++) {
                double sum = Math.max(1, Arrays.stream(usage[l]).sum());
                percent[l] = Arrays.stream(usage[l]).mapToDouble(u -> 100 * u / sum).toArray();
            }
            return percent;
        }

        @Override
        public List<String> seriesNames() {
            return List.of();
        }

        @Override
        public double[][] values() {
            return Arrays.stream(values).map(double[]::clone).toArray(double[][]::new);
        }

        @Override
        public ReportTable table() {
            List<String> header = new ArrayList<>(List.of(rowLabel + " / " + columnLabel));
            IntStream.range(0, values[0].length).mapToObj(String::valueOf).forEach(header::add);
            List<List<?>> rows = new ArrayList<>();
            for (int r = 0; r < values.length; r++) {
                List<Object> row = new ArrayList<>(List.of(r));
                Arrays.stream(values[r]).forEach(row::add);
                rows.add(row);
            }
            return new ReportTable(header, rows);
        }
    }

    private static void require(boolean holds, String name, String what) {
        if (!holds) {
            throw new IllegalArgumentException("Chart '" + name + "' " + what);
        }
    }
}
