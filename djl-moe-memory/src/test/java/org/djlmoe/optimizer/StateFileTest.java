package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.AbstractBlock;
import ai.djl.nn.Parameter;
import ai.djl.nn.core.Linear;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.ParameterStore;
import ai.djl.training.Trainer;
import ai.djl.training.loss.Loss;
import ai.djl.training.tracker.Tracker;
import ai.djl.util.PairList;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;
import java.util.stream.Stream;
import org.djlmoe.autograd.NamedParameters;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;
import org.djlmoe.optimizer.StateTiersTest.Way;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.Arguments;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.MethodSource;

/** The optimizer's state in a file, and what becomes of it when the model has changed. */
class StateFileTest {

    private static final Map<String, Shape> SHAPES = shapes();

    @TempDir Path folder;

    private static Map<String, Shape> shapes() {
        Map<String, Shape> shapes = new LinkedHashMap<>();
        shapes.put("experts", new Shape(3, 8, 16));
        shapes.put("norm", new Shape(5));
        shapes.put("half", new Shape(9, 17));
        shapes.put("scale", new Shape());
        return shapes;
    }

    /** Parameters without anything else. */
    private static final class Weights extends AbstractBlock implements NamedParameters {

        private final Map<String, Parameter> named = new LinkedHashMap<>();

        Weights(NDManager manager, Map<String, Shape> shapes) {
            Random random = new Random(1);
            shapes.forEach(
                    (name, shape) -> {
                        Parameter parameter =
                                addParameter(
                                        Parameter.builder()
                                                .setName(name)
                                                .setType(Parameter.Type.OTHER)
                                                .build());
                        NDArray values = random(manager, random, shape);
                        parameter.setArray(
                                name.startsWith("half")
                                        ? values.toType(DataType.FLOAT16, true)
                                        : values);
                        named.put(name, parameter);
                    });
        }

        NDArray array(String name) {
            return named.get(name).getArray();
        }

        @Override
        public Map<String, Parameter> namedParameters() {
            return named;
        }

        @Override
        protected NDList forwardInternal(
                ParameterStore store,
                NDList inputs,
                boolean training,
                PairList<String, Object> parameters) {
            return inputs;
        }

        @Override
        public Shape[] getOutputShapes(Shape[] inputShapes) {
            return inputShapes;
        }
    }

    /** Weights, an optimizer, and a gradient that each step's number decides. */
    private static final class Run implements AutoCloseable {

        final NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
        final Weights weights;
        final OffloadStreamAdamW optimizer;

        Run(Map<String, Shape> shapes, OffloadStreamAdamW.Builder builder) {
            weights = new Weights(manager, shapes);
            optimizer =
                    builder.optIdleExperts(
                                    IdleExperts.SKIP, () -> Map.of("experts", new long[] {1, 0, 2}))
                            .build();
        }

        Run(OffloadStreamAdamW.Builder builder) {
            this(SHAPES, builder);
        }

        /** Every parameter that is not frozen; in odd steps the norm has no gradient. */
        void steps(int first, int last) {
            for (int step = first; step <= last; step++) {
                List<Slot> slots = new ArrayList<>();
                for (Map.Entry<String, Parameter> entry : weights.named.entrySet()) {
                    String path = entry.getKey();
                    Random random = new Random(100L * step + path.hashCode());
                    NDArray array = entry.getValue().getArray();
                    NDArray gradient = random(manager, random, array.getShape());
                    if (entry.getValue().requiresGradient()
                            && !(path.equals("norm") && step % 2 == 1)) {
                        slots.add(new Slot(path, path, array, gradient));
                    }
                }
                optimizer.step(slots);
            }
        }

        /** As a restart has it: the weights from a checkpoint, the state from a file. */
        StateReport continueFrom(Run other, Path file) throws IOException {
            weights.named.forEach(
                    (path, parameter) -> {
                        Parameter from = other.weights.named.get(path);
                        if (from != null) {
                            from.getArray().copyTo(parameter.getArray());
                        }
                    });
            return optimizer.load(file, weights);
        }

