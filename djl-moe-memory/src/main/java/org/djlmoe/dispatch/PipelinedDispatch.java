package org.djlmoe.dispatch;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import java.util.Arrays;
import java.util.List;
import java.util.function.Supplier;
import java.util.stream.IntStream;
import org.djlmoe.dispatch.ChunkSchedule.Membership;
import org.djlmoe.kernel.DispatchKernels;
import org.djlmoe.kernel.ExpertKernels.Weights;
import org.djlmoe.kernel.ExpertScratch;
import org.djlmoe.kernel.TorchKernels;
import org.djlmoe.parallel.ProcessGroup;

/**
 * The experts of one Mixture-of-Experts layer over the ranks of a group, with buffers whose size
 * the router cannot change (PipelinedLLEP).
 *
 * <p>Each rank has its own tokens and its own experts: expert e is at home on rank floor(e P / E).
 * Counts are gathered once a layer; from them every rank makes the same {@link DispatchPlan}, which
 * spreads the routes of overloaded experts over other ranks, and the same {@link ChunkSchedule}.
 * Then the layer runs chunk by chunk: rows go to the experts, the experts compute, the results come
 * back. The rows of the next chunk travel while a chunk computes. A token goes to a rank once,
 * however many of its experts are there, and takes its combine weights along; they are applied
 * there.
 *
 * <p>Nothing sized by the routes outlives its chunk: backward sends the rows once more. Weights
 * that another rank needs are sent once in forward and once in backward, and their gradients go
 * home once.
 *
 * <p>Bound of a layer in chunks: buffers for received rows hold min(P c, 1.5 max(a R / K, 256))
 * rows, with c tokens of a rank in a chunk, R routes a rank on average, and a the larger of alpha
 * and lambda; three buffers forward and five backward. Buffers for rows sent hold c min(k, P - 1):
 * two forward and three backward. Beside them the {@link ExpertScratch}, and lent weights with
 * their gradients. All but the lent weights are the same for every routing. {@link
 * DispatchMode#AUTOMATIC} checks before it begins that no rank receives more than 1.5 max(R_d / K,
 * 256) of its R_d routes in any chunk. A layer in one chunk takes what its rows need. Index
 * arithmetic inside a kernel takes some 60 bytes for each of the k slots of a received row, beside
 * that.
 *
 * <p>With one process there is no exchange and no copy: the experts read the tokens where they are.
 *
 * <p>Everything here is collective: all ranks call the same methods in the same order. What one
 * throws reaches all: a rank that fails aborts the group. Arrays are F32; expert weights may be
 * half precision where they are not trained. Adapters need a group of one.
 *
 * <p>When not to use it: where tokens are few, the exchange costs more than the experts; keep all
 * experts on every rank instead.
 *
 * <p>Source: "Flattening Every Memory Peak in Long-Context Mixture-of-Experts Training" (arXiv
 * 2609.14306). Beyond it: rows are not kept for backward, one row a token and rank, dealt chunks.
 */
public final class PipelinedDispatch {

    private final ProcessGroup group;
    private final int experts;
    private final int chunkTokens;
    private final int maxChunks;
    private final DispatchMode mode;
    private final double alpha;
    private final double lambda;
    private final boolean overlap;
    private final PassObserver observer;
    private final LeastLoadedPlanner planner;
    private DispatchMetrics metrics = new DispatchMetrics(0, 0, 0);

    private PipelinedDispatch(Builder b) {
        group = b.group;
        experts = b.experts;
        chunkTokens = b.chunkTokens;
        maxChunks = b.maxChunks;
        mode = b.mode;
        alpha = b.alpha;
        lambda = b.lambda;
        overlap = b.overlap;
        observer = b.observer;
        LeastLoadedPlanner.Builder p =
                LeastLoadedPlanner.builder()
                        .setRanks(group.size())
                        .setExperts(experts)
                        .optAlpha(alpha)
                        .optLambda(lambda)
                        .optMinPiece(b.minPiece);
        planner = b.maxForeign == 0 ? p.build() : p.optMaxForeign(b.maxForeign).build();
    }

