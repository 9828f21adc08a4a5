package org.djlmoe.plan;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.google.gson.Gson;
import com.google.gson.JsonObject;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.UnaryOperator;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.model.MoeConfig;
import org.junit.jupiter.api.Test;

class MemoryPlanTest {

    private static final long MB = 1 << 20;
    private static final int ONE_MORE_EXPERT = 3;

    private static MoeConfig.Builder tiny() {
        return MoeConfig.builder()
                .setVocabSize(20)
                .setHiddenSize(8)
                .setIntermediateSize(6)
                .setNumLayers(2)
                .setNumHeads(2)
                .optNumKeyValueHeads(1)
                .setNumExperts(4)
                .setTopK(2);
    }

    private static PlanSettings.Builder run() {
        return PlanSettings.builder()
                .setBatch(2)
                .setSequence(16)
                .optAllocator(PlanSettings.Allocator.RETURNS)
                .optRuntimeBytes(0);
    }

    private static Component line(MemoryPlan plan, String name) {
        Optional<Component> found =
                plan.components().stream().filter(c -> c.name().equals(name)).findFirst();
        return found.orElseThrow(() -> new AssertionError("no line " + name));
    }

    private static Map<String, Long> sizes(MemoryPlan plan) {
        Map<String, Long> sizes = new LinkedHashMap<>();
        plan.components().forEach(c -> sizes.put(c.name(), c.bytes()));
        return sizes;
    }

    /** N = 32, H = 8: [N, H] has 1024 bytes. A layer has 816 parameters, all else 328. */
    @Test
    void of_tinyTraining_isTheSumByHand() {
        MemoryPlan plan = MemoryPlan.of(tiny().build(), run().build());
        Map<String, Long> expected = new LinkedHashMap<>();
        expected.put("native libraries", MemoryPlan.LIBRARY_BYTES);
        expected.put("weights", 4L * 1960);
        expected.put("gradients", 4L * 1960);
        expected.put("optimizer state", 8L * 1960);
        expected.put("boundaries", 5L * 1024);
        expected.put("routing", 2L * 32 * 2 * 12);
        expected.put("final hidden states", 1024L);
        expected.put("segment outputs, gradients", 2048L);
        // h, 3 heads' arrays, out, lse, gradients of out, q, k, v
        expected.put("attention", 1024L + 3 * 1024 + 1024 + 256 + 1024 + 3 * 1024);
        // 5 I + 2 H numbers for each of 32 rows; order, rows and weights of the routes, gradients
        // of the weights by expert and by token, six arrays of logits
        expected.put("experts", 32L * 46 * 4 + 1280 + 2 * 256 + 6 * 512);
        expected.put("final norm", 3L * 1024);
        expected.put("logits", 32L * 20 * 4 + 2 * 1024);
        expected.put("loss gradients", 1024L + 160 * 4);
        expected.put("tokens", 32L * 44);
        expected.put("optimizer scratch", 384L * 8);
        assertEquals(expected, sizes(plan));

        long always = MemoryPlan.LIBRARY_BYTES + 16 * 1960 + 32 * 44;
        Map<Phase, Long> phases = new LinkedHashMap<>();
        phases.put(Phase.FORWARD_ATTENTION, always + 3072 + 1536 + 1024 + 4352);
        phases.put(Phase.FORWARD_MOE, always + 4096 + 1536 + 1024 + 5632);
        phases.put(Phase.FORWARD_NORM, always + 5120 + 1536 + 1024 + 2048);
        phases.put(Phase.LOSS, always + 5120 + 1536 + 1024 + 4608 + 1664);
        phases.put(Phase.BACKWARD_LOSS, always + 5120 + 1536 + 1024 + 1664);
        phases.put(Phase.BACKWARD_NORM, always + 5120 + 1536 + 1024 + 2048 + 3072);
        phases.put(Phase.BACKWARD_MOE, always + 4096 + 1536 + 1024 + 2048 + 10752);
        phases.put(Phase.BACKWARD_ATTENTION, always + 3072 + 1536 + 1024 + 2048 + 9472);
        phases.put(Phase.STEP, always + 1024 + 3072);
        assertEquals(phases, plan.phases());
        assertEquals(Phase.BACKWARD_MOE, plan.peakPhase());
        assertEquals(always + 19456, plan.peakBytes());
        // three N x V
        assertEquals(3 * 32 * 20 * 4, line(plan, "logits").unbounded());
    }

