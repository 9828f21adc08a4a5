package org.djlmoe.dispatch;

import java.util.Arrays;

/**
 * Which tokens of a rank are dispatched in which chunk.
 *
 * <p>A layer runs in K chunks over the whole group; what a rank receives in chunk i from all ranks,
 * R_d(i) routes, is its peak. It should be near R_d / K. The memberships differ in how well they
 * see to that:
 *
 * <ul>
 *   <li>{@link Membership#STRIDED} takes tokens i, i + K, i + 2K, ...: costs nothing, and spreads
 *       runs of similar tokens. A routing with a period that shares a factor with K defeats it.
 *   <li>{@link Membership#CONTIGUOUS} takes runs of tokens, which pile up skewed pieces of text:
 *       for comparison.
 *   <li>{@link Membership#DEALT} sorts tokens by where their k routes go and deals them round: K
 *       tokens in a row go to K different chunks.
 * </ul>
 *
 * <p>Bound of dealing: n tokens of a rank whose routes go to the same ranks (the same number to
 * each) are at most n / K + 2 in a chunk. So R_d(i) is at most R_d / K plus twice the sum, over
 * ranks and over the destination patterns that occur there, of the routes to d in the pattern. It
 * does not depend on the number of tokens, nor on their order. Where patterns are many (random
 * routing over many ranks), rounds of unlike tokens are levelled: each takes the chunk that has
 * least of what it sends.
 *
 * <p>{@link Membership#AUTOMATIC} is strided where its realised counts are within {@link #bound},
 * and dealt where not: {@link #choose}.
 *
 * <p>No chunk holds more than ceil(n / K) of the n tokens of a rank. Immutable.
 */
public final class ChunkSchedule {

    /** Chunks that receive fewer routes than this are small enough, however uneven they are. */
    private static final long SMALL_CHUNK = 256;

    private final Membership membership;
    private final int[][] positions;
    private final int tokens;

    /** How tokens are assigned to chunks. */
    public enum Membership {
        /** Chunk i takes tokens i, i + K, i + 2K, and so on. */
        STRIDED,
        /** Chunk i takes the i-th run of ceil(n / K) tokens. */
        CONTIGUOUS,
        /** Tokens are sorted by their destinations and dealt round. */
        DEALT,
        /** Strided unless its realised chunks are too uneven, then dealt. */
        AUTOMATIC
    }

    private ChunkSchedule(Membership membership, int[][] positions) {
        this.membership = membership;
        this.positions = positions;
        tokens = Arrays.stream(positions).mapToInt(p -> p.length).sum();
    }

    /**
     * Returns K = max(1, min(ceil(N / c), Kmax)).
     *
     * @param largestTokens N, the tokens of the rank that has most
     * @param chunkTokens c, tokens of a rank in a chunk, at least 1
     * @param maxChunks Kmax, at least 1
     * @return the number of chunks, the same on every rank
     */
    public static int numChunks(long largestTokens, int chunkTokens, int maxChunks) {
        if (largestTokens < 0 || chunkTokens < 1 || maxChunks < 1) {
            throw new IllegalArgumentException(
                    "%d tokens in chunks of %d, at most %d: set chunk sizes and numbers of 1 or more"
                            .formatted(largestTokens, chunkTokens, maxChunks));
        }
        long chunks = largestTokens / chunkTokens + (largestTokens % chunkTokens == 0 ? 0 : 1);
        return (int) Math.max(1, Math.min(chunks, maxChunks));
    }

    /**
     * Takes every K-th token.
     *
     * @param tokens n, tokens of this rank
     * @param chunks K
     * @return the schedule
     */
    public static ChunkSchedule strided(int tokens, int chunks) {
        check(tokens, chunks);
        int[][] positions = new int[chunks][];
        for (int i = 0; i < chunks; i++) {
            int size = tokens / chunks + (i < tokens % chunks ? 1 : 0);
            int first = i;
            positions[i] = new int[size];
            Arrays.setAll(positions[i], j -> first + j * chunks);
        }
        return new ChunkSchedule(Membership.STRIDED, positions);
    }

