package org.djlmoe.data;

/**
 * The SplitMix64 generator (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
 * OOPSLA 2014), written out so that an order drawn today is the order drawn by every later JDK.
 */
final class SplitMix64 {
    private static final long GOLDEN_GAMMA = 0x9E3779B97F4A7C15L;

    private long state;

    /**
     * Starts the stream that belongs to the pair; pairs that differ in either part are unrelated.
     */
    SplitMix64(long seed, long stream) {
        this.state = mix(mix(seed + GOLDEN_GAMMA) + GOLDEN_GAMMA * (stream + 1));
    }

    long next() {
        state += GOLDEN_GAMMA;
        return mix(state);
    }

    /** Returns a number in [0, bound); the bias is below bound / 2^32. */
    int next(int bound) {
        return (int) (((next() >>> 32) * bound) >>> 32);
    }

    /** Returns a number in [0, 1) with 53 random bits. */
    double nextDouble() {
        return (next() >>> 11) * 0x1.0p-53;
    }

    private static long mix(long z) {
        long x = (z ^ (z >>> 30)) * 0xBF58476D1CE4E5B9L;
        x = (x ^ (x >>> 27)) * 0x94D049BB133111EBL;
        return x ^ (x >>> 31);
    }
}
