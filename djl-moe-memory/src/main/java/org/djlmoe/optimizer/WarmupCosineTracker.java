package org.djlmoe.optimizer;

import ai.djl.training.tracker.Tracker;

/**
 * A learning rate that rises linearly to its peak and then falls along half a cosine.
 *
 * <p>Update n, counted from 1, of N with W updates of warm-up has the rate {@code peak * n / W} up
 * to n = W, then {@code last + (peak - last) * (1 + cos(pi * (n - W) / (N - W))) / 2}, and {@code
 * last} from n = N on.
 *
 * <p>Source of the cosine: I. Loshchilov and F. Hutter, "SGDR", arXiv 1608.03983.
 */
public final class WarmupCosineTracker implements Tracker {

    private final double peak;
    private final double last;
    private final int warmup;
    private final int updates;

    private WarmupCosineTracker(Builder builder) {
        peak = builder.peak;
        last = builder.last;
        warmup = builder.warmup;
        updates = builder.updates;
    }

    @Override
    public float getNewValue(int numUpdate) {
        int n = Math.max(0, numUpdate);
        if (n < warmup) {
            return (float) (peak * n / warmup);
        } else if (n >= updates) {
            return (float) last;
        }
        double part = (double) (n - warmup) / (updates - warmup);
        return (float) (last + (peak - last) * (1 + Math.cos(Math.PI * part)) / 2);
    }

    /**
     * Creates a builder.
     *
     * @return a new builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /** Builds a {@link WarmupCosineTracker}. */
    public static final class Builder {

        private double peak = Double.NaN;
        private double last;
        private int warmup;
        private int updates;

        Builder() {}

        /**
         * Sets the highest learning rate.
         *
         * @param rate the rate at the end of the warm-up
         * @return this builder
         */
        public Builder setPeak(double rate) {
            peak = rate;
            return this;
        }

        /**
         * Sets the length of the schedule.
         *
         * @param number the number of updates, warm-up included
         * @return this builder
         */
        public Builder setUpdates(int number) {
            updates = number;
            return this;
        }

        /**
         * Sets the length of the warm-up; none by default.
         *
         * @param number the number of updates in which the rate rises
         * @return this builder
         */
        public Builder optWarmup(int number) {
            warmup = number;
            return this;
        }

        /**
         * Sets the rate at the end; 0 by default.
         *
         * @param rate the rate
         * @return this builder
         */
        public Builder optLast(double rate) {
            last = rate;
            return this;
        }

        /**
         * Builds the tracker.
         *
         * @return the tracker
         * @throws IllegalArgumentException if a rate is missing, negative or not finite, or the
         *     warm-up is longer than the schedule
         */
        public WarmupCosineTracker build() {
            OffloadStreamAdamW.nonNegative("peak (setPeak)", peak);
            OffloadStreamAdamW.nonNegative("last rate (optLast)", last);
            if (updates < 1 || warmup < 0 || warmup > updates) {
                throw new IllegalArgumentException(
                        String.format(
                                "A warm-up of %d updates does not fit in a schedule of %d"
                                        + " (setUpdates, optWarmup)",
                                warmup, updates));
            }
            return new WarmupCosineTracker(this);
        }
    }
}
