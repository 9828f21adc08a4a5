package org.djlmoe.examples.study;

import java.util.List;
import java.util.OptionalDouble;
import java.util.function.ToDoubleFunction;

/**
 * What a model can be had for: perplexity against loads over the strengths of a prior, straight
 * between neighbouring strengths.
 *
 * <p>Neither need be monotone in the strength, so both questions ask for the best: the lowest
 * perplexity at that many loads <em>or fewer</em>, and the fewest loads at that perplexity <em>or
 * less</em>.
 *
 * @param points in the order of the strengths, at least one
 */
public record Curve(List<Spot> points) {

    /**
     * One strength.
     *
     * @param loads expert loads a token
     * @param perplexity of the same text
     */
    public record Spot(double loads, double perplexity) {}

    /** Copies and checks. */
    public Curve {
        points = List.copyOf(points);
        if (points.isEmpty()) {
            throw new IllegalArgumentException("A curve needs a point");
        }
    }

    /**
     * Returns the lowest perplexity at a number of loads or fewer.
     *
     * @param loads expert loads a token
     * @return the perplexity, or nothing if the curve does not get down to these loads
     */
    public OptionalDouble perplexityAt(double loads) {
        return best(Spot::loads, Spot::perplexity, loads);
    }

    /**
     * Returns the fewest loads at a perplexity or less.
     *
     * @param perplexity the perplexity
     * @return the loads, or nothing if the curve does not get down to this perplexity
     */
    public OptionalDouble loadsAt(double perplexity) {
        return best(Spot::perplexity, Spot::loads, perplexity);
    }

    /** Returns the fewest loads of all points. */
    public double fewestLoads() {
        return points.stream().mapToDouble(Spot::loads).min().orElseThrow();
    }

    /** Returns the lowest perplexity of all points. */
    public double lowestPerplexity() {
        return points.stream().mapToDouble(Spot::perplexity).min().orElseThrow();
    }

    private OptionalDouble best(
            ToDoubleFunction<Spot> bounded, ToDoubleFunction<Spot> wanted, double bound) {
        double best = Double.POSITIVE_INFINITY;
        for (int i = 0; i < points.size(); i++) {
            Spot a = points.get(i);
            double xa = bounded.applyAsDouble(a);
            if (xa <= bound) {
                best = Math.min(best, wanted.applyAsDouble(a));
            }
            if (i + 1 < points.size()) {
                Spot b = points.get(i + 1);
                double xb = bounded.applyAsDouble(b);
                if ((xa - bound) * (xb - bound) < 0) {
                    double at = (bound - xa) / (xb - xa);
                    best =
                            Math.min(
                                    best,
                                    (1 - at) * wanted.applyAsDouble(a)
                                            + at * wanted.applyAsDouble(b));
                }
            }
        }
        return best == Double.POSITIVE_INFINITY ? OptionalDouble.empty() : OptionalDouble.of(best);
    }
}
