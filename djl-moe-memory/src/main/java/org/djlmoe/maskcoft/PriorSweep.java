package org.djlmoe.maskcoft;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.data.TokenBatch;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.Evaluation;
import org.djlmoe.training.LanguageModel;

/**
 * Chooses how strongly a mask is preferred at serving: the beta with the fewest expert loads among
 * those whose perplexity on held-out text stays within a limit. If none does, the limit is {@value
 * #TOLERANCE} times the lowest perplexity of all, and the result says so: betas whose perplexities
 * differ by noise alone are told apart by their loads.
 *
 * @param points what was measured, in the order of the betas
 * @param chosen the point that was chosen
 * @param withinLimit whether the chosen point keeps the limit
 */
public record PriorSweep(List<Point> points, Point chosen, boolean withinLimit) {

    /**
     * One beta on held-out text.
     *
     * @param prior the prior of this beta
     * @param perplexity of the text
     * @param loadsPerToken expert loads a token over all layers
     */
    public record Point(SelectionPrior prior, double perplexity, double loadsPerToken) {}

    /** A perplexity limit is this factor times the perplexity that is compared with. */
    public static final double TOLERANCE = 1.01;

    /**
     * Measures a model under several priors.
     *
     * @param model the co-adapted model
     * @param priors candidates
     * @param text validation text, neither trained on nor reported
     * @param cacheSize experts a layer that the replayed cache holds
     * @param policy the replayed cache's policy
     * @param listener is told of every prior
     * @return a point a prior, in their order
     */
    public static List<Point> measure(
            LanguageModel model,
            List<ExpertPrior> priors,
            Iterable<TokenBatch> text,
            int cacheSize,
            EvictionPolicy.Type policy,
            StageListener listener) {
        LoadReplay replay = LoadReplay.builder().setCapacity(cacheSize).build();
        List<Point> points = new ArrayList<>();
        try {
            for (ExpertPrior prior : priors) {
                prior.apply(model.decoder());
                Evaluation evaluation = Evaluation.of(model, text, tokens -> {});
                double loads = replay.run(evaluation.trace(), policy).loadsPerToken();
                points.add(new Point(prior.prior(), evaluation.perplexity(), loads));
                listener.step(points.size(), priors.size(), evaluation.tokens(), evaluation.loss());
            }
        } finally {
            ExpertPrior.clear(model.decoder());
        }
        return points;
    }

    /**
     * Returns the lowest perplexity of some points.
     *
     * @param points at least one
     * @return the perplexity
     */
    public static double lowestPerplexity(List<Point> points) {
        return points.stream().mapToDouble(Point::perplexity).min().orElseThrow();
    }

    /**
     * Chooses among measured points.
     *
     * @param points at least one
     * @param perplexityLimit the highest perplexity allowed
     * @return the points and the choice; of equal points the earlier
     */
    public static PriorSweep choose(List<Point> points, double perplexityLimit) {
        if (points.isEmpty()) {
            throw new IllegalArgumentException("A sweep needs at least one prior");
        }
        Point within = fewestLoads(points, perplexityLimit);
        Point chosen =
                within == null ? fewestLoads(points, TOLERANCE * lowestPerplexity(points)) : within;
        return new PriorSweep(List.copyOf(points), chosen, within != null);
    }

    private static Point fewestLoads(List<Point> points, double limit) {
        return points.stream()
                .filter(point -> point.perplexity() <= limit)
                .min(Comparator.comparingDouble(Point::loadsPerToken))
                .orElse(null);
    }
}