        Map<String, float[]> everything() {
            Map<String, float[]> all = new LinkedHashMap<>();
            weights.named.forEach(
                    (path, p) ->
                            all.put(
                                    path,
                                    p.getArray().toType(DataType.FLOAT32, true).toFloatArray()));
            AdamWState state = optimizer.state();
            for (String path : state.paths()) {
                all.put("m." + path, state.expAvg(manager, path).toFloatArray());
                all.put("v." + path, state.expAvgSq(manager, path).toFloatArray());
                if (state.hasMaster(path)) {
                    NDArray master = manager.zeros(state.shape(path));
                    state.readMaster(path, 0, master);
                    all.put("master." + path, master.toFloatArray());
                }
                float[] steps = new float[state.steps(path).length];
                for (int i = 0; i < steps.length; i++) {
                    steps[i] = state.steps(path)[i];
                }
                all.put("steps." + path, steps);
            }
            return all;
        }

        @Override
        public void close() {
            optimizer.close();
            manager.close();
        }
    }

    private static NDArray random(NDManager manager, Random random, Shape shape) {
        float[] x = new float[(int) shape.size()];
        for (int i = 0; i < x.length; i++) {
            x[i] = (float) random.nextGaussian();
        }
        return manager.create(x, shape).duplicate();
    }

    private static OffloadStreamAdamW.Builder builder() {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(
                        WarmupCosineTracker.builder()
                                .setPeak(0.02)
                                .setUpdates(12)
                                .optWarmup(3)
                                .build())
                .optClipNorm(1)
                .optWeightDecay(0.1);
    }

    private static void assertSame(Map<String, float[]> expected, Map<String, float[]> actual) {
        assertEquals(expected.keySet(), actual.keySet());
        expected.forEach((name, values) -> assertArrayEquals(values, actual.get(name), name));
    }

    static Stream<Arguments> ways() {
        List<Arguments> all = new ArrayList<>();
        for (Way way : Way.values()) {
            for (long bucket : new long[] {64, 100, 1 << 22}) {
                all.add(Arguments.of(way, bucket));
            }
        }
        return all.stream();
    }

    @ParameterizedTest
    @MethodSource("ways")
    void load_otherTierAndBuckets_nextStepsAreTheUninterruptedOnesToTheBit(Way way, long bucket)
            throws IOException {
        Path file = folder.resolve("state.safetensors");
        try (Run whole = new Run(builder().optBucketElements(70));
                Run resumed =
                        new Run(
                                way.apply(builder(), Path.of("target"))
                                        .optBucketElements(bucket))) {
            whole.steps(1, 5);
            whole.optimizer.save(file);
            StateReport report = resumed.continueFrom(whole, file);

            assertTrue(report.isComplete(), report::toString);
            assertEquals(new ArrayList<>(SHAPES.keySet()), report.restored());
            assertEquals(5, resumed.optimizer.updates());
            assertSame(whole.everything(), resumed.everything());
            assertArrayEquals(new long[] {5, 0, 5}, resumed.optimizer.state().steps("experts"));
            assertEquals(2, resumed.optimizer.state().step("norm"));

            whole.steps(6, 9);
            resumed.steps(6, 9);
            assertSame(whole.everything(), resumed.everything());
            assertEquals(9, resumed.optimizer.updates());
        }
    }

