package org.djlmoe.plan;

import java.util.ArrayList;
import java.util.Collections;
import java.util.Comparator;
import java.util.EnumMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Set;
import java.util.function.ToLongFunction;
import org.djlmoe.model.MoeConfig;

/**
 * What training or evaluating a {@code MoeDecoder} under a {@code BoundedTrainer} on the CPU will
 * hold at its peak, computed before anything is allocated.
 *
 * <p>The idea: what lives when is fixed by the segments' order, so each array is counted in the
 * phases in which it is alive. What lives within a kernel is found by going through its text. The
 * peak is the runtime's base and the largest sum of any phase. Beside each line stands what plain
 * automatic differentiation of the same operations (fused attention included) would hold.
 *
 * <p>Routing has no part in it: what the experts need is the same for any router, or bounded.
 *
 * <p>On a CPU an allocator that keeps freed memory holds more than the arrays; the plan has a
 * measured allowance for its holes, the one line that is no count of tensors. The plan's bound is
 * hard with an allocator that returns memory.
 *
 * <p>Over several ranks the plan is that of one rank, of the experts' dispatch alone, in its
 * default mode: embedding and vocabulary projection lie whole on each.
 *
 * <p>When not to use it: for gradients collected without a tape, which are not bounded; for
 * boundaries that are offloaded.
 */
public final class MemoryPlan {

    /** What a process with a heap of 64 MB holds before there is a model. */
    public static final long RUNTIME_BYTES = runtimeBytes(64 * Megabytes.MB);

    /**
     * How much the native libraries and the virtual machine grow once a real model runs, beyond
     * arrays and the heap. Measured: up to 8 MB after 3 steps, 17 MB after 120, no more after 300.
     */
    static final long LIBRARY_BYTES = 16 * Megabytes.MB;

    private static final String RUNTIME = "runtime";
    private static final String LIBRARIES = "native libraries";
    private static final String HOLES = "allocator's holes";
    private static final Set<String> OVERHEADS = Set.of(RUNTIME, LIBRARIES, HOLES);

    private static final long F32 = 4;
    private static final long I64 = 8;

    private final MoeConfig config;
    private final PlanSettings settings;
    private final List<Component> components;
    private final Map<Phase, Long> phases;
    private final Phase peakPhase;

    private MemoryPlan(MoeConfig config, PlanSettings given) {
        PlanSettings settings = given;
        if (given.sharedWidth() == 0 && config.sharedExpertIntermediateSize() > 0) {
            settings =
                    given.toBuilder()
                            .optSharedExperts(
                                    config.sharedExpertIntermediateSize(),
                                    config.sharedExpertGated())
                            .build();
        }
        this.config = config;
        this.settings = settings;
        this.components = Collections.unmodifiableList(new Lines(config, settings).list());
        EnumMap<Phase, Long> sums = new EnumMap<>(Phase.class);
        for (Phase phase : phasesOf(settings)) {
            sums.put(phase, components.stream().mapToLong(c -> c.bytes(phase)).sum());
        }
        this.phases = Collections.unmodifiableMap(sums);
        this.peakPhase = Collections.max(sums.entrySet(), Map.Entry.comparingByValue()).getKey();
    }

    /**
     * Computes a plan.
     *
     * @param config the model
     * @param settings the run
     * @return the plan
     * @throws IllegalArgumentException if there are more ranks than experts
     */
    public static MemoryPlan of(MoeConfig config, PlanSettings settings) {
        if (settings.ranks() > config.numExperts()) {
            throw new IllegalArgumentException(
                    settings.ranks()
                            + " ranks for "
                            + config.numExperts()
                            + " experts: take at most one rank an expert");
        }
        return new MemoryPlan(config, settings);
    }

    /**
     * Returns what a process holds before there is a model: its heap, and 96 MB for the virtual
     * machine, DJL, PyTorch and compiled kernels (measured on Linux x86_64).
     *
     * <p>The heap counts whole, since in the long run the virtual machine touches all of it. A
     * small one ({@code -Xmx64m -XX:+AlwaysPreTouch}) costs nothing here: arrays lie outside it.
     *
     * @param heapBytes the heap's limit, {@code -Xmx}
     * @return bytes, for {@link PlanSettings.Builder#optRuntimeBytes}
     */
    public static long runtimeBytes(long heapBytes) {
        return heapBytes + 96 * Megabytes.MB;
    }