    @Test
    void of_evaluation_hasNoGradientsAndTwoHiddenArrays() {
        MemoryPlan plan = MemoryPlan.of(tiny().build(), run().optEvaluation(true).build());
        assertEquals(2 * 1024, line(plan, "segment input and output").bytes());
        assertFalse(plan.phases().containsKey(Phase.BACKWARD_MOE));
        assertTrue(sizes(plan).keySet().stream().noneMatch(n -> n.contains("gradient")));
        assertEquals(
                MemoryPlan.LIBRARY_BYTES + 4 * 1960 + 32 * 44 + 2048 + 5120 + 32 * 2 * 12,
                plan.phases().get(Phase.FORWARD_MOE));
    }

    @Test
    void of_adapters_onlyRoutersAndAdaptersHaveGradientsAndState() {
        MemoryPlan plan = MemoryPlan.of(tiny().build(), run().optAdapters(3).build());
        long trained = 2 * (32 + 4 * 3 * (8 + 12 + 6 + 8));
        assertEquals(4 * trained, line(plan, "weights that train").bytes());
        assertEquals(4 * trained, line(plan, "gradients").bytes());
        assertEquals(8 * trained, line(plan, "optimizer state").bytes());
        assertEquals(4 * (1960 - 2 * 32), line(plan, "frozen weights").bytes());
        assertEquals(1024, line(plan, "loss gradients").bytes());

        MemoryPlan half =
                MemoryPlan.of(tiny().build(), run().optAdapters(3).optFrozenHalf(true).build());
        long experts = 2 * (384 + 192);
        assertEquals(4 * (1960 - 64) - 2 * experts, line(half, "frozen weights").bytes());
    }

    @Test
    void of_sharedExperts_countTheirWeightsAndWidenTheScratch() {
        MemoryPlan without = MemoryPlan.of(tiny().build(), run().build());
        MemoryPlan gated = MemoryPlan.of(tiny().build(), run().optSharedExperts(10, true).build());
        long added = 2 * (3 * 8 * 10 + 8);
        assertEquals(4 * (1960 + added), line(gated, "weights").bytes());
        // 5 numbers a row for each of the columns that they are wider than I = 6
        assertEquals(
                line(without, "experts").bytes() + 32 * 5 * 4 * 4, line(gated, "experts").bytes());
        MemoryPlan narrow = MemoryPlan.of(tiny().build(), run().optSharedExperts(5, false).build());
        assertEquals(4 * (1960 + 2 * 3 * 8 * 5), line(narrow, "weights").bytes());
        assertEquals(line(without, "experts").bytes(), line(narrow, "experts").bytes());
        assertThrows(
                IllegalArgumentException.class, () -> run().optSharedExperts(-1, true).build());
    }

    @Test
    void of_sharedExpertsInTheConfiguration_sameAsInTheSettings() {
        MoeConfig config = tiny().optSharedExperts(10, true).build();
        assertEquals(
                MemoryPlan.of(tiny().build(), run().optSharedExperts(10, true).build())
                        .components(),
                MemoryPlan.of(config, run().build()).components());
        // As in MoeDecoder.Builder, what is said beside the configuration prevails.
        assertEquals(
                MemoryPlan.of(tiny().build(), run().optSharedExperts(5, false).build())
                        .components(),
                MemoryPlan.of(config, run().optSharedExperts(5, false).build()).components());
    }

    @Test
    void of_tiedEmbedding_isCountedOnce() {
        long tied =
                line(
                                MemoryPlan.of(
                                        tiny().optTieWordEmbeddings(true).build(), run().build()),
                                "weights")
                        .bytes();
        assertEquals(4 * (1960 - 160), tied);
    }

    @Test
    void of_stateTier_decidesWhatTheProcessHolds() {
        MemoryPlan file =
                MemoryPlan.of(
                        tiny().build(), run().optStateTier(PlanSettings.StateTier.FILE).build());
        assertFalse(sizes(file).containsKey("optimizer state"));
        MemoryPlan none =
                MemoryPlan.of(
                        tiny().build(), run().optStateTier(PlanSettings.StateTier.NONE).build());
        assertEquals(4 * 384, line(none, "first gradient").bytes());
    }

