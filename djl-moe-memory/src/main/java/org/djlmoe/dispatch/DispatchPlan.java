package org.djlmoe.dispatch;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;

/**
 * Which rank computes which routes of which expert, for one layer and one batch.
 *
 * <p>A route is one (token, slot) pair. The routes of an expert form one list over the group: the
 * senders in rank order, and within a sender by token * k + slot. The plan cuts that list into
 * half-open intervals, one for each rank that computes the expert: the home first, then the others
 * in the order in which they were given a part. Together they cover it. A rank that is not the
 * expert's home but computes a part of it, a helper, needs its weights: {@link #migrations()}.
 *
 * <p>Immutable. Made by {@link LeastLoadedPlanner} or {@link #identity}.
 */
public final class DispatchPlan {

    private static final int BAR = 32;

    private final long[][] counts;
    private final long[][] begins;
    private final int[][] pieceRanks;
    private final long[][] pieceEnds;
    private final long[] before;
    private final long[] received;
    private final int[][] foreign;
    private final List<Migration> migrations;
    private final boolean identity;
    private final long cap;
    private final long total;

    /**
     * A half-open interval of an expert's routes.
     *
     * @param rank who computes it
     * @param begin the first route
     * @param end one after the last route, above begin
     */
    public record Piece(int rank, long begin, long end) {}

    /**
     * Weights that a rank needs and its home has.
     *
     * @param expert whose weights
     * @param home the rank that owns them
     * @param helper the rank that computes a part of the expert
     */
    public record Migration(int expert, int home, int helper) {}

    /**
     * Lays out the intervals.
     *
     * @param counts [rank][expert] routes, as checked by {@link #checkCounts}; owned from now on
     * @param placement who computes how many routes of each expert: as many as were counted
     * @param cap the limit that the planner kept, or -1 if nothing was planned
     */
    DispatchPlan(long[][] counts, Placement placement, long cap) {
        int ranks = counts.length;
        int experts = placement.numExperts();
        this.counts = counts;
        begins = new long[ranks][experts];
        pieceRanks = new int[experts][];
        pieceEnds = new long[experts][];
        before = new long[ranks];
        received = new long[ranks];
        long[] load = new long[experts];
        for (int r = 0; r < ranks; r++) {
            for (int e = 0; e < experts; e++) {
                begins[r][e] = load[e];
                load[e] += counts[r][e];
            }
        }
        List<Migration> moved = new ArrayList<>();
        int[] numForeign = new int[ranks];
        for (int e = 0; e < experts; e++) {
            int home = home(e, ranks, experts);
            before[home] += load[e];
            pieceRanks[e] = placement.ranks(e);
            pieceEnds[e] = new long[pieceRanks[e].length];
            long end = 0;
            for (int i = 0; i < pieceRanks[e].length; i++) {
                int r = pieceRanks[e][i];
                end += placement.amount(e, r);
                received[r] += placement.amount(e, r);
                pieceEnds[e][i] = end;
                if (r != home) {
                    moved.add(new Migration(e, home, r));
                    numForeign[r]++;
                }
            }
        }
        migrations = List.copyOf(moved);
        foreign = new int[ranks][];
        for (int r = 0; r < ranks; r++) {
            foreign[r] = new int[numForeign[r]];
            numForeign[r] = 0;
        }
        for (Migration m : migrations) {
            foreign[m.helper()][numForeign[m.helper()]++] = m.expert();
        }
        identity = cap < 0;
        this.cap = identity ? Arrays.stream(received).max().orElse(0) : cap;
        total = Arrays.stream(before).sum();
    }

    /**
     * The plan that moves nothing: every route is computed at its expert's home.
     *
     * @param counts [rank][expert], the routes that the rank has for the expert
     * @return the plan
     * @throws IllegalArgumentException if the rows differ in length or a count is negative
     */
    public static DispatchPlan identity(long[][] counts) {
        long[][] copy = checkCounts(counts);
        int ranks = copy.length;
        int experts = copy[0].length;
        Placement placement = new Placement(experts);
        for (int e = 0; e < experts; e++) {
            long load = 0;
            for (long[] row : copy) {
                load += row[e];
            }
            placement.add(e, home(e, ranks, experts), load);
        }
        return new DispatchPlan(copy, placement, -1);
    }