    /**
     * Starts the settings.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Returns the experts that a rank owns.
     *
     * @return their number; the first is that of {@link #firstExpert()}
     */
    public int ownExperts() {
        return DispatchPlan.firstExpert(group.rank() + 1, group.size(), experts) - firstExpert();
    }

    /**
     * Returns the first expert that this rank owns.
     *
     * @return its number in the layer
     */
    public int firstExpert() {
        return DispatchPlan.firstExpert(group.rank(), group.size(), experts);
    }

    /**
     * Agrees with the other ranks on one layer and batch.
     *
     * @param ids INT64 [N, k], the experts of this rank's tokens; N may differ between ranks and be
     *     0
     * @return what forward and backward need
     * @throws IllegalArgumentException if an expert is out of range
     * @throws IllegalStateException if ranks have different settings, or a chunk would be above the
     *     bound
     */
    public DispatchRoute route(NDArray ids) {
        return collective(() -> agree(ids));
    }

    private DispatchRoute agree(NDArray ids) {
        if (ids.getShape().dimension() != 2 || ids.getDataType() != DataType.INT64) {
            throw new IllegalArgumentException(
                    "ids are INT64 [N, k], not " + ids.getDataType() + " " + ids.getShape());
        }
        int tokens = Math.toIntExact(ids.getShape().get(0));
        int k = (int) ids.getShape().get(1);
        int[] routes = Arrays.stream(ids.toLongArray()).mapToInt(this::checked).toArray();
        long[] settings = {experts, k, chunkTokens, maxChunks, mode.ordinal()};
        long[] said = Arrays.copyOf(settings, settings.length + 1 + experts);
        said[settings.length] = tokens;
        for (int e : routes) {
            said[settings.length + 1 + e]++;
        }
        long[][] all = group.allGather(said);
        long largest = 0;
        long[][] counts = new long[all.length][];
        for (int r = 0; r < all.length; r++) {
            checkSettings(r, settings, all[r]);
            largest = Math.max(largest, all[r][settings.length]);
            counts[r] = Arrays.copyOfRange(all[r], settings.length + 1, all[r].length);
        }
        DispatchPlan plan = mode.isPlanned() ? planner.plan(counts) : DispatchPlan.identity(counts);
        int[] destinations = plan.destinations(group.rank(), routes);
        int chunks =
                mode.isChunked() ? ChunkSchedule.numChunks(largest, chunkTokens, maxChunks) : 1;
        Layer layer = new Layer(plan, destinations, tokens, k, chunks, largest);
        DispatchRoute route =
                layer.with(
                        mode.membership() == Membership.DEALT
                                ? layer.dealt()
                                : ChunkSchedule.strided(tokens, chunks));
        if (mode == DispatchMode.AUTOMATIC) {
            if (!ChunkSchedule.withinBound(route.received())) {
                route = layer.with(layer.dealt());
            }
            route.checkBound();
        }
        return route;
    }

    private int checked(long expert) {
        if (expert < 0 || expert >= experts) {
            throw new IllegalArgumentException(
                    "A token is routed to expert " + expert + ", but there are " + experts);
        }
        return (int) expert;
    }

    private void checkSettings(int other, long[] mine, long[] said) {
        String[] names = {"experts", "k", "chunk tokens", "largest number of chunks", "mode"};
        for (int i = 0; i < mine.length; i++) {
            if (mine[i] != said[i]) {
                throw new IllegalStateException(
                        "Rank %d has %s %d, but rank %d has %d: settings must be the same on all ranks"
                                .formatted(group.rank(), names[i], mine[i], other, said[i]));
            }
        }
    }

    /** A layer whose chunks are still to be chosen. */
    private final class Layer {

        private final DispatchPlan plan;
        private final int[] destinations;
        private final int tokens;
        private final int topK;
        private final int chunks;
        private final long largest;

        Layer(
                DispatchPlan plan,
                int[] destinations,
                int tokens,
                int topK,
                int chunks,
                long largest) {
            this.plan = plan;
            this.destinations = destinations;
            this.tokens = tokens;
            this.topK = topK;
            this.chunks = chunks;
            this.largest = largest;
        }

