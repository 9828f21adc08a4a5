package org.djlmoe.dispatch;

import java.util.Arrays;

/**
 * What the ranks have agreed on for one layer and one batch: plan, chunks, and how many rows go
 * from whom to whom. Forward makes it, backward uses the same.
 *
 * <p>It holds an int a route and an int a token of this rank, and no rows. Immutable.
 */
public final class DispatchRoute {

    private final int rank;
    private final int topK;
    private final DispatchPlan plan;
    private final ChunkSchedule schedule;
    private final int[] destinations;
    private final long[][][] routes;
    private final long[][][] rows;
    private final long largestTokens;
    private final long receiveCapacity;
    private final boolean bounded;

    /**
     * @param routes [P][K][P] routes that each rank sends in each chunk to each rank
     * @param rows the same for rows: a token goes to a rank once
     * @param expected routes that no rank is ever above, or 0 if there is no such limit
     */
    DispatchRoute(
            int rank,
            int topK,
            DispatchPlan plan,
            ChunkSchedule schedule,
            int[] destinations,
            long[][][] routes,
            long[][][] rows,
            long largestTokens,
            long expected) {
        this.rank = rank;
        this.topK = topK;
        this.plan = plan;
        this.schedule = schedule;
        this.destinations = destinations;
        this.routes = routes;
        this.rows = rows;
        this.largestTokens = largestTokens;
        this.bounded = expected > 0;
        long realised = 0;
        for (int i = 0; i < chunks(); i++) {
            realised = Math.max(realised, Arrays.stream(rowsReceived(i)).sum());
        }
        this.receiveCapacity = Math.max(realised, bounded ? slots(expected) : 0);
    }

    /** Rows that a chunk may bring at most: known before any token is routed. */
    private long slots(long expected) {
        int ranks = plan.numRanks();
        return Math.min(ranks * chunkTokens(), ChunkSchedule.bound(expected, chunks()));
    }

    /**
     * Returns who computes what.
     *
     * @return the plan
     */
    public DispatchPlan plan() {
        return plan;
    }

    /**
     * Returns which tokens of this rank go in which chunk.
     *
     * @return the schedule
     */
    public ChunkSchedule schedule() {
        return schedule;
    }

    /**
     * Returns the number of chunks.
     *
     * @return K
     */
    public int chunks() {
        return schedule.numChunks();
    }

    /**
     * Returns the routes that each rank receives in each chunk.
     *
     * @return [K][P]
     */
    public long[][] received() {
        return ChunkSchedule.received(routes);
    }

    /**
     * Returns how uneven sending is: the largest send from one rank to one rank in a chunk, in
     * routes, over that rank's mean send.
     *
     * @return at least 1; 1 if nothing is sent
     */
    public double sendRatio() {
        double worst = 1;
        for (long[][] sender : routes) {
            for (long[] chunk : sender) {
                long sum = Arrays.stream(chunk).sum();
                long max = Arrays.stream(chunk).max().orElse(0);
                worst = sum == 0 ? worst : Math.max(worst, (double) max * chunk.length / sum);
            }
        }
        return worst;
    }

    /**
     * Returns how uneven receiving is: the most routes that a rank receives in a chunk over the
     * even share, all routes / (P K).
     *
     * @return at least 1; 1 if there are no routes
     */
    public double receiveRatio() {
        long max = Arrays.stream(received()).flatMapToLong(Arrays::stream).max().orElse(0);
        double share = (double) plan.total() / plan.numRanks() / chunks();
        return share == 0 ? 1 : max / share;
    }

    int topK() {
        return topK;
    }

    int tokens() {
        return schedule.numTokens();
    }

    /** Tokens of a chunk on the rank that has most. */
    long chunkTokens() {
        return (largestTokens + chunks() - 1) / chunks();
    }

    /** Rows that a buffer for what a chunk brings must hold. */
    long receiveCapacity() {
        return receiveCapacity;
    }

    /** Rows that a buffer for what a chunk sends must hold. */
    long sendCapacity() {
        long realised = 0;
        for (int i = 0; i < chunks(); i++) {
            realised = Math.max(realised, Arrays.stream(rowsSent(i)).sum());
        }
        long most = chunkTokens() * Math.min(topK, plan.numRanks() - 1);
        return bounded ? Math.max(realised, most) : realised;
    }

    int[] destinations() {
        return destinations;
    }

    /** Rows that each other rank gets from this one in a chunk; 0 for this one. */
    long[] rowsSent(int chunk) {
        long[] sent = rows[rank][chunk].clone();
        sent[rank] = 0;
        return sent;
    }

    /** Rows that this rank gets from each in a chunk, its own included. */
    long[] rowsReceived(int chunk) {
        long[] received = new long[plan.numRanks()];
        for (int r = 0; r < received.length; r++) {
            received[r] = rows[r][chunk][rank];
        }
        return received;
    }

    /** The tokens that go to a rank in a chunk, each once, ascending. */
    long[] tokens(int chunk, int to) {
        long[] tokens = new long[(int) rows[rank][chunk][to]];
        int n = 0;
        for (int t : schedule.positions(chunk)) {
            for (int i = t * topK; i < (t + 1) * topK; i++) {
                if (destinations[i] == to) {
                    tokens[n++] = t;
                    break;
                }
            }
        }
        return tokens;
    }

    /** Throws if a chunk brings a rank too much. */
    void checkBound() {
        long[][] received = received();
        for (int i = 0; i < received.length; i++) {
            for (int d = 0; d < received[i].length; d++) {
                long bound = ChunkSchedule.bound(plan.received(d), chunks());
                if (received[i][d] > bound) {
                    throw new IllegalStateException(
                            ("Rank %d would receive %d routes in chunk %d of %d, above the bound of"
                                            + " %d: use fewer chunks")
                                    .formatted(d, received[i][d], i, chunks(), bound));
                }
            }
        }
    }

    @Override
    public String toString() {
        return plan + "\n" + chunks() + " chunks, " + schedule.membership();
    }
}