    /**
     * Finds the largest chunks that fit a budget: of the tokens of a MoE chunk and of a vocabulary
     * block, each the settings' number or the largest power of two below it that fits.
     *
     * @param config the model
     * @param settings the run; its chunk sizes are upper limits
     * @param budget the budget
     * @return a plan within the budget, whose settings have the chunk sizes found
     * @throws BudgetExceededException if none fits; the message names the largest part and a change
     *     that would fit
     */
    public static MemoryPlan fit(MoeConfig config, PlanSettings settings, MemoryBudget budget) {
        return new BudgetSearch(config, budget).fit(settings);
    }

    private static List<Phase> phasesOf(PlanSettings settings) {
        List<Phase> all = new ArrayList<>(List.of(Phase.values()));
        if (settings.evaluation()) {
            all.removeIf(phase -> !phase.isForward());
        }
        return all;
    }

    /**
     * Returns the model.
     *
     * @return its configuration
     */
    public MoeConfig config() {
        return config;
    }

    /**
     * Returns the run.
     *
     * @return its settings
     */
    public PlanSettings settings() {
        return settings;
    }

    /**
     * Returns the lines of the plan.
     *
     * @return an immutable list, the runtime's base first
     */
    public List<Component> components() {
        return components;
    }

    /**
     * Returns the bytes that the process holds in each phase, the base included.
     *
     * @return an immutable map; without backward phases for an evaluation
     */
    public Map<Phase, Long> phases() {
        return phases;
    }

    /**
     * Returns the phase of the peak.
     *
     * @return the phase in which most is held
     */
    public Phase peakPhase() {
        return peakPhase;
    }

    /**
     * Returns the peak of the process.
     *
     * @return bytes, the base included
     */
    public long peakBytes() {
        return phases.get(peakPhase);
    }

    /**
     * Returns the peak above the runtime's base: what a measurement that starts before the model is
     * made sees.
     *
     * @return bytes
     */
    public long peakAboveBase() {
        return peakBytes() - settings.runtimeBytes();
    }

    /**
     * Returns the peak that plain automatic differentiation of the same operations would have.
     *
     * @return bytes, the base included
     */
    public long unboundedBytes() {
        return components.stream().mapToLong(Component::unbounded).sum();
    }

    /**
     * Returns the component that needs most at the peak, of those that model and settings decide:
     * neither the runtime's base, nor the libraries, nor the allocator's holes.
     *
     * @return the component
     */
    public Component largest() {
        return components.stream()
                .filter(c -> !OVERHEADS.contains(c.name()))
                .max(Comparator.comparingLong(c -> c.bytes(peakPhase)))
                .orElseThrow();
    }

    /**
     * Returns the plan as maps, lists, strings and numbers, for Gson.
     *
     * @return a new map
     */
    public Map<String, Object> toMap() {
        Map<String, Object> map = new LinkedHashMap<>();
        map.put("peakBytes", peakBytes());
        map.put("unboundedBytes", unboundedBytes());
        map.put("runtimeBytes", settings.runtimeBytes());
        map.put("peakPhase", peakPhase.name());
        Map<String, Object> run = new LinkedHashMap<>();
        run.put("batch", settings.batch());
        run.put("sequence", settings.sequence());
        run.put("evaluation", settings.evaluation());
        run.put("trained", settings.trained().name());
        run.put("loraRank", settings.loraRank());
        run.put("ranks", settings.ranks());
        run.put("alpha", settings.alpha());
        run.put("lambda", number(settings.lambda()));
        run.put("maxForeign", settings.maxForeign());
        run.put("trainsMask", settings.trainsMask());
        run.put("excludedExperts", settings.excludedExperts());
        run.put("sharedWidth", settings.sharedWidth());
        run.put("frozenHalf", settings.frozenHalf());
        run.put("stateTier", settings.stateTier().name());
        run.put("moeChunkTokens", settings.moeChunkTokens());
        run.put("maxChunks", settings.maxChunks());
        run.put("vocabBlockTokens", settings.vocabBlockTokens());
        run.put("allocator", settings.allocator().name());
        map.put("settings", run);
        Map<String, Object> sums = new LinkedHashMap<>();
        phases.forEach((phase, bytes) -> sums.put(phase.name(), bytes));
        map.put("phases", sums);
        List<Map<String, Object>> lines = new ArrayList<>();
        for (Component component : components) {
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("name", component.name());
            line.put("bytes", component.bytes());
            line.put("bytesAtPeak", component.bytes(peakPhase));
            line.put("unbounded", component.unbounded());
            line.put("formula", component.formula());
            Map<String, Object> alive = new LinkedHashMap<>();
            component.byPhase().forEach((phase, bytes) -> alive.put(phase.name(), bytes));
            line.put("phases", alive);
            lines.add(line);
        }
        map.put("components", lines);
        return map;
    }