        ChunkSchedule dealt() {
            return ChunkSchedule.dealt(group.rank(), group.size(), tokens, chunks, destinations);
        }

        DispatchRoute with(ChunkSchedule schedule) {
            int ranks = group.size();
            long[][] routes = schedule.routes(ranks, destinations);
            long[][] rows = schedule.rows(ranks, destinations);
            long[] said =
                    IntStream.range(0, 2 * chunks * ranks)
                            .mapToLong(
                                    i -> {
                                        int at = i % (chunks * ranks);
                                        long[][] of = i < chunks * ranks ? routes : rows;
                                        return of[at / ranks][at % ranks];
                                    })
                            .toArray();
            long[][] all = group.allGather(said);
            long[][][] allRoutes = new long[ranks][chunks][];
            long[][][] allRows = new long[ranks][chunks][];
            for (int r = 0; r < ranks; r++) {
                for (int i = 0; i < chunks; i++) {
                    int at = i * ranks;
                    allRoutes[r][i] = Arrays.copyOfRange(all[r], at, at + ranks);
                    at += chunks * ranks;
                    allRows[r][i] = Arrays.copyOfRange(all[r], at, at + ranks);
                }
            }
            return new DispatchRoute(
                    group.rank(),
                    topK,
                    plan,
                    schedule,
                    destinations,
                    allRoutes,
                    allRows,
                    largest,
                    expected());
        }

        /** Routes that a rank may get whatever the router does; 0 where there is no limit. */
        private long expected() {
            if (!mode.isPlanned() || chunks == 1) {
                return 0;
            }
            double slack = Math.max(alpha, Double.isInfinite(lambda) ? 1 : lambda);
            long received =
                    IntStream.range(0, group.size()).mapToLong(plan::received).max().orElse(0);
            return Math.max(received, (long) Math.ceil(slack * plan.total() / group.size()));
        }
    }

    /**
     * Adds what the experts make of the tokens.
     *
     * @param route from {@link #route}
     * @param x [N, H], what the experts get
     * @param ids INT64 [N, k], as given to {@link #route}
     * @param combine [N, k]
     * @param weights this rank's, in the order of {@link Weights}; norm and router are not used
     * @param adapterScale factor of the adapters' products
     * @param y [N, H], added to: y += sum of combine weight * expert(x)
     */
    public void forward(
            DispatchRoute route,
            NDArray x,
            NDArray ids,
            NDArray combine,
            List<NDArray> weights,
            double adapterScale,
            NDArray y) {
        LayerInputs in = new LayerInputs(route, x, ids, combine, weights);
        collective(
                () -> {
                    check(in);
                    if (group.size() == 1) {
                        local(
                                in,
                                false,
                                (tokens, scratch) ->
                                        DispatchKernels.localForward(
                                                x,
                                                tokens,
                                                ids,
                                                combine,
                                                weights,
                                                adapterScale,
                                                scratch,
                                                y));
                    } else {
                        runPass(new ForwardPass(this, in, y));
                    }
                    return null;
                });
    }

    /**
     * Backward of {@link #forward}.
     *
     * @param route of the forward pass
     * @param x [N, H]
     * @param ids INT64 [N, k]
     * @param combine [N, k]
     * @param weights this rank's
     * @param adapterScale factor of the adapters' products
     * @param g gradient of y [N, H]
     * @param gradients of the weights, F32, added to; {@link TorchKernels#nothing} where frozen, on
     *     all ranks alike
     * @param dx [N, H], added to
     * @param dcombine [N, k], filled
     */
    public void backward(
            DispatchRoute route,
            NDArray x,
            NDArray ids,
            NDArray combine,
            List<NDArray> weights,
            double adapterScale,
            NDArray g,
            List<NDArray> gradients,
            NDArray dx,
            NDArray dcombine) {
        LayerInputs in = new LayerInputs(route, x, ids, combine, weights);
        collective(
                () -> {
                    check(in);
                    if (group.size() == 1) {
                        local(
                                in,
                                true,
                                (tokens, scratch) ->
                                        DispatchKernels.localBackward(
                                                x,
                                                tokens,
                                                g,
                                                ids,
                                                combine,
                                                weights,
                                                gradients,
                                                adapterScale,
                                                scratch,
                                                dx,
                                                dcombine));
                    } else {
                        checkTrained(gradients);
                        runPass(new BackwardPass(this, in, g, gradients, dx, dcombine));
                    }
                    return null;
                });
    }

