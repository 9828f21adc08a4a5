package org.djlmoe.benchmark;

import java.util.concurrent.TimeUnit;
import org.djlmoe.dispatch.ChunkSchedule;
import org.djlmoe.dispatch.DispatchPlan;
import org.djlmoe.dispatch.DispatchWorkload;
import org.djlmoe.dispatch.LeastLoadedPlanner;
import org.openjdk.jmh.annotations.Benchmark;
import org.openjdk.jmh.annotations.BenchmarkMode;
import org.openjdk.jmh.annotations.Fork;
import org.openjdk.jmh.annotations.Measurement;
import org.openjdk.jmh.annotations.Mode;
import org.openjdk.jmh.annotations.OutputTimeUnit;
import org.openjdk.jmh.annotations.Param;
import org.openjdk.jmh.annotations.Scope;
import org.openjdk.jmh.annotations.Setup;
import org.openjdk.jmh.annotations.State;
import org.openjdk.jmh.annotations.Warmup;

/**
 * Time to plan a layer of 256 experts on 64 ranks, and what a rank then does for its own 16,384
 * tokens of 8 routes each.
 *
 * <pre>{@code
 * mvn -q -B -pl integration-tests -am test-compile dependency:build-classpath \
 *     -Dmdep.outputFile=target/classpath -Dmdep.includeScope=test
 * java -cp integration-tests/target/test-classes:$(cat integration-tests/target/classpath) \
 *     org.openjdk.jmh.Main PlannerBenchmark
 * }</pre>
 */
@State(Scope.Benchmark)
@BenchmarkMode(Mode.AverageTime)
@OutputTimeUnit(TimeUnit.MICROSECONDS)
@Fork(1)
@Warmup(iterations = 2, time = 1)
@Measurement(iterations = 3, time = 1)
public class PlannerBenchmark {

    private static final int RANKS = 64;
    private static final int EXPERTS = 256;
    private static final int TOP_K = 8;
    private static final int TOKENS = 16_384;
    private static final int CHUNKS = 4;

    /** The routing. */
    @Param({"80/16", "30/4", "periodic"})
    public String workload;

    private LeastLoadedPlanner planner;
    private long[][] counts;
    private int[] experts;
    private DispatchPlan plan;
    private int[] destinations;

    /** Routes the tokens and counts them. */
    @Setup
    public void route() {
        planner = LeastLoadedPlanner.builder().setRanks(RANKS).setExperts(EXPERTS).build();
        experts = DispatchWorkload.of(workload).experts(TOKENS, TOP_K, EXPERTS, RANKS, CHUNKS);
        counts = new long[RANKS][EXPERTS];
        for (long[] row : counts) {
            for (int e : experts) {
                row[e]++;
            }
        }
        plan = planner.plan(counts);
        destinations = plan.destinations(0, experts);
    }

    /**
     * Plans.
     *
     * @return the plan
     */
    @Benchmark
    public DispatchPlan plan() {
        return planner.plan(counts);
    }

    /**
     * Looks up where the routes of a rank go.
     *
     * @return the destinations
     */
    @Benchmark
    public int[] destinations() {
        return plan.destinations(0, experts);
    }

    /**
     * Deals the tokens of a rank.
     *
     * @return the schedule
     */
    @Benchmark
    public ChunkSchedule dealt() {
        return ChunkSchedule.dealt(0, RANKS, TOKENS, CHUNKS, destinations);
    }
}