    @Test
    void save_laidOutAsDocumented_partsByPathAndOptionsInTheMetadata() throws IOException {
        Path file = folder.resolve("state.safetensors");
        try (Run run = new Run(builder().optEpsilon(1e-3))) {
            run.steps(1, 2);
            run.optimizer.save(file);
        }
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            assertEquals(4 * 3 + 1, reader.names().size());
            assertArrayEquals(new long[] {3, 8, 16}, reader.info("experts.exp_avg_sq").shape());
            assertArrayEquals(new long[] {3}, reader.info("experts.step").shape());
            assertArrayEquals(new long[0], reader.info("norm.step").shape());
            assertEquals(DType.F32, reader.info("half.master").dtype());
            assertEquals("2", reader.metadata().get("updates"));
            assertEquals("0.001", reader.metadata().get("option.epsilon"));
            assertEquals("1.0", reader.metadata().get("option.clip_norm"));
        }
        try (Stream<Path> files = Files.list(folder)) {
            assertEquals(List.of(file), files.toList());
        }
    }

    @Test
    void load_modelHasChanged_everyParameterIsReportedAndStartsAsItShould() throws IOException {
        Path file = folder.resolve("state.safetensors");
        Map<String, Shape> now = new LinkedHashMap<>(SHAPES);
        now.remove("scale");
        now.put("added", new Shape(3));
        now.put("addedFrozen", new Shape(3));
        try (Run before = new Run(builder());
                Run after = new Run(now, builder().optBeta2(0.99))) {
            before.steps(1, 4);
            before.optimizer.save(file);
            after.weights.named.get("norm").freeze(true);
            after.weights.named.get("addedFrozen").freeze(true);
            StateReport report = after.continueFrom(before, file);

            assertFalse(report.isComplete());
            assertEquals(List.of("experts", "half"), report.restored());
            assertEquals(List.of("norm"), report.frozen());
            assertEquals(List.of("added"), report.started());
            assertEquals(List.of("scale"), report.removed());
            assertEquals(List.of("beta2 0.999 -> 0.99"), report.changedOptions());
            for (String name : List.of("norm", "added", "scale", "beta2", file.toString())) {
                assertTrue(report.toString().contains(name), report::toString);
            }
            assertEquals(1, report.toString().lines().count());
            assertFalse(report.toString().contains("addedFrozen"), report::toString);

            after.steps(5, 6);
            AdamWState state = after.optimizer.state();
            assertEquals(Set.of("experts", "half", "norm", "added"), state.paths());
            assertEquals(2, state.step("added"));
            assertEquals(6, state.step("half"));
            assertEquals(2, state.step("norm"));
            assertArrayEquals(before.everything().get("v.norm"), after.everything().get("v.norm"));
        }
    }

    /** Freeze, save, load and thaw: the state has waited all the time. */
    @Test
    void load_frozenMeanwhile_stateIsSavedAgainAndThawedWithItsCount() throws IOException {
        Path first = folder.resolve("first.safetensors");
        Path second = folder.resolve("second.safetensors");
        try (Run one = new Run(builder());
                Run frozen = new Run(builder().optBucketElements(4));
                Run thawed = new Run(builder())) {
            one.steps(1, 4);
            one.optimizer.save(first);
            frozen.weights.named.get("half").freeze(true);
            frozen.continueFrom(one, first);
            frozen.steps(5, 7);
            frozen.optimizer.save(second);
            StateReport report = thawed.continueFrom(frozen, second);

            assertEquals(new ArrayList<>(SHAPES.keySet()), report.restored());
            assertEquals(4, thawed.optimizer.state().step("half"));
            assertEquals(7, thawed.optimizer.state().step("scale"));
            for (String part : List.of("m.half", "v.half", "master.half", "half")) {
                assertArrayEquals(one.everything().get(part), thawed.everything().get(part), part);
            }
            thawed.steps(8, 8);
            assertEquals(5, thawed.optimizer.state().step("half"));
        }
    }

    /** Back to an earlier state in the same process, as after a divergence. */
    @ParameterizedTest
    @MethodSource("ways")
    void load_intoAUsedOptimizer_replacesEverything(Way way, long bucket) throws IOException {
        Path file = folder.resolve("state.safetensors");
        OffloadStreamAdamW.Builder other =
                way.apply(builder(), Path.of("target")).optBucketElements(bucket);
        try (Run whole = new Run(builder());
                Run used = new Run(other)) {
            whole.weights.named.get("half").freeze(true);
            whole.steps(1, 3);
            whole.optimizer.save(file);
            used.steps(4, 9);
            StateReport report = used.continueFrom(whole, file);
            assertEquals(List.of("half"), report.started());
            assertEquals(0, used.optimizer.state().step("half"));

            whole.weights.named.get("half").freeze(false);
            whole.steps(4, 6);
            used.steps(4, 6);
            assertSame(whole.everything(), used.everything());
        }
    }

    @Test
    void load_weightHasAnotherPrecision_masterStartsFromTheWeightOrIsLeftOut() throws IOException {
        Path file = folder.resolve("state.safetensors");
        Map<String, Shape> single = Map.of("half", new Shape(2, 3));
        Map<String, Shape> whole = Map.of("w", new Shape(2, 3));
        for (boolean toHalf : new boolean[] {true, false}) {
            try (Run from = new Run(toHalf ? whole : single, builder());
                    Run to = new Run(toHalf ? single : whole, builder())) {
                from.steps(1, 3);
                from.optimizer.save(file);
                Path renamed = renamed(file, toHalf ? "w" : "half", toHalf ? "half" : "w");
                StateReport report = to.optimizer.load(renamed, to.weights);

                String path = toHalf ? "half" : "w";
                assertEquals(List.of(path), report.converted());
                assertEquals(toHalf, to.optimizer.state().hasMaster(path));
                if (toHalf) {
                    assertArrayEquals(
                            to.everything().get("half"), to.everything().get("master.half"));
                }
                to.steps(4, 4);
                assertEquals(4, to.optimizer.state().step(path));
            }
        }
    }

    /** A copy of a file in which another parameter has the state. */
    private Path renamed(Path file, String from, String to) throws IOException {
        Path copy = folder.resolve("renamed.safetensors");
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            SafetensorsWriter.Builder plan =
                    SafetensorsWriter.builder().optMetadata(reader.metadata());
            for (String name : reader.names()) {
                plan.addTensor(
                        name.replace(from + ".", to + "."),
                        reader.info(name).dtype(),
                        reader.info(name).shape());
            }
            try (SafetensorsWriter writer = plan.build(copy)) {
                for (String name : reader.names()) {
                    ByteBuffer bytes = ByteBuffer.allocate((int) reader.info(name).byteSize());
                    reader.readBytes(name, 0, bytes);
                    writer.writeBytes(name.replace(from + ".", to + "."), bytes.flip());
                }
                writer.commit();
            }
        }
        return copy;
    }

    @Test
    void load_wrongShape_namesFileParameterAndBothShapesAndChangesNothing() throws IOException {
        Path file = folder.resolve("state.safetensors");
        Map<String, Shape> now = new LinkedHashMap<>(SHAPES);
        now.put("half", new Shape(17, 9));
        try (Run before = new Run(builder());
                Run after = new Run(now, builder())) {
            before.steps(1, 2);
            before.optimizer.save(file);
            SafetensorsException e =
                    assertThrows(
                            SafetensorsException.class,
                            () -> after.optimizer.load(file, after.weights));
            for (String part : List.of(file.toString(), "'half'", "(9, 17)", "(17, 9)")) {
                assertTrue(e.getMessage().contains(part), e.getMessage());
            }
            assertEquals(Set.of(), after.optimizer.state().paths());
            assertEquals(0, after.optimizer.updates());
        }
    }

    @ParameterizedTest
    @CsvSource({
        "other, '', is not marked",
        "version, '', of version 2",
        "updates, '', 'updates'",
        "whole, w.exp_avg_sq, lacks the tensor 'w.exp_avg_sq'",
        "whole, w.step, 3 tensors",
        "negative, '', the count -1",
        "steps, '', one for each expert",
        "parts, '', 'w.exp_avg_sq' has the shape [3]",
        "halves, '', not F32"
    })
    void load_brokenFile_saysWhatIsWrong(String what, String missing, String message)
            throws IOException {
        Path file = folder.resolve("broken.safetensors");
        Map<String, String> metadata = new LinkedHashMap<>();
        metadata.put("format", what.equals("other") ? "pt" : "djl-moe-adamw");
        metadata.put("version", what.equals("version") ? "2" : "1");
        metadata.put("updates", what.equals("updates") ? "-3" : "3");
        metadata.put("skipped", "0");
        SafetensorsWriter.Builder plan = SafetensorsWriter.builder().optMetadata(metadata);
        DType type = what.equals("halves") ? DType.F16 : DType.F32;
        Map<String, long[]> tensors = new LinkedHashMap<>();
        tensors.put("w.step", what.equals("steps") ? new long[] {5} : new long[0]);
        tensors.put("w.exp_avg", new long[] {2});
        tensors.put("w.exp_avg_sq", new long[] {what.equals("parts") ? 3 : 2});
        tensors.put("b.step", new long[0]);
        tensors.put("b.exp_avg", new long[] {1});
        tensors.put("b.exp_avg_sq", new long[] {1});
        tensors.remove(missing);
        if (missing.equals("w.step")) {
            tensors.keySet().removeIf(name -> name.startsWith("b.") && !name.endsWith("step"));
            tensors.remove("b.step");
            tensors.put("stray", new long[] {1});
        }
        tensors.forEach(
                (name, shape) ->
                        plan.addTensor(name, name.endsWith("step") ? DType.I64 : type, shape));
        try (SafetensorsWriter writer = plan.build(file)) {
            for (Map.Entry<String, long[]> tensor : tensors.entrySet()) {
                int n = (int) Arrays.stream(tensor.getValue()).reduce(1, (a, b) -> a * b);
                if (tensor.getKey().endsWith("step")) {
                    ByteBuffer steps = ByteBuffer.allocate(8 * n);
                    Arrays.fill(steps.array(), (byte) (what.equals("negative") ? -1 : 0));
                    writer.writeBytes(tensor.getKey(), steps);
                } else {
                    writer.writeF32(tensor.getKey(), FloatBuffer.allocate(n));
                }
            }
            writer.commit();
        }
        try (Run run = new Run(Map.of("w", new Shape(2)), builder())) {
            SafetensorsException e =
                    assertThrows(
                            SafetensorsException.class,
                            () -> run.optimizer.load(file, run.weights));
            assertTrue(e.getMessage().contains(message), e.getMessage());
            assertTrue(e.getMessage().contains(file.toString()), e.getMessage());
        }
    }

    @Test
    void load_noModelOrOneWithoutValues_isRefusedWithTheFix() {
        Path file = folder.resolve("state.safetensors");
        try (OffloadStreamAdamW optimizer = builder().build()) {
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> optimizer.load(file));
            assertTrue(e.getMessage().contains("optBlock"), e.getMessage());
            Linear block = Linear.builder().setUnits(2).build();
            assertTrue(
                    assertThrows(IllegalArgumentException.class, () -> optimizer.load(file, block))
                            .getMessage()
                            .contains("initialize"));
        }
    }

    /** DJL's ids are numbers of this process: saved, they would be other parameters' later. */
    @ParameterizedTest
    @CsvSource({"false", "true"})
    void save_underDjlsTrainer_needsTheModel(boolean known) throws IOException {
        Path file = folder.resolve("state.safetensors");
        try (Model model = Model.newInstance("ids", "PyTorch")) {
            model.setBlock(Linear.builder().setUnits(2).build());
            OffloadStreamAdamW.Builder builder =
                    OffloadStreamAdamW.builder().setLearningRateTracker(Tracker.fixed(0.1f));
            if (known) {
                builder.optModel(model);
            }
            try (OffloadStreamAdamW optimizer = builder.build();
                    Trainer trainer =
                            model.newTrainer(
                                    new DefaultTrainingConfig(Loss.l2Loss())
                                            .optOptimizer(optimizer)
                                            .optDevices(new Device[] {Device.cpu()}))) {
                trainer.initialize(new Shape(1, 3));
                NDArray x = trainer.getManager().ones(new Shape(1, 3));
                NDArray y = trainer.getManager().ones(new Shape(1, 2));
                try (GradientCollector collector = trainer.newGradientCollector()) {
                    NDList out = trainer.forward(new NDList(x));
                    collector.backward(trainer.getLoss().evaluate(new NDList(y), out));
                }
                trainer.step();
                if (known) {
                    optimizer.save(file);
                    assertEquals(2, optimizer.load(file).restored().size());
                } else {
                    assertTrue(
                            assertThrows(IllegalStateException.class, () -> optimizer.save(file))
                                    .getMessage()
                                    .contains("optBlock"));
                }
            }
        }
    }

    /** The count of steps outlives a restart, and goes on one by one beyond 256. */
    @Test
    void load_threeHundredStepsInThreeParts_countsAreExact() throws IOException {
        Path file = folder.resolve("state.safetensors");
        int[] asked = {0};
        Tracker tracker =
                n -> {
                    asked[0] = n;
                    return 1e-3f;
                };
        for (int part = 0; part < 3; part++) {
            try (Run run =
                    new Run(
                            Map.of("w", new Shape(2)),
                            OffloadStreamAdamW.builder().setLearningRateTracker(tracker))) {
                if (part > 0) {
                    run.optimizer.load(file, run.weights);
                }
                run.steps(100 * part + 1, 100 * part + 100);
                assertEquals(100 * part + 100, asked[0]);
                assertEquals(100 * part + 100, run.optimizer.state().step("w"));
                run.optimizer.save(file);
            }
        }
    }
}