    private void check(LayerInputs in) {
        NDArray down = in.weights().get(Weights.DOWN.ordinal());
        if (down.getShape().get(0) != ownExperts()) {
            throw new IllegalArgumentException(
                    "Rank %d of %d has %d of %d experts, but the weights given are those of %d"
                            .formatted(
                                    group.rank(),
                                    group.size(),
                                    ownExperts(),
                                    experts,
                                    down.getShape().get(0)));
        }
        if (in.x().getShape().get(0) != in.route().tokens()) {
            throw new IllegalArgumentException(
                    "x has %d rows, but %d tokens were routed"
                            .formatted(in.x().getShape().get(0), in.route().tokens()));
        }
        if (in.x().getDataType() != DataType.FLOAT32) {
            throw new IllegalArgumentException(
                    "x is F32, not " + in.x().getDataType() + ": convert it before the layer");
        }
        if (group.size() > 1 && in.weights().get(Weights.GATE_UP_A.ordinal()).size() > 0) {
            throw new IllegalArgumentException(
                    "Experts with LoRA adapters cannot be dispatched across ranks: merge the"
                            + " adapters, or train them with a group of one process");
        }
    }

    /** A helper must send home what the owner waits for. */
    private void checkTrained(List<NDArray> gradients) {
        long[] trained =
                LentExperts.MOVED.stream()
                        .mapToLong(w -> gradients.get(w.ordinal()).size() > 0 ? 1 : 0)
                        .toArray();
        for (long[] other : group.allGather(trained)) {
            if (!Arrays.equals(trained, other)) {
                throw new IllegalStateException(
                        "Ranks train different weights: freeze an expert weight on all ranks or on"
                                + " none");
            }
        }
    }

    private interface LocalChunk {
        void run(NDArray tokens, ExpertScratch scratch);
    }

    private void local(LayerInputs in, boolean backward, LocalChunk chunk) {
        DispatchRoute route = in.route();
        long rows = Math.max(1, route.chunkTokens());
        try (PassMemory memory = new PassMemory(in.x());
                ExpertScratch scratch =
                        backward
                                ? ExpertScratch.backward(
                                        memory.manager(), rows, route.topK(), in.weights())
                                : ExpertScratch.forward(
                                        memory.manager(), rows, route.topK(), in.weights())) {
            memory.add(scratch.bytes() + 8 * rows);
            for (int i = 0; i < route.chunks(); i++) {
                try (NDManager manager = memory.manager().newSubManager()) {
                    long[] tokens = route.tokens(i, 0);
                    if (tokens.length > 0) {
                        observer.computes(i);
                        chunk.run(memory.indices(manager, tokens), scratch);
                    }
                }
            }
            count(new DispatchMetrics(0, 0, memory.peak()));
        }
    }

    private void runPass(DispatchPass pass) {
        try {
            pass.run();
            count(pass.metrics());
        } catch (RuntimeException | Error e) {
            // The others must know before this rank can wait for them to let go of its memory.
            group.abort(e);
            throw e;
        } finally {
            pass.close();
        }
    }

    private void count(DispatchMetrics pass) {
        metrics =
                new DispatchMetrics(
                        metrics.rowBytesSent() + pass.rowBytesSent(),
                        metrics.weightBytesSent() + pass.weightBytesSent(),
                        Math.max(metrics.peakBufferBytes(), pass.peakBufferBytes()));
    }

    private <T> T collective(Supplier<T> task) {
        try {
            return task.get();
        } catch (RuntimeException | Error e) {
            group.abort(e);
            throw e;
        }
    }

    /**
     * Returns what this rank's passes have cost so far.
     *
     * @return sums of bytes sent, and the largest peak
     */
    public DispatchMetrics metrics() {
        return metrics;
    }

