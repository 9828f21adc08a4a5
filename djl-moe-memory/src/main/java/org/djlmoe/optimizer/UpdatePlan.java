package org.djlmoe.optimizer;

import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.optimizer.AdamWKernels.Run;
import org.djlmoe.optimizer.BucketLayout.Slab;
import org.djlmoe.optimizer.BucketPipeline.Job;
import org.djlmoe.optimizer.StateBuckets.Bucket;
import org.djlmoe.optimizer.StateBuckets.Place;

/**
 * What a step does in each bucket: runs of elements, grouped by what they are updated with. A slab
 * is one run, unless it is long or experts in it are to be treated differently.
 */
final class UpdatePlan {

    /**
     * Runs of one bucket that are updated alike.
     *
     * @param idle whether they only decay, for experts without tokens
     */
    record Group(double learningRate, double decay, boolean idle) {}

    /**
     * The longest run, a multiple of {@link BucketLayout#UNIT}: its gradient is still in a cache
     * when it is set to zero after the update.
     */
    private static final long LONGEST = 1L << 21;

    /** What is to be done in one bucket. */
    private static final class Work {

        final Bucket bucket;
        final Map<Group, List<Run>> groups = new LinkedHashMap<>();
        long first = Long.MAX_VALUE;
        long last;

        Work(Bucket bucket) {
            this.bucket = bucket;
        }

        void add(Group group, Run run) {
            groups.computeIfAbsent(group, k -> new ArrayList<>()).add(run);
            first = Math.min(first, run.offset());
            last = Math.max(last, run.offset() + run.length());
        }
    }

    private final StateBuckets buckets;
    private final boolean decaysIdle;
    private final TreeMap<Integer, Work> work = new TreeMap<>();
    private boolean anyIdle;

    /**
     * Creates an empty plan.
     *
     * @param buckets where the state lies
     * @param decaysIdle whether the weights of experts without tokens decay
     */
    UpdatePlan(StateBuckets buckets, boolean decaysIdle) {
        this.buckets = buckets;
        this.decaysIdle = decaysIdle;
    }

    /**
     * Adds a parameter that has state, and counts its update.
     *
     * @param tokens how many each of its experts had, or null if it is not stacked
     */
    void add(Slot slot, Group group, long[] tokens) {
        StateBuckets.Entry entry = buckets.entries().get(slot.path());
        boolean[] active = count(entry, tokens);
        entry.places.forEach(place -> cut(place, slot, group, entry, active));
    }

    /** Counts an update of all experts that had tokens, and returns which those are. */
    private static boolean[] count(StateBuckets.Entry entry, long[] tokens) {
        if (tokens != null) {
            entry.countByExpert(tokens.length);
        }
        long[] steps = entry.steps();
        boolean[] active = new boolean[steps.length];
        for (int i = 0; i < steps.length; i++) {
            active[i] = tokens == null || tokens[i] > 0;
            steps[i] += active[i] ? 1 : 0;
        }
        return active;
    }

    /** Cuts a slab into runs that are short enough, each of experts that are treated alike. */
    private void cut(
            Place place, Slot slot, Group group, StateBuckets.Entry entry, boolean[] active) {
        Slab slab = place.slab();
        long[] steps = entry.steps();
        long unit = entry.shape.size() / steps.length;
        long end = slab.start() + slab.length();
        for (long at = slab.start(); at < end; ) {
            int expert = (int) (at / unit);
            long border = unit * nextOther(expert, steps, active);
            long stop = Math.min(Math.min(end, border), at + LONGEST);
            long offset = slab.offset() + at - slab.start();
            Run run = new Run(slot.weight(), slot.gradient(), at, offset, stop - at, steps[expert]);
            if (active[expert]) {
                add(place.bucket(), group, run);
            } else if (decaysIdle && group.decay > 0) {
                add(place.bucket(), new Group(group.learningRate, group.decay, true), run);
            }
            anyIdle |= !active[expert];
            at = stop;
        }
    }

    /** Returns the first expert after this one that is treated differently, or their number. */
    private static int nextOther(int expert, long[] steps, boolean[] active) {
        int next = expert + 1;
        while (next < steps.length
                && active[next] == active[expert]
                && (steps[next] == steps[expert] || !active[expert])) {
            next++;
        }
        return next;
    }

    private void add(Bucket bucket, Group group, Run run) {
        work.computeIfAbsent(bucket.number, k -> new Work(bucket)).add(group, run);
    }

    /** Returns whether there are experts without tokens, whose gradients no run goes through. */
    boolean anyIdle() {
        return anyIdle;
    }

    boolean isEmpty() {
        return work.isEmpty();
    }

    /** Returns the buckets to be updated, in their order. */
    List<Job> jobs() {
        return work.values().stream()
                .map(here -> new Job(here.bucket, here.first, here.last))
                .toList();
    }

    /**
     * Returns the bucket that a later plan will probably begin with, or null: DJL's trainer asks
     * for one parameter at a time, in the same order each step.
     */
    Bucket following() {
        int next = (work.lastKey() + 1) % buckets.count();
        return work.containsKey(next) ? null : buckets.bucket(next);
    }

    /** Returns the runs of a bucket that are to be updated alike. */
    Map<Group, List<Run>> runs(Bucket bucket) {
        return work.get(bucket.number).groups;
    }
}
