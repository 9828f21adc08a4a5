package org.djlmoe.plan;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import org.djlmoe.model.MoeConfig;

/**
 * Compares planned and measured peaks of one shape.
 *
 * <p>Run with the test class path, once for live arrays and once as the pooled allocator has it:
 *
 * <pre>
 * MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=1048576 java $JAVA CLASS 128,4,8,256,258 8,256
 * MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 java $JAVA CLASS ...
 * </pre>
 *
 * <p>with {@code JAVA="-Xms64m -Xmx64m -XX:+UseSerialGC -XX:+AlwaysPreTouch"}: a heap that is
 * touched bit by bit would count as growth.
 *
 * <p>Arguments: {@code hidden,layers,experts,inner,vocab}, {@code batch,sequence}, then any of
 * {@code chunk=4096}, {@code block=512}, {@code kv=2}, {@code window=128}, {@code lora=8}, {@code
 * shared=1024}, {@code mask=1} (a mask that keeps topK experts is learnt, with so many dropped ones
 * a token), {@code half} (BF16 experts, with {@code lora}), {@code eval}, {@code skew} (all tokens
 * to the same experts), {@code steps=3}, {@code table}.
 */
final class CalibrationRun {

    private CalibrationRun() {}

    public static void main(String[] arguments) {
        List<String> options = new ArrayList<>(List.of(arguments));
        int[] shape = numbers(options.remove(0));
        int[] batch = numbers(options.remove(0));
        MoeConfig.Builder model =
                MoeConfig.builder()
                        .setHiddenSize(shape[0])
                        .setNumLayers(shape[1])
                        .setNumExperts(shape[2])
                        .setIntermediateSize(shape[3])
                        .setVocabSize(shape[4])
                        .setNumHeads(Math.max(1, shape[0] / 64))
                        .setTopK(2);
        PlanSettings.Builder settings =
                PlanSettings.builder().setBatch(batch[0]).setSequence(batch[1]);
        boolean skew = options.remove("skew");
        settings.optFrozenHalf(options.remove("half"));
        boolean table = options.remove("table");
        int steps = 3;
        settings.optAllocator(
                TrainedDecoder.returnsMemory()
                        ? PlanSettings.Allocator.RETURNS
                        : PlanSettings.Allocator.KEEPS);
        for (String option : options) {
            String[] pair = option.split("=");
            switch (pair[0]) {
                case "chunk" -> settings.optMoeChunkTokens(Integer.parseInt(pair[1]));
                case "block" -> settings.optVocabBlockTokens(Integer.parseInt(pair[1]));
                case "kv" -> model.optNumKeyValueHeads(Integer.parseInt(pair[1]));
                case "window" -> model.optSlidingWindow(Integer.parseInt(pair[1]));
                case "lora" -> settings.optAdapters(Integer.parseInt(pair[1]));
                case "shared" -> settings.optSharedExperts(Integer.parseInt(pair[1]), true);
                case "mask" -> settings.optMask(Integer.parseInt(pair[1]));
                case "steps" -> steps = Integer.parseInt(pair[1]);
                case "eval" -> settings.optEvaluation(true);
                default -> throw new IllegalArgumentException("Unknown option " + option);
            }
        }
        TrainedDecoder.warmUp();
        MemoryPlan plan = MemoryPlan.of(model.build(), settings.build());
        PeakMeter.Reading reading =
                TrainedDecoder.measure(plan.config(), plan.settings(), steps, skew);
        if (table) {
            System.out.println(plan);
        }
        System.out.printf(
                Locale.ROOT,
                "%s: base %s, above base planned %s (%s) measured %s MB, planned / measured %.2f%n",
                String.join(" ", arguments),
                Megabytes.of(reading.baseBytes()),
                Megabytes.of(plan.peakAboveBase()),
                plan.peakPhase(),
                Megabytes.of(reading.aboveBase()),
                (double) plan.peakAboveBase() / reading.aboveBase());
    }

    private static int[] numbers(String text) {
        return List.of(text.split(",")).stream().mapToInt(Integer::parseInt).toArray();
    }
}
