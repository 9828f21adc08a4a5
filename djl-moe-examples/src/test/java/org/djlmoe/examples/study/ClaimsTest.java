package org.djlmoe.examples.study;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.examples.study.Figures.Load;
import org.djlmoe.examples.study.Figures.Point;
import org.djlmoe.examples.study.Figures.Series;
import org.djlmoe.examples.study.Figures.Unit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

class ClaimsTest {

    private static final StudySettings SETTINGS = StudySettings.of(true, 1, 5, 20);

    @TempDir Path folder;

    private static Point point(double beta, double loads, double perplexity) {
        List<Load> all = new ArrayList<>();
        for (int cache : SETTINGS.caches()) {
            for (EvictionPolicy.Type policy : EvictionPolicy.Type.values()) {
                all.add(new Load(cache, policy.jsonName(), loads));
            }
        }
        return new Point(beta, false, 0, perplexity, loads, perplexity, all);
    }

    private static Series series(Arm arm, Point... points) {
        return new Series(arm, List.of(points), 0, true, points[0], List.of());
    }

    private static Unit unit(long seed, int kept, Series... series) {
        String name = series[0].arm() + "-" + seed;
        return new Unit(name, "some", kept, seed, null, List.of(series));
    }

    /** Loads 3 to 2 in the second point; the perplexity is the control's 4 and something. */
    private static List<Unit> units(double above, double chosenLoads) {
        return units(above, chosenLoads, 5);
    }

    private static List<Unit> units(double above, double chosenLoads, int seeds) {
        List<Unit> units = new ArrayList<>();
        units.add(unit(1, 0, series(Arm.BASE, point(0, 3, 5))));
        for (long seed = 1; seed <= seeds; seed++) {
            units.add(unit(seed, 0, series(Arm.CONTROL, point(0, 3.1, 4))));
            units.add(
                    unit(
                            seed,
                            SETTINGS.kept(),
                            series(
                                    Arm.MASKCOFT,
                                    point(1, chosenLoads, 4 + above),
                                    point(2, 2, 4.2 + above))));
            units.add(
                    unit(
                            seed,
                            SETTINGS.kept(),
                            series(Arm.RANDOM, point(1, 3, 4.1), point(2, 2, 4.5))));
        }
        return units;
    }

    private static String verdict(List<Unit> units, String start) {
        return verdict(SETTINGS, units, start);
    }

    private static String verdict(StudySettings settings, List<Unit> units, String start) {
        List<Claims.Claim> found =
                Claims.of(settings, new Results(units, List.of())).stream()
                        .filter(c -> c.claim().startsWith(start))
                        .toList();
        assertEquals(1, found.size(), start);
        return found.get(0).verdict();
    }

    @Test
    void of_figuresThatBearThemOut_yes() {
        List<Unit> units = units(0.02, 2.2);
        assertEquals("yes", verdict(units, "Loads under lfu_lifetime are at least 23.7 %"));
        assertEquals("yes", verdict(units, "Perplexity is at most 1 %"));
        assertEquals(
                "yes",
                verdict(
                        units,
                        "At equal loads the learned mask has less perplexity than the random"));
        assertEquals(
                "yes", verdict(units, "At equal perplexity the learned mask loads at least 5"));
    }

    @Test
    void of_twoSeeds_claimsAboutFiveAreNotMeasured() {
        StudySettings two = StudySettings.of(true, 1, 2, 20);
        List<Unit> units = units(0.02, 2.2, 2);
        assertEquals(
                "not measured",
                verdict(
                        two,
                        units,
                        "At equal loads the learned mask has less perplexity than the random"));
        assertEquals(
                "yes",
                verdict(two, units, "At equal perplexity the learned mask loads at least 5"));
    }

    @Test
    void of_figuresThatDoNot_no() {
        List<Unit> units = units(0.5, 2.4);
        assertEquals("no", verdict(units, "Loads under lfu_lifetime are at least 23.7 %"));
        assertEquals("yes", verdict(units, "Loads are below the control's"));
        assertEquals("no", verdict(units, "Perplexity is at most 3 %"));
        assertEquals("yes", verdict(units, "Perplexity is below the base's"));
        assertEquals(
                "no",
                verdict(
                        units,
                        "At equal loads the learned mask has less perplexity than the random"));
        assertEquals("no", verdict(units, "At equal perplexity the learned mask loads at least 5"));
    }

    @Test
    void of_armsThatDidNotRun_notMeasured() {
        List<Unit> units = units(0, 2);
        assertEquals(
                "not measured",
                verdict(
                        units,
                        "At equal loads the learned mask has less perplexity than the most"));
        assertEquals(
                "not measured",
                verdict(units, "MaskCoFT with the cache prior on top loads less than base"));
        assertEquals("not measured", verdict(units, "The mean accuracy"));
        assertTrue(
                Claims.of(SETTINGS, new Results(units, List.of())).stream()
                        .filter(c -> c.claim().contains("per output token"))
                        .allMatch(c -> c.verdict().equals("not measured")));
    }

    @Test
    void choose_withinTheLimit_fewestLoads_elseNearTheLowestPerplexity() {
        List<Point> points = Arrays.asList(point(0, 3, 4.0), point(1, 2, 4.1), point(2, 1, 4.3));
        assertEquals(1, StudyRun.choose(points, 4.2));
        assertEquals(2, StudyRun.choose(points, 5));
        assertEquals(0, StudyRun.choose(points, 3.9));
        List<Point> flat = Arrays.asList(point(0, 3, 4.0), point(1, 2, 4.03), point(2, 1, 4.3));
        assertEquals(1, StudyRun.choose(flat, 3.9));
    }

    @Test
    void report_units_textJsonAndPage() throws IOException {
        StudyReport report = new StudyReport(SETTINGS, new Results(units(0.02, 2.2), List.of()), 1);
        assertTrue(report.text().contains("maskcoft"), report.text());
        assertTrue(report.json().containsKey("claims"));
        Path page = folder.resolve("report.html");
        report.writeHtml(page);
        String html = Files.readString(page);
        assertTrue(html.contains("Loads against perplexity") && html.contains("random mask"));
    }

    @Test
    void store_writtenUnit_readAgainWithTheSameSettingsOnly() throws IOException {
        UnitStore store = new UnitStore(folder.resolve("units"));
        Unit unit = units(0.02, 2.2).get(2);
        assertEquals(null, store.read(unit.unit(), "some"));
        store.write(unit);
        assertEquals(unit, store.read(unit.unit(), "some"));
        assertRefused("was made with other settings (some, now others)", store, unit, "others");
        Path file = folder.resolve("units").resolve(unit.unit() + ".json");
        for (String broken : List.of("", "{", "{}", "[]")) {
            Files.writeString(file, broken);
            assertRefused(file + " is no result of a study", store, unit, "some");
        }
    }

    private static void assertRefused(String part, UnitStore store, Unit unit, String settings) {
        String message =
                org.junit.jupiter.api.Assertions.assertThrows(
                                IllegalArgumentException.class,
                                () -> store.read(unit.unit(), settings))
                        .getMessage();
        assertTrue(message.contains(part), message);
    }
}