    /**
     * Takes runs of tokens.
     *
     * @param tokens n, tokens of this rank
     * @param chunks K
     * @return the schedule
     */
    public static ChunkSchedule contiguous(int tokens, int chunks) {
        check(tokens, chunks);
        int run = (int) (((long) tokens + chunks - 1) / chunks);
        int[][] positions = new int[chunks][];
        for (int i = 0; i < chunks; i++) {
            int begin = (int) Math.min(tokens, (long) i * run);
            positions[i] = new int[Math.min(run, tokens - begin)];
            Arrays.setAll(positions[i], j -> begin + j);
        }
        return new ChunkSchedule(Membership.CONTIGUOUS, positions);
    }

    /**
     * Deals tokens by destination.
     *
     * @param rank this rank, where the dealing begins
     * @param ranks P
     * @param tokens n, tokens of this rank
     * @param chunks K
     * @param destinations [n * k] the rank that computes each route, as {@link
     *     DispatchPlan#destinations} returns them
     * @return the schedule
     */
    public static ChunkSchedule dealt(
            int rank, int ranks, int tokens, int chunks, int[] destinations) {
        check(tokens, chunks);
        int k = topK(tokens, ranks, destinations);
        int[] chunkOf = new Dealer(rank, ranks, chunks, k, destinations).deal(tokens);
        int[] sizes = new int[chunks];
        for (int c : chunkOf) {
            sizes[c]++;
        }
        int[][] positions = new int[chunks][];
        Arrays.setAll(positions, i -> new int[sizes[i]]);
        Arrays.fill(sizes, 0);
        for (int t = 0; t < tokens; t++) {
            positions[chunkOf[t]][sizes[chunkOf[t]]++] = t;
        }
        return new ChunkSchedule(Membership.DEALT, positions);
    }

    private static void check(int tokens, int chunks) {
        if (tokens < 0 || chunks < 1) {
            throw new IllegalArgumentException(
                    "%d tokens in %d chunks: there is at least one chunk"
                            .formatted(tokens, chunks));
        }
    }

    private static int topK(int tokens, int ranks, int[] destinations) {
        if (tokens == 0 ? destinations.length != 0 : destinations.length % tokens != 0) {
            throw new IllegalArgumentException(
                    "%d destinations do not belong to %d tokens: give k for each"
                            .formatted(destinations.length, tokens));
        }
        for (int d : destinations) {
            if (d < 0 || d >= ranks) {
                throw new IllegalArgumentException(
                        "a route goes to rank %d: there are %d".formatted(d, ranks));
            }
        }
        return tokens == 0 ? 0 : destinations.length / tokens;
    }

    /**
     * Returns how tokens were assigned.
     *
     * @return strided, contiguous or dealt
     */
    public Membership membership() {
        return membership;
    }

    /**
     * Returns the number of chunks.
     *
     * @return K
     */
    public int numChunks() {
        return positions.length;
    }

    /**
     * Returns the tokens of this rank.
     *
     * @return their number
     */
    public int numTokens() {
        return tokens;
    }

    /**
     * Returns the tokens of a chunk.
     *
     * @param chunk the chunk
     * @return their ascending positions, maybe none
     */
    public int[] positions(int chunk) {
        return positions[chunk].clone();
    }

    /**
     * Counts what this rank sends in each chunk, in routes.
     *
     * @param ranks P
     * @param destinations [n * k] the rank that computes each route
     * @return [K][P] routes
     */
    public long[][] routes(int ranks, int[] destinations) {
        return count(ranks, destinations, false);
    }

    /**
     * Counts what this rank sends in each chunk if a token goes to each rank once, however many of
     * its routes are computed there.
     *
     * @param ranks P
     * @param destinations [n * k] the rank that computes each route
     * @return [K][P] rows
     */
    public long[][] rows(int ranks, int[] destinations) {
        return count(ranks, destinations, true);
    }

    private long[][] count(int ranks, int[] destinations, boolean distinct) {
        int k = topK(tokens, ranks, destinations);
        long[][] counts = new long[positions.length][ranks];
        int[] lastToken = new int[ranks];
        Arrays.fill(lastToken, -1);
        for (int c = 0; c < positions.length; c++) {
            for (int t : positions[c]) {
                for (int i = t * k; i < (t + 1) * k; i++) {
                    int d = destinations[i];
                    counts[c][d] += distinct && lastToken[d] == t ? 0 : 1;
                    lastToken[d] = t;
                }
            }
        }
        return counts;
    }