    /** Returns a deep copy of well-formed counts whose sum fits a long. */
    static long[][] checkCounts(long[][] counts) {
        if (counts.length == 0 || counts[0].length == 0) {
            throw new IllegalArgumentException(
                    "counts are empty: give one row a rank with one number an expert");
        }
        long[][] copy = new long[counts.length][];
        long sum = 0;
        for (int r = 0; r < counts.length; r++) {
            copy[r] = counts[r].clone();
            if (copy[r].length != counts[0].length) {
                throw new IllegalArgumentException(
                        "counts of rank %d name %d experts, those of rank 0 name %d"
                                .formatted(r, copy[r].length, counts[0].length));
            }
            for (int e = 0; e < copy[r].length; e++) {
                if (copy[r][e] < 0) {
                    throw new IllegalArgumentException(
                            "rank %d has %d routes for expert %d: counts start at 0"
                                    .formatted(r, copy[r][e], e));
                }
                sum += copy[r][e];
                if (sum < 0) {
                    throw new IllegalArgumentException(
                            "counts add up to more than " + Long.MAX_VALUE);
                }
            }
        }
        return copy;
    }

    /**
     * Returns the rank that owns an expert: floor(expert * ranks / experts).
     *
     * @param expert the expert
     * @param ranks P, the size of the group
     * @param experts E, the number of experts
     * @return its home
     */
    public static int home(int expert, int ranks, int experts) {
        return (int) ((long) expert * ranks / experts);
    }

    /** The first expert at home on a rank. */
    static int firstExpert(int rank, int ranks, int experts) {
        return (int) (((long) rank * experts + ranks - 1) / ranks);
    }

    /**
     * Returns the rank that owns an expert.
     *
     * @param expert the expert
     * @return its home
     */
    public int home(int expert) {
        return home(expert, numRanks(), numExperts());
    }

    /**
     * Returns the size of the group.
     *
     * @return P
     */
    public int numRanks() {
        return counts.length;
    }

    /**
     * Returns the number of experts over all ranks.
     *
     * @return E
     */
    public int numExperts() {
        return pieceRanks.length;
    }

    /**
     * Returns whether the loads were even enough to leave every expert at home.
     *
     * @return true if nothing was planned
     */
    public boolean isIdentity() {
        return identity;
    }

    /**
     * Returns what no rank exceeds: the planner's limit, or the largest load if nothing was
     * planned.
     *
     * @return routes
     */
    public long cap() {
        return cap;
    }

    /**
     * Returns the routes of the whole group.
     *
     * @return their number
     */
    public long total() {
        return total;
    }

    /**
     * Returns the routes that a rank would compute if every expert stayed at home.
     *
     * @param rank the rank
     * @return routes
     */
    public long homeLoad(int rank) {
        return before[rank];
    }

    /**
     * Returns the routes that a rank computes, R_d.
     *
     * @param rank the rank
     * @return routes, those that it sends to itself included
     */
    public long received(int rank) {
        return received[rank];
    }

    /**
     * Returns who computes an expert.
     *
     * @param expert the expert
     * @return adjacent intervals from 0 to the number of the expert's routes, the home's first;
     *     empty for an expert without routes
     */
    public List<Piece> pieces(int expert) {
        List<Piece> pieces = new ArrayList<>();
        long begin = 0;
        for (int i = 0; i < pieceRanks[expert].length; i++) {
            pieces.add(new Piece(pieceRanks[expert][i], begin, pieceEnds[expert][i]));
            begin = pieceEnds[expert][i];
        }
        return List.copyOf(pieces);
    }

    /**
     * Returns how many routes of an expert a rank computes.
     *
     * @param expert the expert
     * @param rank the rank
     * @return routes, 0 if it has no part in the expert
     */
    public long amount(int expert, int rank) {
        int i = piece(expert, rank);
        return i < 0 ? 0 : pieceEnds[expert][i] - pieceBegin(expert, i);
    }

    private int piece(int expert, int rank) {
        for (int i = 0; i < pieceRanks[expert].length; i++) {
            if (pieceRanks[expert][i] == rank) {
                return i;
            }
        }
        return -1;
    }

    private long pieceBegin(int expert, int piece) {
        return piece == 0 ? 0 : pieceEnds[expert][piece - 1];
    }

    /**
     * Returns how many routes of an expert go from one rank to another.
     *
     * @param expert the expert
     * @param sender the rank whose tokens they are
     * @param rank the rank that computes them
     * @return routes
     */
    public long sent(int expert, int sender, int rank) {
        int i = piece(expert, rank);
        if (i < 0) {
            return 0;
        }
        long begin = Math.max(pieceBegin(expert, i), begins[sender][expert]);
        long end = begins[sender][expert] + counts[sender][expert];
        return Math.max(0, Math.min(end, pieceEnds[expert][i]) - begin);
    }