    @Test
    void of_keepingAllocator_addsTheTransientPartOnce() {
        MemoryPlan exact = MemoryPlan.of(tiny().build(), run().build());
        MemoryPlan pooled =
                MemoryPlan.of(
                        tiny().build(), run().optAllocator(PlanSettings.Allocator.KEEPS).build());
        long comesAndGoes = 19456;
        assertEquals(comesAndGoes, line(pooled, "allocator's holes").bytes());
        assertEquals(exact.peakBytes() + comesAndGoes, pooled.peakBytes());
    }

    @Test
    void toString_anyPlan_endsInThePeakOfItsColumns() {
        MemoryPlan plan = MemoryPlan.of(tiny().build(), run().optRuntimeBytes(100 * MB).build());
        String text = plan.toString();
        assertTrue(text.contains("2 x 16 tokens"), text);
        assertTrue(text.lines().anyMatch(l -> l.startsWith("peak") && l.contains("116")), text);
        assertEquals(
                plan.components().size() + plan.phases().size() + 3, text.lines().count(), text);
    }

    @Test
    void toMap_gson_hasEveryFigure() {
        MemoryPlan plan = MemoryPlan.of(tiny().build(), run().build());
        JsonObject json = new Gson().toJsonTree(plan.toMap()).getAsJsonObject();
        assertEquals(plan.peakBytes(), json.get("peakBytes").getAsLong());
        assertEquals("BACKWARD_MOE", json.get("peakPhase").getAsString());
        assertEquals(plan.components().size(), json.getAsJsonArray("components").size());
        assertEquals(9, json.getAsJsonObject("phases").size());
        long atPeak = 0;
        for (var element : json.getAsJsonArray("components")) {
            atPeak += element.getAsJsonObject().get("bytesAtPeak").getAsLong();
        }
        assertEquals(plan.peakBytes(), atPeak);
    }

    /**
     * More of anything needs more. One more expert makes the even share of a chunk smaller, and the
     * experts' scratch with it; it saves at most that.
     */
    @Property(tries = 100, seed = "1")
    void of_largerAnything_needsMoreButForSmallerBlocks(
            @ForAll @IntRange(min = 1, max = 4) int heads,
            @ForAll @IntRange(min = 1, max = 300) int inner,
            @ForAll @IntRange(min = 1, max = 6) int layers,
            @ForAll @IntRange(min = 2, max = 16) int experts,
            @ForAll @IntRange(min = 1, max = 5000) int vocab,
            @ForAll @IntRange(min = 1, max = 3) int batch,
            @ForAll @IntRange(min = 1, max = 500) int sequence,
            @ForAll @IntRange(min = 0, max = 9) int rank,
            @ForAll boolean keeps,
            @ForAll boolean evaluation) {
        Shape shape = new Shape(heads, inner, layers, experts, vocab, batch, sequence);
        PlanSettings.Builder settings =
                run().optEvaluation(evaluation)
                        .optAllocator(
                                keeps
                                        ? PlanSettings.Allocator.KEEPS
                                        : PlanSettings.Allocator.RETURNS);
        if (rank > 0) {
            settings.optAdapters(rank);
        }
        MemoryPlan base = shape.plan(settings);
        List<UnaryOperator<Shape>> growths =
                List.of(
                        s ->
                                new Shape(
                                        s.heads + 1,
                                        s.inner,
                                        s.layers,
                                        s.experts,
                                        s.vocab,
                                        s.batch,
                                        s.sequence),
                        s ->
                                new Shape(
                                        s.heads,
                                        s.inner + 1,
                                        s.layers,
                                        s.experts,
                                        s.vocab,
                                        s.batch,
                                        s.sequence),
                        s ->
                                new Shape(
                                        s.heads,
                                        s.inner,
                                        s.layers + 1,
                                        s.experts,
                                        s.vocab,
                                        s.batch,
                                        s.sequence),
                        s ->
                                new Shape(
                                        s.heads,
                                        s.inner,
                                        s.layers,
                                        s.experts + 1,
                                        s.vocab,
                                        s.batch,
                                        s.sequence),
                        s ->
                                new Shape(
                                        s.heads,
                                        s.inner,
                                        s.layers,
                                        s.experts,
                                        s.vocab + 1,
                                        s.batch,
                                        s.sequence),
                        s ->
                                new Shape(
                                        s.heads,
                                        s.inner,
                                        s.layers,
                                        s.experts,
                                        s.vocab,
                                        s.batch + 1,
                                        s.sequence),
                        s ->
                                new Shape(
                                        s.heads,
                                        s.inner,
                                        s.layers,
                                        s.experts,
                                        s.vocab,
                                        s.batch,
                                        s.sequence + 1));
        for (int i = 0; i < growths.size(); i++) {
            MemoryPlan grown = growths.get(i).apply(shape).plan(settings);
            long saved = savedByExperts(base, grown);
            assertTrue(saved == 0 || i == ONE_MORE_EXPERT, "growth " + i + " saved " + saved);
            // An allocator that keeps memory counts what comes and goes twice.
            long allowed = keeps ? 2 * saved : saved;
            assertTrue(grown.peakBytes() > base.peakBytes() - allowed, "growth " + i);
        }
        assertTrue(base.unboundedBytes() > 0);
    }

