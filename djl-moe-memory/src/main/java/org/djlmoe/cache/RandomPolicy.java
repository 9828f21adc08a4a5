package org.djlmoe.cache;

import java.util.SplittableRandom;

/** Evicts any candidate, uniformly. */
final class RandomPolicy implements EvictionPolicy {

    private final SplittableRandom random;

    RandomPolicy(long seed) {
        random = new SplittableRandom(seed);
    }

    @Override
    public void requested(int[] ids, int from, int k) {
        // Use does not matter.
    }

    @Override
    public void inserted(int expert) {
        // Nor does age.
    }

    @Override
    public void evicted(int expert) {
        // Nothing was kept.
    }

    @Override
    public int victim(int[] candidates, int n) {
        return candidates[random.nextInt(n)];
    }

    @Override
    public boolean mayDecline() {
        return false;
    }
}
