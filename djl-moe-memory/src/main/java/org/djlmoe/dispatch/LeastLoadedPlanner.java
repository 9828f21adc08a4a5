package org.djlmoe.dispatch;

import java.math.BigDecimal;
import java.math.RoundingMode;
import java.util.Arrays;
import java.util.Comparator;
import java.util.stream.IntStream;

/**
 * Spreads the routes of overloaded experts over the least loaded ranks, so that no rank computes
 * more than cap = ceil(alpha * total / P) routes whatever the router chose.
 *
 * <p>Idea: experts are placed by descending load. Each home keeps room for those of its own experts
 * that are still to come (pending), so what leaves an overloaded home are its largest experts. The
 * rest that a home cannot take goes piece by piece to the rank with the most room.
 *
 * <p>Bounds, for any counts, m and alpha >= 1: no rank exceeds cap, and none holds more than max(F,
 * ceil(E / P)) foreign experts. Cap comes first. Room never runs out: the ranks' room adds up to at
 * least the rest being placed. But it may be on ranks that hold F foreign experts already; then the
 * layer is planned again by pairing, where a rank takes from one other home alone and so holds at
 * most ceil(E / P) foreign experts. An F below ceil(E / P) is kept where either way keeps it, and
 * otherwise exceeded up to that number.
 *
 * <p>When not to use it: where weights are dear to move (large experts, few tokens), a smaller
 * imbalance costs less than the migration; raise lambda. Balanced loads are left alone: nothing is
 * planned while the largest rank load is below lambda times the mean.
 *
 * <p>Source: "Least-Loaded Expert Parallelism" (arXiv 2601.17111), with a hard cap. The pairing is
 * the alias method: Walker, "An Efficient Method for Generating Discrete Random Variables with
 * General Distributions" (1977).
 */
public final class LeastLoadedPlanner {

    private final int ranks;
    private final int experts;
    private final BigDecimal alpha;
    private final double lambda;
    private final int maxForeign;

    private LeastLoadedPlanner(Builder b) {
        ranks = b.ranks;
        experts = b.experts;
        alpha = BigDecimal.valueOf(b.alpha);
        lambda = b.lambda;
        maxForeign = b.maxForeign > 0 ? b.maxForeign : expertsPerRank();
    }

    /**
     * Starts the settings.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Plans one layer. Equal counts give equal plans, so every rank plans for itself from gathered
     * counts.
     *
     * @param counts [P][E], the routes that the rank has for the expert
     * @return the plan
     * @throws IllegalArgumentException if the counts have another shape or are negative
     */
    public DispatchPlan plan(long[][] counts) {
        long[][] checked = DispatchPlan.checkCounts(counts);
        if (checked.length != ranks || checked[0].length != experts) {
            throw new IllegalArgumentException(
                    "counts are [%d][%d], the planner is for %d ranks and %d experts"
                            .formatted(checked.length, checked[0].length, ranks, experts));
        }
        long[] load = new long[experts];
        for (long[] row : checked) {
            for (int e = 0; e < experts; e++) {
                load[e] += row[e];
            }
        }
        long[] homeLoad = new long[ranks];
        long total = 0;
        for (int e = 0; e < experts; e++) {
            homeLoad[home(e)] += load[e];
            total += load[e];
        }
        if (!worthwhile(homeLoad, total)) {
            return DispatchPlan.identity(checked);
        }
        long cap =
                alpha.multiply(BigDecimal.valueOf(total))
                        .divide(BigDecimal.valueOf(ranks), 0, RoundingMode.CEILING)
                        .min(BigDecimal.valueOf(total))
                        .longValueExact();
        int[] order = byDescendingLoad(load);
        Placement placement = spread(load, homeLoad, order, cap);
        if (placement == null) {
            placement = pairUp(load, homeLoad, order, cap);
        }
        return new DispatchPlan(checked, placement, cap);
    }

    private boolean worthwhile(long[] homeLoad, long total) {
        if (ranks == 1 || total == 0 || lambda == Double.POSITIVE_INFINITY) {
            return false;
        }
        // Exact, so that a load of lambda times the mean is planned: max * P >= lambda * total.
        BigDecimal max = BigDecimal.valueOf(Arrays.stream(homeLoad).max().orElseThrow());
        return max.multiply(BigDecimal.valueOf(ranks))
                        .compareTo(BigDecimal.valueOf(lambda).multiply(BigDecimal.valueOf(total)))
                >= 0;
    }

    private static int[] byDescendingLoad(long[] load) {
        // Sorting objects is stable: of equal loads the lower id comes first.
        return IntStream.range(0, load.length)
                .boxed()
                .sorted(Comparator.comparingLong((Integer e) -> load[e]).reversed())
                .mapToInt(Integer::intValue)
                .toArray();
    }

    /**
     * Places expert after expert, each at home as far as there is room and then on the least loaded
     * ranks.
     *
     * @return the placement, or null if only ranks with F foreign experts had room left
     */
    private Placement spread(long[] load, long[] homeLoad, int[] order, long cap) {
        Placement placement = new Placement(experts);
        // What each rank has, and what it must still expect from its own experts.
        long[] held = homeLoad.clone();
        int[] numForeign = new int[ranks];
        for (int e : order) {
            int home = home(e);
            held[home] -= load[e];
            long rest = load[e];
            long atHome = Math.min(rest, Math.max(0, cap - held[home]));
            placement.add(e, home, atHome);
            held[home] += atHome;
            rest -= atHome;
            while (rest > 0) {
                int rank = leastLoaded(held, numForeign, home);
                if (rank < 0 || held[rank] >= cap) {
                    return null;
                }
                long piece = Math.min(rest, cap - held[rank]);
                numForeign[rank]++;
                placement.add(e, rank, piece);
                held[rank] += piece;
                rest -= piece;
            }
        }
        return placement;
    }