    /** By how much the experts' scratch is smaller in some phase. */
    private static long savedByExperts(MemoryPlan base, MemoryPlan grown) {
        Component before = line(base, "experts");
        Component after = line(grown, "experts");
        return base.phases().keySet().stream()
                .mapToLong(phase -> Math.max(0, before.bytes(phase) - after.bytes(phase)))
                .max()
                .orElseThrow();
    }

    private record Shape(
            int heads, int inner, int layers, int experts, int vocab, int batch, int sequence) {

        MoeConfig config() {
            return MoeConfig.builder()
                    .setVocabSize(vocab)
                    .setHiddenSize(heads * 16)
                    .setIntermediateSize(inner)
                    .setNumLayers(layers)
                    .setNumHeads(heads)
                    .setNumExperts(experts)
                    .setTopK(2)
                    .build();
        }

        MemoryPlan plan(PlanSettings.Builder settings) {
            return MemoryPlan.of(config(), settings.setBatch(batch).setSequence(sequence).build());
        }
    }

    @Property(tries = 100)
    void fit_anyBudget_isKeptAndLessNeverGivesLargerChunks(
            @ForAll @IntRange(min = 1, max = 400) int first,
            @ForAll @IntRange(min = 1, max = 400) int second) {
        Shape shape = new Shape(8, 256, 2, 8, 8000, 4, 1024);
        PlanSettings settings = run().setBatch(4).setSequence(1024).build();
        MemoryPlan[] plans = new MemoryPlan[2];
        int[] budgets = {Math.min(first, second), Math.max(first, second)};
        for (int i = 0; i < 2; i++) {
            try {
                plans[i] =
                        MemoryPlan.fit(shape.config(), settings, new MemoryBudget(budgets[i] * MB));
                assertTrue(plans[i].peakBytes() <= budgets[i] * MB);
                assertTrue(plans[i].settings().moeChunkTokens() <= settings.moeChunkTokens());
            } catch (BudgetExceededException e) {
                assertTrue(e.neededBytes() > e.budgetBytes());
                assertEquals(budgets[i] * MB, e.budgetBytes());
            }
        }
        if (plans[0] != null) {
            PlanSettings less = plans[0].settings();
            PlanSettings more = plans[1].settings();
            assertTrue(less.moeChunkTokens() <= more.moeChunkTokens());
            assertTrue(less.vocabBlockTokens() <= more.vocabBlockTokens());
        }
    }