    /** JSON has no infinity. */
    private static Object number(double value) {
        return Double.isInfinite(value) ? "infinity" : (Object) value;
    }

    /** Draws the plan as a table in MB of 2^20 bytes. */
    @Override
    public String toString() {
        StringBuilder out = new StringBuilder();
        out.append(
                String.format(
                        Locale.ROOT,
                        "Memory plan, %s: %d x %d tokens, MoE chunks of %d, vocabulary blocks of %d"
                                + " (MB)%n",
                        settings.evaluation() ? "evaluation" : "training",
                        settings.batch(),
                        settings.sequence(),
                        settings.chunk(),
                        Math.min(settings.vocabBlockTokens(), settings.tokens())));
        if (settings.ranks() > 1) {
            out.append(
                    String.format(
                            Locale.ROOT,
                            "One of %d ranks, automatic dispatch, alpha %s, lambda %s: at most %d"
                                    + " experts lent%n",
                            settings.ranks(),
                            settings.alpha(),
                            number(settings.lambda()),
                            KernelScratch.lent(config, settings)));
        }
        if (settings.trainsMask()) {
            out.append(
                    String.format(
                            Locale.ROOT,
                            "An expert mask is learnt straight through, %d dropped experts a token"
                                    + " run along%n",
                            settings.excludedExperts()));
        }
        String row = "%-28s %9s %9s %10s  %s%n";
        out.append(String.format(row, "", "most", "at peak", "unbounded", ""));
        for (Component component : components) {
            out.append(
                    String.format(
                            row,
                            component.name(),
                            Megabytes.of(component.bytes()),
                            Megabytes.of(component.bytes(peakPhase)),
                            Megabytes.of(component.unbounded()),
                            component.formula()));
        }
        out.append(
                String.format(
                        row,
                        "peak",
                        "",
                        Megabytes.of(peakBytes()),
                        Megabytes.of(unboundedBytes()),
                        "in phase: " + peakPhase));
        for (Map.Entry<Phase, Long> phase : phases.entrySet()) {
            out.append(
                    String.format(
                            row,
                            "  " + phase.getKey(),
                            "",
                            Megabytes.of(phase.getValue()),
                            "",
                            ""));
        }
        return out.toString().replaceAll("[ ]+(\r?\n)", "$1");
    }

    /** Writes the lines of a plan. */
    private static final class Lines {

        private static final Set<Phase> BACKWARD =
                Set.of(Phase.BACKWARD_NORM, Phase.BACKWARD_MOE, Phase.BACKWARD_ATTENTION);

        private final MoeConfig config;
        private final PlanSettings settings;
        private final ParameterCounts counts;
        private final List<Component> lines = new ArrayList<>();
        private final boolean training;
        private final boolean all;
        private final long tokens;
        private final long rows;
        private final long layers;

        Lines(MoeConfig config, PlanSettings settings) {
            this.config = config;
            this.settings = settings;
            counts = ParameterCounts.of(config, settings);
            training = !settings.evaluation();
            all = settings.trained() == PlanSettings.Trained.ALL;
            tokens = settings.tokens();
            rows = tokens * config.hiddenSize() * F32;
            layers = config.numLayers();
        }

        List<Component> list() {
            always(RUNTIME, "virtual machine, engine, compiled kernels", settings.runtimeBytes());
            always(
                    LIBRARIES,
                    "packed matrices, threads' buffers, compiled code: a measured allowance",
                    LIBRARY_BYTES);
            weights();
            activations();
            scratch();
            loss();
            if (training) {
                long squares = Math.min(1L << 17, counts.largest()) * 8;
                add(
                        "optimizer scratch",
                        "squares of a gradient, at most 2^17 numbers x 8 at a time",
                        squares,
                        phase -> phase == Phase.STEP ? squares : 0);
            }
            if (settings.allocator() == PlanSettings.Allocator.KEEPS) {
                long holes = transientPeak();
                always(
                        HOLES,
                        "freed memory kept where the next array does not fit; as much as the most"
                                + " that comes and goes, an estimate",
                        holes);
            }
            return lines;
        }

