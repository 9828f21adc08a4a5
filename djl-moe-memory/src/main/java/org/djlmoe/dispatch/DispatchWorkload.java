package org.djlmoe.dispatch;

import java.util.Arrays;
import java.util.stream.Collectors;

/**
 * Routings that dispatch is measured and tested with, the same on every rank.
 *
 * <p>In r/h the first floor(r% N) tokens are hot: their route j goes to expert j mod h. Route j of
 * another token i goes to expert h + ((i + j) mod (E - h)). h is at most E / 2, so that a small
 * layer has cold experts too. A token may name an expert more than once (where k is above h or E -
 * h).
 */
public enum DispatchWorkload {
    /** Route j of token i goes to expert (i + j) mod E. */
    BALANCED("balanced", 0, 0),
    /** 30 % of the tokens to 16 experts. */
    HOT_30_16("30/16", 30, 16),
    /** 50 % of the tokens to 16 experts. */
    HOT_50_16("50/16", 50, 16),
    /** 80 % of the tokens to 16 experts. */
    HOT_80_16("80/16", 80, 16),
    /** 95 % of the tokens to 16 experts. */
    HOT_95_16("95/16", 95, 16),
    /** 30 % of the tokens to 4 experts. */
    HOT_30_4("30/4", 30, 4),
    /** 50 % of the tokens to 4 experts. */
    HOT_50_4("50/4", 50, 4),
    /**
     * Token i goes to k experts from the first of rank (i mod K) mod P on: every token of a strided
     * chunk goes to one rank.
     */
    PERIODIC("periodic", 0, 0),
    /** 80/16 whose hot experts move on by E / 16 every N / 16 tokens. */
    ROTATING("rotating", 80, 16);

    private static final int PHASES = 16;

    private final String title;
    private final int percent;
    private final int hotExperts;

    DispatchWorkload(String title, int percent, int hotExperts) {
        this.title = title;
        this.percent = percent;
        this.hotExperts = hotExperts;
    }

    /**
     * Finds a workload.
     *
     * @param name such as {@code balanced} or {@code 80/16}
     * @return the workload
     * @throws IllegalArgumentException if there is none of that name
     */
    public static DispatchWorkload of(String name) {
        for (DispatchWorkload workload : values()) {
            if (workload.title.equalsIgnoreCase(name)) {
                return workload;
            }
        }
        throw new IllegalArgumentException(
                "no workload is called '%s': choose one of %s"
                        .formatted(
                                name,
                                Arrays.stream(values())
                                        .map(DispatchWorkload::toString)
                                        .collect(Collectors.joining(", "))));
    }

    /**
     * Generates the routing of one rank.
     *
     * @param tokens N, tokens of the rank
     * @param topK k, routes a token
     * @param experts E, over all ranks
     * @param ranks P, which periodic depends on
     * @param chunks K, which periodic depends on
     * @return [N * k] experts, by token * k + slot
     */
    public int[] experts(int tokens, int topK, int experts, int ranks, int chunks) {
        int hot = Math.min(hotExperts, experts / 2);
        int[] ids = new int[Math.multiplyExact(tokens, topK)];
        for (int i = 0; i < tokens; i++) {
            for (int j = 0; j < topK; j++) {
                ids[i * topK + j] =
                        switch (this) {
                            case PERIODIC -> {
                                int rank = i % chunks % ranks;
                                long first = DispatchPlan.firstExpert(rank, ranks, experts);
                                yield (int) ((first + j) % experts);
                            }
                            case ROTATING -> {
                                int length = Math.max(1, (tokens + PHASES - 1) / PHASES);
                                int phase = i / length;
                                int id = hotOrCold(i % length, j, length, hot, experts);
                                yield (int) ((id + (long) phase * experts / PHASES) % experts);
                            }
                            default -> hotOrCold(i, j, tokens, hot, experts);
                        };
            }
        }
        return ids;
    }

    private int hotOrCold(int token, int slot, int tokens, int hot, int experts) {
        if (hot > 0 && token < (long) tokens * percent / 100) {
            return slot % hot;
        }
        return hot + (token + slot) % (experts - hot);
    }

    /** Returns the name that {@link #of} takes. */
    @Override
    public String toString() {
        return title;
    }
}
