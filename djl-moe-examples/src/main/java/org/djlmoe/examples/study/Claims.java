package org.djlmoe.examples.study;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.OptionalDouble;
import java.util.function.BiFunction;
import java.util.function.Function;
import java.util.function.ToDoubleFunction;
import org.djlmoe.cache.EvictionPolicy;

/**
 * What the study was made to find out, each with its figures and a plain yes or no.
 *
 * <p>All comparisons are paired by seed: an arm's figure on a seed against the other arm's on the
 * same. Loads are those of the claims' cache and policy unless said otherwise.
 */
final class Claims {

    /** The cut of loads that the method's source reports, against the base. */
    static final double TARGET = -0.237;

    private static final double MOST = 0.8;

    /** What a claim about a number of seeds takes. */
    private static final int SEEDS = 5;

    /**
     * A claim.
     *
     * @param claim what is claimed
     * @param verdict yes, no, or not measured
     * @param figures what was found
     */
    record Claim(String claim, String verdict, String figures) {}

    private final StudySettings settings;
    private final Results results;
    private final List<Claim> claims = new ArrayList<>();

    private Claims(StudySettings settings, Results results) {
        this.settings = settings;
        this.results = results;
    }

    static List<Claim> of(StudySettings settings, Results results) {
        Claims claims = new Claims(settings, results);
        claims.main();
        claims.masks();
        claims.cachePrior();
        claims.elsewhere();
        claims.times();
        return List.copyOf(claims.claims);
    }

    private double loads(Figures.Series series) {
        return series.choice().loads(settings.cache(), settings.policy());
    }

    private void main() {
        ToDoubleFunction<Figures.Series> perplexity = s -> s.choice().perplexity();
        compare(
                "Loads under "
                        + settings.policy().jsonName()
                        + " are at least 23.7 % below the base's",
                Arm.MASKCOFT,
                Arm.BASE,
                this::loads,
                pair -> pair.relative().mean() <= TARGET);
        compare(
                "Loads are below the control's",
                Arm.MASKCOFT,
                Arm.CONTROL,
                this::loads,
                pair -> pair.relative().mean() < 0);
        for (EvictionPolicy.Type policy :
                List.of(EvictionPolicy.Type.LRU, EvictionPolicy.Type.LFU)) {
            compare(
                    "Loads under " + policy.jsonName() + " are below the control's",
                    Arm.MASKCOFT,
                    Arm.CONTROL,
                    s -> s.choice().loads(settings.cache(), policy),
                    pair -> pair.relative().mean() < 0);
        }
        compare(
                "Perplexity is below the base's",
                Arm.MASKCOFT,
                Arm.BASE,
                perplexity,
                pair -> pair.relative().mean() < 0);
        compare(
                "Perplexity is at most 3 % above the control's",
                Arm.MASKCOFT, Arm.CONTROL, perplexity, pair -> pair.relative().mean() <= 0.03);
        compare(
                "Perplexity is at most 1 % above the control's",
                Arm.MASKCOFT, Arm.CONTROL, perplexity, pair -> pair.relative().mean() <= 0.01);
        compare(
                "The control reuses experts less than the base",
                Arm.CONTROL,
                Arm.BASE,
                this::loads,
                pair -> pair.relative().mean() > 0);
    }

    private void masks() {
        pairs(
                "At equal loads the learned mask has less perplexity than the most-frequent one,"
                        + " in four of five seeds",
                Arm.MASKCOFT,
                Arm.FREQUENT,
                this::atEqualLoads,
                pair -> pair.seeds() >= SEEDS ? pair.wins() >= MOST * pair.seeds() : null);
        pairs(
                "At equal loads the learned mask has less perplexity than the random one, in every"
                        + " seed",
                Arm.MASKCOFT,
                Arm.RANDOM,
                this::atEqualLoads,
                pair -> pair.seeds() >= SEEDS ? pair.wins() == pair.seeds() : null);
        pairs(
                "At equal perplexity the learned mask loads at least 5 % less than the random one",
                Arm.MASKCOFT,
                Arm.RANDOM,
                this::atEqualPerplexity,
                pair -> pair.relative().mean() <= -0.05);
    }

    private void cachePrior() {
        for (Arm alone : List.of(Arm.CONTROL_CACHE, Arm.BASE_CACHE)) {
            pairs(
                    "MaskCoFT with the cache prior on top loads less than "
                            + alone.label()
                            + " at equal perplexity",
                    Arm.MASKCOFT_CACHE,
                    alone,
                    this::atEqualPerplexity,
                    pair -> pair.relative().mean() < 0);
        }
        pairs(
                "MaskCoFT alone loads less than the cache prior on the control at equal perplexity",
                Arm.MASKCOFT,
                Arm.CONTROL_CACHE,
                this::atEqualPerplexity,
                pair -> pair.relative().mean() < 0);
    }