        /**
         * What is alive in the fullest phase, less what is alive in all phases. Runs of eight
         * shapes held 0.7 to 1.6 times as much in holes after three steps. It grows: of 4096 tokens
         * and 8 experts, to 2.2 times after 40 steps. So over long runs this line is an estimate
         * and no bound.
         */
        private long transientPeak() {
            long always = 0;
            for (Component line : lines) {
                always += phasesOf(settings).stream().mapToLong(line::bytes).min().orElse(0);
            }
            long most = 0;
            for (Phase phase : phasesOf(settings)) {
                most = Math.max(most, lines.stream().mapToLong(c -> c.bytes(phase)).sum());
            }
            return most - always;
        }

        private void add(
                String name, String formula, long unbounded, ToLongFunction<Phase> bytesIn) {
            Map<Phase, Long> byPhase = new EnumMap<>(Phase.class);
            for (Phase phase : phasesOf(settings)) {
                byPhase.put(phase, bytesIn.applyAsLong(phase));
            }
            Component line = new Component(name, formula, unbounded, byPhase);
            if (line.bytes() > 0) {
                lines.add(line);
            }
        }

        private void always(String name, String formula, long bytes) {
            add(name, formula, bytes, phase -> bytes);
        }

        private void weights() {
            long experts = counts.experts();
            long small = counts.routers() + counts.adapters();
            long trained = all ? experts + small + counts.other() : small;
            always(
                    all ? "weights" : "weights that train",
                    all ? "all parameters x 4" : "routers and adapters x 4",
                    trained * F32);
            if (!all) {
                boolean half = settings.frozenHalf();
                always(
                        "frozen weights",
                        half ? "experts x 2, the rest x 4" : "the rest x 4",
                        experts * (half ? 2 : F32) + counts.other() * F32);
            }
            if (training) {
                always("gradients", "of what trains x 4", trained * F32);
                if (settings.stateTier() == PlanSettings.StateTier.HOST) {
                    always("optimizer state", "two numbers of what trains x 4", 2 * trained * F32);
                } else if (settings.stateTier() == PlanSettings.StateTier.NONE) {
                    add(
                            "first gradient",
                            "zeros as large as the largest parameter that trains, in the first"
                                    + " backward",
                            counts.largest() * F32,
                            phase -> BACKWARD.contains(phase) ? counts.largest() * F32 : 0);
                }
            }
        }

        private void activations() {
            if (!training) {
                add(
                        "segment input and output",
                        "2 x [N, H]",
                        2 * rows,
                        phase -> phase == Phase.LOSS ? rows : 2 * rows);
                long routes = tokens * config.topK() * (I64 + F32);
                add(
                        "routing",
                        "ids x 8 and combine weights x 4 of a layer",
                        routes,
                        phase -> phase == Phase.FORWARD_MOE ? routes : 0);
                return;
            }
            add(
                    "boundaries",
                    "(2 x layers + 1) x [N, H], what segments keep until backward",
                    (2 * layers + 1) * rows,
                    phase -> boundaries(phase) * rows);
            long routes = layers * tokens * config.topK() * (I64 + F32);
            add(
                    "routing",
                    "layers x N x k ids x 8 and combine weights x 4",
                    routes,
                    phase -> phase == Phase.STEP ? 0 : routes);
            add(
                    "final hidden states",
                    "[N, H], the prediction, until the batch is closed",
                    rows,
                    phase ->
                            phase == Phase.FORWARD_ATTENTION || phase == Phase.FORWARD_MOE
                                    ? 0
                                    : rows);
            add(
                    "segment outputs, gradients",
                    "forward the output, backward the gradients of output and input, [N, H] each",
                    2 * rows,
                    phase -> {
                        switch (phase) {
                            case FORWARD_ATTENTION:
                            case FORWARD_MOE:
                                return rows;
                            case BACKWARD_NORM:
                            case BACKWARD_MOE:
                            case BACKWARD_ATTENTION:
                                return 2 * rows;
                            default:
                                return 0;
                        }
                    });
        }

        private long boundaries(Phase phase) {
            switch (phase) {
                case FORWARD_ATTENTION:
                case BACKWARD_ATTENTION:
                    return 2 * layers - 1;
                case FORWARD_MOE:
                case BACKWARD_MOE:
                    return 2 * layers;
                case STEP:
                    return 0;
                default:
                    return 2 * layers + 1;
            }
        }