    @Test
    void fit_amongChunkSizes_nextLargerDoesNotFit() {
        MoeConfig config = new Shape(8, 256, 2, 8, 8000, 4, 1024).config();
        PlanSettings settings = run().setBatch(4).setSequence(1024).build();
        long full = MemoryPlan.of(config, settings).peakBytes();
        MemoryPlan plan = MemoryPlan.fit(config, settings, new MemoryBudget(full));
        assertEquals(settings, plan.settings());

        plan = MemoryPlan.fit(config, settings, new MemoryBudget(full - 1));
        PlanSettings found = plan.settings();
        boolean chunk = found.moeChunkTokens() < settings.moeChunkTokens();
        assertTrue(chunk || found.vocabBlockTokens() < settings.vocabBlockTokens());
        PlanSettings larger =
                chunk
                        ? found.toBuilder().optMoeChunkTokens(2 * found.moeChunkTokens()).build()
                        : found.toBuilder()
                                .optVocabBlockTokens(2 * found.vocabBlockTokens())
                                .build();
        assertTrue(MemoryPlan.of(config, larger).peakBytes() > full - 1);
    }

    @Test
    void fit_batchTooLarge_namesTheLargestBatchThatFits() {
        MoeConfig config = new Shape(2, 32, 12, 4, 100, 8, 512).config();
        PlanSettings settings = run().setBatch(8).setSequence(512).build();
        MemoryPlan three =
                MemoryPlan.of(
                        config,
                        settings.toBuilder()
                                .setBatch(3)
                                .optMoeChunkTokens(16)
                                .optVocabBlockTokens(16)
                                .build());
        MemoryBudget budget = new MemoryBudget(three.peakBytes());
        BudgetExceededException e =
                assertThrows(
                        BudgetExceededException.class,
                        () -> MemoryPlan.fit(config, settings, budget));
        String message = e.getMessage();
        assertTrue(message.startsWith("needs "), message);
        assertTrue(message.contains("over a budget of " + budget), message);
        assertTrue(message.endsWith("a batch of 3 rows instead of 8 fits"), message);
        assertTrue(message.contains("boundaries ("), message);
        assertEquals(-1, message.indexOf('\n'));
        // and so it is
        MemoryPlan.fit(config, settings.toBuilder().setBatch(3).build(), budget);
    }

    @Test
    void fit_weightsTooLarge_namesAdapters() {
        MoeConfig config = new Shape(4, 512, 4, 16, 100, 1, 16).config();
        PlanSettings settings = run().setBatch(1).setSequence(16).build();
        // 25 MB of weights, 102 MB with gradients and state
        assertTrue(
                refusal(config, settings, 58 * MB)
                        .endsWith("training only routers and adapters of rank 8 fits"));
        assertTrue(refusal(config, settings, 17 * MB).contains("no setting fits this model"));
    }

    @Test
    void fit_oneLongSequence_namesALengthThatFits() {
        MoeConfig config = new Shape(2, 32, 12, 4, 100, 1, 8192).config();
        PlanSettings settings = run().setBatch(1).setSequence(8192).build();
        String message = refusal(config, settings, 33 * MB);
        assertTrue(message.matches(".*; a sequence of \\d+ tokens instead of 8192 fits"), message);
        int tokens = Integer.parseInt(message.replaceAll(".*sequence of (\\d+) .*", "$1"));
        MemoryPlan.fit(
                config,
                settings.toBuilder().setSequence(tokens).build(),
                new MemoryBudget(33 * MB));
    }

    @Test
    void fit_evaluationTooLarge_saysNothingOfAdapters() {
        MoeConfig config = new Shape(2, 32, 12, 4, 100, 8, 512).config();
        PlanSettings settings = run().setBatch(1).setSequence(8).optEvaluation(true).build();
        String message = refusal(config, settings, 1024);
        assertEquals(-1, message.indexOf("adapters"), message);
        assertTrue(message.contains("no setting fits this model"), message);
    }

    private static String refusal(MoeConfig config, PlanSettings settings, long budget) {
        return assertThrows(
                        BudgetExceededException.class,
                        () -> MemoryPlan.fit(config, settings, new MemoryBudget(budget)))
                .getMessage();
    }

    @Test
    void settings_senseless_areRefused() {
        assertThrows(IllegalArgumentException.class, () -> PlanSettings.builder().build());
        assertThrows(IllegalArgumentException.class, () -> run().optAdapters(0).build());
        assertThrows(IllegalArgumentException.class, () -> run().optFrozenHalf(true).build());
        assertThrows(IllegalArgumentException.class, () -> run().optVocabBlockTokens(0).build());
        assertThrows(IllegalArgumentException.class, () -> new MemoryBudget(0));
    }
}