    /** Returns the rank with the least, ties to the lower, or -1 if all hold F foreign experts. */
    private int leastLoaded(long[] held, int[] numForeign, int home) {
        int least = -1;
        for (int r = 0; r < ranks; r++) {
            if (r != home && numForeign[r] < maxForeign && (least < 0 || held[r] < held[least])) {
                least = r;
            }
        }
        return least;
    }

    /**
     * The alias method: again and again the least loaded open rank is filled to cap from the most
     * loaded one and closed, until none is above cap. The donor may fall below cap and be filled in
     * turn. Each rank takes from one donor once, the donor's own experts, largest first.
     *
     * <p>The open ranks never hold more than cap each on average, since a rank is closed full. So
     * while one of them is above cap another is below.
     */
    private Placement pairUp(long[] load, long[] homeLoad, int[] order, long cap) {
        Placement placement = new Placement(experts);
        for (int e = 0; e < experts; e++) {
            placement.add(e, home(e), load[e]);
        }
        long[] held = homeLoad.clone();
        boolean[] closed = new boolean[ranks];
        while (true) {
            int donor = -1;
            int taker = -1;
            for (int r = 0; r < ranks; r++) {
                if (!closed[r]) {
                    donor = donor < 0 || held[r] > held[donor] ? r : donor;
                    taker = taker < 0 || held[r] < held[taker] ? r : taker;
                }
            }
            if (donor < 0 || held[donor] <= cap) {
                return placement;
            }
            long rest = cap - held[taker];
            held[donor] -= rest;
            held[taker] = cap;
            closed[taker] = true;
            for (int e : order) {
                if (home(e) == donor && rest > 0) {
                    long piece = Math.min(rest, placement.amount(e, donor));
                    placement.add(e, donor, -piece);
                    placement.add(e, taker, piece);
                    rest -= piece;
                }
            }
        }
    }

    private int home(int expert) {
        return DispatchPlan.home(expert, ranks, experts);
    }

    private int expertsPerRank() {
        return (experts + ranks - 1) / ranks;
    }

    /** Settings of a planner. */
    public static final class Builder {

        private int ranks;
        private int experts;
        private double alpha = 1.0;
        private double lambda = 1.3;
        private long minPiece = 1024;
        private int maxForeign = -1;

        private Builder() {}

        /**
         * Sets the size of the group.
         *
         * @param value P, at least 1
         * @return this builder
         */
        public Builder setRanks(int value) {
            ranks = value;
            return this;
        }

        /**
         * Sets the number of experts over all ranks. Expert e is at home on rank floor(e P / E).
         *
         * @param value E, at least 1; P need not divide it
         * @return this builder
         */
        public Builder setExperts(int value) {
            experts = value;
            return this;
        }

        /**
         * Sets how far a rank may be above the mean: cap = ceil(alpha * total / P) routes; default:
         * 1.0.
         *
         * @param value at least 1: less cannot hold all routes
         * @return this builder
         */
        public Builder optAlpha(double value) {
            alpha = value;
            return this;
        }

        /**
         * Sets m, the size below which a piece is cut off only if no rank has room for more;
         * default: 1024. It is a term of the published rule that decides nothing here: all ranks
         * have one cap, so the least loaded rank is also the one with the most room, and takes the
         * piece whatever its size. Plans are the same for every m.
         *
         * @param value routes, at least 1
         * @return this builder
         */
        public Builder optMinPiece(long value) {
            minPiece = value;
            return this;
        }

        /**
         * Sets the imbalance from which experts are moved: nothing is planned while the largest
         * rank load is below lambda times the mean; default: 1.3.
         *
         * @param value at least 0; up to 1 always plans, infinity never
         * @return this builder
         */
        public Builder optLambda(double value) {
            lambda = value;
            return this;
        }

        /**
         * Sets F, how many foreign experts a rank may hold; default: ceil(E / P), the most that it
         * has of its own. See the class about smaller numbers.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder optMaxForeign(int value) {
            if (value < 1) {
                throw new IllegalArgumentException(
                        "maxForeign is "
                                + value
                                + ": set 1 or more, or an infinite lambda to move nothing");
            }
            maxForeign = value;
            return this;
        }

        /**
         * Checks the settings.
         *
         * @return the planner, which can be used for any number of layers and from any thread
         */
        public LeastLoadedPlanner build() {
            if (ranks < 1) {
                throw new IllegalArgumentException("ranks is " + ranks + ": set 1 or more");
            }
            if (experts < 1) {
                throw new IllegalArgumentException("experts is " + experts + ": set 1 or more");
            }
            if (!(alpha >= 1 && alpha < Double.POSITIVE_INFINITY)) {
                throw new IllegalArgumentException(
                        "alpha is " + alpha + ": set 1 or more, ranks must hold all routes");
            }
            if (!(lambda >= 0)) {
                throw new IllegalArgumentException("lambda is " + lambda + ": set 0 or more");
            }
            if (minPiece < 1) {
                throw new IllegalArgumentException("minPiece is " + minPiece + ": set 1 or more");
            }
            return new LeastLoadedPlanner(this);
        }
    }
}