    private void elsewhere() {
        String language = settings.otherLanguage().label();
        compare(
                "Loads on " + language + " text are below the control's",
                Arm.MASKCOFT,
                Arm.CONTROL,
                s -> s.other().loads(settings.cache(), settings.policy()),
                pair -> pair.relative().mean() < 0);
        compare(
                "Perplexity on " + language + " text is at most 3 % above the control's",
                Arm.MASKCOFT,
                Arm.CONTROL,
                s -> s.other().perplexity(),
                pair -> pair.relative().mean() <= 0.03);
        compare(
                "The mean accuracy of the tasks is at most one point below the control's",
                Arm.MASKCOFT,
                Arm.CONTROL,
                s -> s.tasks().isEmpty() ? Double.NaN : accuracy(s),
                pair -> pair.difference().mean() >= -0.01);
    }

    private void times() {
        for (int widen : List.of(1, settings.widen())) {
            List<double[]> pairs = new ArrayList<>();
            double share = 0;
            for (Figures.Times times : results.times()) {
                Figures.Timing tuned = times.of(Arm.MASKCOFT, widen);
                Figures.Timing base = times.of(Arm.BASE, widen);
                if (tuned != null && base != null) {
                    pairs.add(new double[] {tuned.millisPerToken(), base.millisPerToken()});
                    share += base.loadingShare() / results.times().size();
                }
            }
            boolean dominated = share >= 2.0 / 3;
            String how =
                    String.format(
                            Locale.ROOT,
                            " (experts %d times as wide, loading is %.0f %% of the base's time)",
                            widen,
                            100 * share);
            claim(
                    (dominated
                                    ? "Milliseconds per output token are at least 16 % below the base's"
                                    : "Milliseconds per output token are below the base's")
                            + how,
                    pairs,
                    pair -> pair.relative().mean() < (dominated ? -0.16 : 0));
        }
    }

    static double accuracy(Figures.Series series) {
        return series.tasks().stream().mapToDouble(Figures.Task::accuracy).average().orElseThrow();
    }

    /** Compares a figure of the chosen points. */
    private void compare(
            String claim,
            Arm first,
            Arm second,
            ToDoubleFunction<Figures.Series> figure,
            Function<Paired, Boolean> holds) {
        pairs(
                claim,
                first,
                second,
                (a, b) -> new double[] {figure.applyAsDouble(a), figure.applyAsDouble(b)},
                holds);
    }

    /** Compares two sweeps where they meet. */
    private void pairs(
            String claim,
            Arm first,
            Arm second,
            BiFunction<Figures.Series, Figures.Series, double[]> meet,
            Function<Paired, Boolean> holds) {
        List<double[]> values = new ArrayList<>();
        for (long seed : settings.seeds()) {
            Figures.Series a = results.series(first, settings.kept(), seed);
            Figures.Series b = results.series(second, settings.kept(), seed);
            if (a != null && b != null) {
                double[] pair = meet.apply(a, b);
                if (Double.isFinite(pair[0]) && Double.isFinite(pair[1])) {
                    values.add(pair);
                }
            }
        }
        claim(claim, values, holds);
    }

    private void claim(String claim, List<double[]> values, Function<Paired, Boolean> holds) {
        if (values.isEmpty()) {
            claims.add(new Claim(claim, "not measured", ""));
            return;
        }
        double[] a = values.stream().mapToDouble(v -> v[0]).toArray();
        double[] b = values.stream().mapToDouble(v -> v[1]).toArray();
        Paired pair = Paired.of(a, b);
        Boolean verdict = holds.apply(pair);
        claims.add(
                new Claim(
                        claim,
                        verdict == null ? "not measured" : verdict ? "yes" : "no",
                        String.format(
                                Locale.ROOT,
                                "%s against %s, %s; less in %d of %d seeds",
                                Spread.of(a),
                                Spread.of(b),
                                pair.percent(),
                                pair.wins(),
                                pair.seeds())));
    }

    /** Perplexities at the target's loads, or the fewest that both get down to. */
    private double[] atEqualLoads(Figures.Series first, Figures.Series second) {
        Curve a = first.curve(settings);
        Curve b = second.curve(settings);
        Figures.Series base = results.series(Arm.BASE, 0, settings.seeds().get(0));
        double at =
                Math.max((1 + TARGET) * loads(base), Math.max(a.fewestLoads(), b.fewestLoads()));
        return values(a.perplexityAt(at), b.perplexityAt(at));
    }

    /** Loads at 1 % above the control's perplexity, or the lowest that both get down to. */
    private double[] atEqualPerplexity(Figures.Series first, Figures.Series second) {
        Curve a = first.curve(settings);
        Curve b = second.curve(settings);
        double control =
                settings.seeds().stream()
                        .map(seed -> results.series(Arm.CONTROL, 0, seed))
                        .mapToDouble(s -> s.choice().perplexity())
                        .average()
                        .orElseThrow();
        double at = Math.max(1.01 * control, Math.max(a.lowestPerplexity(), b.lowestPerplexity()));
        return values(a.loadsAt(at), b.loadsAt(at));
    }

    private static double[] values(OptionalDouble a, OptionalDouble b) {
        return new double[] {a.orElse(Double.NaN), b.orElse(Double.NaN)};
    }
}
