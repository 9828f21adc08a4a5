package org.djlmoe.examples.bench;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import org.djlmoe.dispatch.DispatchPlan;
import org.djlmoe.dispatch.DispatchWorkload;
import org.djlmoe.dispatch.LeastLoadedPlanner;

/**
 * How long the planner takes for a large layer.
 *
 * @param ranks P
 * @param experts E
 * @param milliseconds the median of many plans, of the workload that takes longest
 * @param migrations of that workload's plan
 */
public record PlannerTime(int ranks, int experts, double milliseconds, int migrations) {

    private static final int TOKENS = 16_384;
    private static final int TOP_K = 8;
    private static final int CHUNKS = 4;
    private static final int PLANS = 501;

    /**
     * Measures.
     *
     * @param ranks P
     * @param experts E
     * @return the time
     */
    public static PlannerTime measure(int ranks, int experts) {
        PlannerTime worst = new PlannerTime(ranks, experts, 0, 0);
        LeastLoadedPlanner planner =
                LeastLoadedPlanner.builder().setRanks(ranks).setExperts(experts).build();
        for (DispatchWorkload workload :
                List.of(
                        DispatchWorkload.HOT_80_16,
                        DispatchWorkload.HOT_30_4,
                        DispatchWorkload.PERIODIC)) {
            long[][] counts = new long[ranks][experts];
            for (int e : workload.experts(TOKENS, TOP_K, experts, ranks, CHUNKS)) {
                for (long[] row : counts) {
                    row[e]++;
                }
            }
            // The first half lets the virtual machine compile it.
            List<Double> times = new ArrayList<>();
            DispatchPlan plan = null;
            for (int i = 0; i < 2 * PLANS; i++) {
                long start = System.nanoTime();
                plan = planner.plan(counts);
                if (i >= PLANS) {
                    times.add((System.nanoTime() - start) / 1e6);
                }
            }
            double median = BenchReport.median(times);
            if (median > worst.milliseconds()) {
                worst = new PlannerTime(ranks, experts, median, plan.migrations().size());
            }
        }
        return worst;
    }

    @Override
    public String toString() {
        return String.format(
                Locale.ROOT,
                "planner: %.3f ms for %d experts on %d ranks, median of %d plans with %d migrations",
                milliseconds,
                experts,
                ranks,
                PLANS,
                migrations);
    }
}