    /**
     * Adds up what each rank receives.
     *
     * @param gathered [P][K][P] what each rank sends in each chunk to each rank: the {@link
     *     #routes} of all ranks
     * @return [K][P] routes that a rank receives in a chunk
     */
    public static long[][] received(long[][][] gathered) {
        long[][] sum = new long[gathered[0].length][gathered.length];
        for (long[][] sender : gathered) {
            for (int c = 0; c < sum.length; c++) {
                for (int d = 0; d < sum[c].length; d++) {
                    sum[c][d] += sender[c][d];
                }
            }
        }
        return sum;
    }

    /**
     * Returns what a rank should receive in one chunk at most: 1.5 max(R_d / K, 256).
     *
     * @param received R_d, routes that the rank receives in all
     * @param chunks K
     * @return routes, rounded down
     */
    public static long bound(long received, int chunks) {
        return Math.max(received * 3 / (2L * chunks), SMALL_CHUNK * 3 / 2);
    }

    /**
     * Returns whether no rank receives more than {@link #bound} in any chunk.
     *
     * @param received [K][P] routes that a rank receives in a chunk
     * @return true if all are within
     */
    public static boolean withinBound(long[][] received) {
        int chunks = received.length;
        for (int d = 0; d < received[0].length; d++) {
            long sum = 0;
            long max = 0;
            for (long[] chunk : received) {
                sum += chunk[d];
                max = Math.max(max, chunk[d]);
            }
            if (max > bound(sum, chunks)) {
                return false;
            }
        }
        return true;
    }

    /**
     * Decides {@link Membership#AUTOMATIC}. All ranks see the same counts, so they decide alike.
     *
     * @param strided [P][K][P] the {@link #routes} of the strided schedules of all ranks
     * @return strided if its chunks are within the bound, else dealt
     */
    public static Membership choose(long[][][] strided) {
        return withinBound(received(strided)) ? Membership.STRIDED : Membership.DEALT;
    }

    /** Sorts the tokens of a rank by destination pattern and deals them to chunks. */
    private static final class Dealer {

        private final int first;
        private final int ranks;
        private final int chunks;
        private final int k;
        private final int[] patterns;

        Dealer(int rank, int ranks, int chunks, int k, int[] destinations) {
            first = rank % chunks;
            this.ranks = ranks;
            this.chunks = chunks;
            this.k = k;
            // A token's pattern is its ascending destinations: the slots' order does not matter.
            patterns = destinations.clone();
            for (int from = 0; from < patterns.length; from += k) {
                Arrays.sort(patterns, from, from + k);
            }
        }

        int[] deal(int tokens) {
            int[] order = sort(tokens);
            long[][] load = new long[chunks][ranks];
            int[] chunkOf = new int[tokens];
            boolean[] taken = new boolean[chunks];
            for (int begin = 0; begin < tokens; begin += chunks) {
                Arrays.fill(taken, false);
                for (int i = begin; i < Math.min(tokens, begin + chunks); i++) {
                    int token = order[i];
                    int chunk = emptiest(load, taken, token);
                    taken[chunk] = true;
                    chunkOf[token] = chunk;
                    for (int j = token * k; j < (token + 1) * k; j++) {
                        load[chunk][patterns[j]]++;
                    }
                }
            }
            return chunkOf;
        }

        /** Sorts by pattern, slot by slot from the last: stable counting sorts. */
        private int[] sort(int tokens) {
            int[] order = new int[tokens];
            Arrays.setAll(order, t -> t);
            int[] sorted = new int[tokens];
            for (int slot = k - 1; slot >= 0; slot--) {
                int[] next = new int[ranks + 1];
                for (int t : order) {
                    next[patterns[t * k + slot] + 1]++;
                }
                for (int d = 0; d < ranks; d++) {
                    next[d + 1] += next[d];
                }
                for (int t : order) {
                    sorted[next[patterns[t * k + slot]]++] = t;
                }
                int[] swap = order;
                order = sorted;
                sorted = swap;
            }
            return order;
        }

        /** The free chunk that has least of what the token sends; ties go round from this rank. */
        private int emptiest(long[][] load, boolean[] taken, int token) {
            int best = -1;
            long least = 0;
            for (int i = 0; i < chunks; i++) {
                int c = (first + i) % chunks;
                if (taken[c]) {
                    continue;
                }
                long sum = 0;
                for (int j = token * k; j < (token + 1) * k; j++) {
                    sum += load[c][patterns[j]];
                }
                if (best < 0 || sum < least) {
                    best = c;
                    least = sum;
                }
            }
            return best;
        }
    }
}