        private void scratch() {
            long h = config.hiddenSize();
            long i = config.intermediateSize();
            long r = settings.loraRank();
            long shared = settings.sharedWidth();
            long k = config.topK();
            long queries = (long) config.numHeads() * config.headDim();
            long attentionForward = KernelScratch.attentionForward(config, settings);
            long attentionBackward =
                    training ? KernelScratch.attentionBackward(config, settings) : 0;
            add(
                    "attention",
                    "norm, heads, attended values, gradients of max(4096, S) tokens",
                    training
                            ? layers * tokens * F32 * (2 * h + 4 * queries + config.numHeads())
                            : attentionForward,
                    phase ->
                            phase == Phase.FORWARD_ATTENTION
                                    ? attentionForward
                                    : phase == Phase.BACKWARD_ATTENTION ? attentionBackward : 0);
            long moeForward = KernelScratch.moeForward(config, settings);
            long moeBackward = training ? KernelScratch.moeBackward(config, settings) : 0;
            add(
                    "experts",
                    "routes by expert; inputs, gate, up, gradients of a block of its rows",
                    training
                            ? layers
                                    * tokens
                                    * F32
                                    * (2 * h
                                            + config.numExperts()
                                            + k * (2 * h + 4 * i + 2 * r)
                                            + (shared > 0 ? 2 * h + 4 * shared : 0))
                            : moeForward,
                    phase ->
                            phase == Phase.FORWARD_MOE
                                    ? moeForward
                                    : phase == Phase.BACKWARD_MOE ? moeBackward : 0);
            exchange();
            long normForward = KernelScratch.normForward(config, settings);
            long normBackward = training ? KernelScratch.normBackward(config, settings) : 0;
            add(
                    "final norm",
                    "256 Ki elements, or a row, before and after the weight, their gradients",
                    training ? rows : normForward,
                    phase ->
                            phase == Phase.FORWARD_NORM
                                    ? normForward
                                    : phase == Phase.BACKWARD_NORM ? normBackward : 0);
        }

        /** What several ranks need beside one. */
        private void exchange() {
            long k = config.topK();
            moePhases(
                    "dispatch rows",
                    "3 received and 2 sent forward, 5 and 3 backward, each of a chunk; indices",
                    (training ? layers : 1) * 2 * tokens * k * config.hiddenSize() * F32,
                    KernelScratch.dispatchRows(config, settings, false)
                            + KernelScratch.dispatchGrouping(config, settings),
                    KernelScratch.dispatchRows(config, settings, true)
                            + KernelScratch.dispatchGrouping(config, settings));
            moePhases(
                    "lent experts",
                    KernelScratch.lent(config, settings)
                            + " at most, 3 x H x I each, and backward their gradients",
                    0,
                    KernelScratch.lentExperts(config, settings, false),
                    KernelScratch.lentExperts(config, settings, true));
            long normed = KernelScratch.dispatchNormed(config, settings);
            moePhases("normed rows", "[N, H], what is dispatched", 0, normed, normed);
        }

        private void moePhases(
                String name, String formula, long unbounded, long forward, long backward) {
            add(
                    name,
                    formula,
                    unbounded,
                    phase ->
                            phase == Phase.FORWARD_MOE
                                    ? forward
                                    : phase == Phase.BACKWARD_MOE ? backward : 0);
        }

        private void loss() {
            long vocab = config.vocabSize();
            long block = Math.min(settings.vocabBlockTokens(), tokens);
            long logits = block * vocab * F32 + KernelScratch.vocab(config, settings);
            add(
                    "logits",
                    "block x (V + 2 H) x 4; unbounded: logits, their log-softmax and gradient, N x V"
                            + " each",
                    (training ? 3 : 2) * tokens * vocab * F32,
                    phase -> phase == Phase.LOSS ? logits : 0);
            long gradients = rows + (all ? vocab * config.hiddenSize() * F32 : 0);
            if (training) {
                add(
                        "loss gradients",
                        all ? "[N, H] and [V, H]" : "[N, H]",
                        gradients,
                        phase ->
                                phase == Phase.LOSS || phase == Phase.BACKWARD_LOSS
                                        ? gradients
                                        : 0);
            }
            long perToken = tokens * (4 * I64 + 3 * F32);
            always("tokens", "ids, labels, positions, losses, 44 bytes a token", perToken);
        }
    }
}