    /**
     * Returns how many routes go from one rank to another.
     *
     * @param sender the rank whose tokens they are
     * @param rank the rank that computes them
     * @return routes over all experts
     */
    public long sent(int sender, int rank) {
        long sum = 0;
        for (int e = 0; e < numExperts(); e++) {
            sum += sent(e, sender, rank);
        }
        return sum;
    }

    /**
     * Returns where each route of a rank is computed.
     *
     * @param sender the rank
     * @param experts [tokens * k] the expert of each of its routes, by token * k + slot: all of
     *     them, since a route's place in the expert's list depends on those before it. A token may
     *     name an expert more than once.
     * @return [tokens * k] ranks
     * @throws IllegalArgumentException if the routes are not those that the plan was made for
     */
    public int[] destinations(int sender, int[] experts) {
        checkRoutes(sender, experts);
        long[] next = begins[sender].clone();
        int[] piece = new int[next.length];
        int[] destinations = new int[experts.length];
        for (int i = 0; i < experts.length; i++) {
            int e = experts[i];
            long at = next[e]++;
            while (at >= pieceEnds[e][piece[e]]) {
                piece[e]++;
            }
            destinations[i] = pieceRanks[e][piece[e]];
        }
        return destinations;
    }

    private void checkRoutes(int sender, int[] experts) {
        long[] seen = new long[numExperts()];
        for (int i = 0; i < experts.length; i++) {
            if (experts[i] < 0 || experts[i] >= seen.length) {
                throw new IllegalArgumentException(
                        "route %d of rank %d goes to expert %d: there are %d"
                                .formatted(i, sender, experts[i], seen.length));
            }
            seen[experts[i]]++;
        }
        for (int e = 0; e < seen.length; e++) {
            if (seen[e] != counts[sender][e]) {
                throw new IllegalArgumentException(
                        ("rank %d has %d routes for expert %d, the plan was made for %d: give all"
                                        + " routes that were counted")
                                .formatted(sender, seen[e], e, counts[sender][e]));
            }
        }
    }

    /**
     * Returns the experts that a rank computes a part of without being their home.
     *
     * @param rank the rank
     * @return ascending experts
     */
    public int[] foreignExperts(int rank) {
        return foreign[rank].clone();
    }

    /**
     * Returns the largest number of foreign experts on a rank: weights of so many experts must fit
     * beside its own.
     *
     * @return experts
     */
    public int maxForeign() {
        return Arrays.stream(foreign).mapToInt(f -> f.length).max().orElse(0);
    }

    /**
     * Returns which weights go where before the experts run; their gradients go the other way.
     *
     * @return by ascending expert, a helper after those that were given a part before it
     */
    public List<Migration> migrations() {
        return migrations;
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof DispatchPlan o
                && cap == o.cap
                && identity == o.identity
                && Arrays.deepEquals(counts, o.counts)
                && Arrays.deepEquals(pieceRanks, o.pieceRanks)
                && Arrays.deepEquals(pieceEnds, o.pieceEnds);
    }

    @Override
    public int hashCode() {
        return 31 * Arrays.deepHashCode(counts) + Arrays.deepHashCode(pieceEnds);
    }

    /** Draws the load of each rank before and after: one line a rank. */
    @Override
    public String toString() {
        long largest = Math.max(1, Arrays.stream(before).max().orElse(0));
        StringBuilder text = new StringBuilder();
        text.append(
                String.format(
                        Locale.ROOT,
                        "%,d routes to %d experts on %d ranks; %s%n",
                        total,
                        numExperts(),
                        numRanks(),
                        identity
                                ? "every expert stays at home"
                                : String.format(
                                        Locale.ROOT,
                                        "cap %,d, migrations: %d, at most %d to a rank",
                                        cap,
                                        migrations.size(),
                                        maxForeign())));
        int digits = String.format(Locale.ROOT, "%,d", largest).length();
        String row = "%4s  %-" + BAR + "s %" + digits + "s  %-" + BAR + "s %" + digits + "s%n";
        text.append(String.format(Locale.ROOT, row, "rank", "at home", "", "planned", ""));
        for (int r = 0; r < numRanks(); r++) {
            text.append(
                    String.format(
                            Locale.ROOT,
                            row,
                            r,
                            bar(before[r], largest),
                            String.format(Locale.ROOT, "%,d", before[r]),
                            bar(received[r], largest),
                            String.format(Locale.ROOT, "%,d", received[r])));
        }
        return text.toString().replaceAll("[ ]+(\r?\n)", "$1");
    }

    private static String bar(long load, long largest) {
        return "#".repeat((int) Math.ceil((double) load / largest * BAR));
    }
}