    ProcessGroup group() {
        return group;
    }

    boolean overlaps() {
        return overlap;
    }

    PassObserver observer() {
        return observer;
    }

    /** Settings of a dispatch, the same on all ranks. */
    public static final class Builder {

        private ProcessGroup group;
        private int experts;
        private int chunkTokens = 4096;
        private int maxChunks = 10;
        private DispatchMode mode = DispatchMode.AUTOMATIC;
        private double alpha = 1.0;
        private double lambda = 1.3;
        private long minPiece = 1024;
        private int maxForeign;
        private boolean overlap = true;
        private PassObserver observer = chunk -> {};

        private Builder() {}

        /**
         * Sets the ranks.
         *
         * @param value the group, which stays the caller's to close
         * @return this builder
         */
        public Builder setGroup(ProcessGroup value) {
            group = value;
            return this;
        }

        /**
         * Sets the number of experts of the layer, over all ranks.
         *
         * @param value E, at least one a rank
         * @return this builder
         */
        public Builder setExperts(int value) {
            experts = value;
            return this;
        }

        /**
         * Sets how many tokens of a rank a chunk should have; default: 4096.
         *
         * @param value c, at least 1
         * @return this builder
         */
        public Builder optChunkTokens(int value) {
            chunkTokens = value;
            return this;
        }

        /**
         * Sets the largest number of chunks, where tokens are many; default: 10.
         *
         * @param value Kmax, at least 1
         * @return this builder
         */
        public Builder optMaxChunks(int value) {
            maxChunks = value;
            return this;
        }

        /**
         * Sets how routes are spread and chunks are made; default: {@link DispatchMode#AUTOMATIC}.
         *
         * @param value the mode
         * @return this builder
         */
        public Builder optMode(DispatchMode value) {
            mode = value;
            return this;
        }

        /**
         * Sets how far a rank may be above the mean; default: 1.0. See {@link
         * LeastLoadedPlanner.Builder#optAlpha}.
         *
         * @param value at least 1
         * @return this builder
         */
        public Builder optAlpha(double value) {
            alpha = value;
            return this;
        }

        /**
         * Sets the imbalance from which experts are moved; default: 1.3. See {@link
         * LeastLoadedPlanner.Builder#optLambda}.
         *
         * @param value at least 0; up to 1 always plans, infinity never
         * @return this builder
         */
        public Builder optLambda(double value) {
            lambda = value;
            return this;
        }

        /**
         * Sets m, the smallest piece that the planner cuts off; default: 1024.
         *
         * @param value routes, at least 1
         * @return this builder
         */
        public Builder optMinPiece(long value) {
            minPiece = value;
            return this;
        }

        /**
         * Sets how many experts a rank may compute for others; default: as many as it has.
         *
         * @param value F, at least 1
         * @return this builder
         */
        public Builder optMaxForeign(int value) {
            if (value < 1) {
                throw new IllegalArgumentException("maxForeign is " + value + ": set 1 or more");
            }
            maxForeign = value;
            return this;
        }

        /**
         * Sets whether rows travel while experts compute; default: true. Without, every exchange is
         * waited for: for comparison.
         *
         * @param value whether
         * @return this builder
         */
        public Builder optOverlap(boolean value) {
            overlap = value;
            return this;
        }

        Builder optObserver(PassObserver value) {
            observer = value;
            return this;
        }

        /**
         * Checks the settings.
         *
         * @return the dispatch, for any number of layers of the same shape
         */
        public PipelinedDispatch build() {
            if (group == null) {
                throw new IllegalArgumentException(
                        "setGroup is missing: a single process is a SoloGroup");
            }
            if (experts < group.size() || experts > 1 << 24) {
                throw new IllegalArgumentException(
                        experts
                                + " experts for "
                                + group.size()
                                + " ranks: set at least one a rank, and at most 2^24");
            }
            if (chunkTokens < 1 || maxChunks < 1) {
                throw new IllegalArgumentException(
                        "chunkTokens is %d and maxChunks %d: set 1 or more"
                                .formatted(chunkTokens, maxChunks));
            }
            return new PipelinedDispatch(this);
        }
    }
}
