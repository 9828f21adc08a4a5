package org.djlmoe.offload;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.metric.Metrics;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.Trainer;
import ai.djl.training.optimizer.Optimizer;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.Consumer;
import java.util.stream.Stream;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.model.MoeDecoder;
import org.djlmoe.reference.ProcessMemory;
import org.djlmoe.vocab.RingDtpLoss;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** A decoder with its own loss, and the listener's life with trainers. */
class DecoderOffloadTest {

    private static final int LAYERS = 3;
    private static final int HIDDEN = 8;
    private static final Shape BATCH = new Shape(3, 5);
    private static final long BOUNDARY = 15 * HIDDEN * Float.BYTES;

    @TempDir Path directory;

    private static MoeDecoder decoder(int layers, int hidden, int vocab) {
        return new MoeDecoder(
                MoeConfig.builder()
                        .setVocabSize(vocab)
                        .setHiddenSize(hidden)
                        .setIntermediateSize(6)
                        .setNumLayers(layers)
                        .setNumHeads(2)
                        .setNumExperts(4)
                        .setTopK(2)
                        .optInitializerRange(0.3)
                        .build(),
                4);
    }

    private static DefaultTrainingConfig config(SelectiveCheckpointOffload offload) {
        DefaultTrainingConfig config =
                new DefaultTrainingConfig(RingDtpLoss.builder().build())
                        .optOptimizer(
                                Optimizer.adam()
                                        .optLearningRateTracker(Tracker.fixed(0.01f))
                                        .build())
                        .optDevices(new Device[] {Device.cpu()});
        return offload == null ? config : config.addTrainingListeners(offload);
    }

    private SelectiveCheckpointOffload.Builder toFiles() {
        return SelectiveCheckpointOffload.builder()
                .setBudget(1 << 20)
                .optFileTier(directory)
                .optMinBytes(1);
    }

    private static NDArray tokens(NDManager manager, Shape shape, int vocab, int seed) {
        long[] ids = new long[(int) shape.size()];
        for (int i = 0; i < ids.length; i++) {
            ids[i] = (i * 7L + seed) * (i + 3L) % vocab;
        }
        return manager.create(ids, shape);
    }

    /** Gradients after two micro-batches, with an evaluation between forward and backward. */
    private static Map<String, float[]> run(
            SelectiveCheckpointOffload offload, Consumer<MoeDecoder> prepare) {
        Engine.getEngine("PyTorch").setRandomSeed(11);
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            MoeDecoder decoder = decoder(LAYERS, HIDDEN, 13);
            model.setBlock(decoder);
            try (BoundedTrainer trainer = new BoundedTrainer(model, config(offload))) {
                trainer.initialize(BATCH);
                prepare.accept(decoder);
                Map<String, float[]> result = new LinkedHashMap<>();
                for (int micro = 0; micro < 2; micro++) {
                    try (NDManager batch = trainer.getManager().newSubManager();
                            GradientCollector collector = trainer.newGradientCollector()) {
                        NDArray ids = tokens(batch, BATCH, 13, micro);
                        NDArray labels = tokens(batch, BATCH, 13, micro + 2);
                        NDList out = trainer.forward(new NDList(ids));
                        trainer.evaluate(new NDList(ids)).close();
                        NDArray loss = trainer.getLoss().evaluate(new NDList(labels), out);
                        collector.backward(loss);
                        result.put("loss" + micro, loss.toFloatArray());
                    }
                }
                result.putAll(TrainedNetwork.gradients(decoder));
                return result;
            }
        }
    }

    private static void assertSame(Map<String, float[]> a, Map<String, float[]> b) {
        assertEquals(a.keySet(), b.keySet());
        a.forEach((name, x) -> assertArrayEquals(x, b.get(name), name));
    }

    @Test
    void step_twoMicroBatches_lossesAndGradientsEqualAndEveryBoundaryMoves() {
        Map<String, float[]> plain = run(null, decoder -> {});
        SelectiveCheckpointOffload offload = toFiles().build();
        Map<String, float[]> ours = run(offload, decoder -> {});

        assertTrue(plain.size() > 20, plain.keySet().toString());
        assertSame(plain, ours);
        // Into attention and experts of every layer and into the final norm; the loss takes the
        // norm's output, which is written last and need not come back. No weight is among them.
        OffloadStatistics session = offload.lastSession();
        assertEquals((2 * LAYERS + 2) * BOUNDARY, session.bytesOut());
        assertEquals((2 * LAYERS + 1) * BOUNDARY, session.bytesBack());
        assertTrue(session.peakBytes() <= 3 * BOUNDARY, "peak " + session.peakBytes());
    }

    @Test
    void step_frozenEmbedding_theLayersAboveGetTheSameGradients() {
        Consumer<MoeDecoder> freeze =
                decoder ->
                        decoder.checkpointParameters()
                                .get("model.embed_tokens.weight")
                                .freeze(true);
        Map<String, float[]> plain = run(null, freeze);
        SelectiveCheckpointOffload offload = toFiles().build();
        Map<String, float[]> ours = run(offload, freeze);

        assertSame(plain, ours);
        assertTrue(ours.keySet().stream().noneMatch(name -> name.contains("embed_tokens")));
        for (float[] gradient : ours.values()) {
            double sum = 0;
            for (float value : gradient) {
                sum += Math.abs(value);
            }
            assertTrue(sum > 0, "a gradient is missing");
        }
        assertTrue(offload.lastSession().bytesOut() > 0);
    }

    @Test
    void metrics_oneValueACollector() {
        SelectiveCheckpointOffload offload = toFiles().build();
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(1, HIDDEN, 13));
            try (BoundedTrainer trainer = new BoundedTrainer(model, config(offload))) {
                Metrics metrics = new Metrics();
                trainer.setMetrics(metrics);
                trainer.initialize(BATCH);
                for (int i = 0; i < 2; i++) {
                    step(trainer, BATCH, 13, i);
                }
                assertEquals(2, metrics.getMetric("boundary-bytes-out").size());
                assertEquals(
                        4.0 * BOUNDARY,
                        metrics.latestMetric("boundary-bytes-out").getValue().doubleValue());
                assertEquals(
                        3.0 * BOUNDARY,
                        metrics.latestMetric("boundary-bytes-back").getValue().doubleValue());
                assertTrue(metrics.latestMetric("boundary-wait").getValue().doubleValue() >= 0);
                assertTrue(
                        metrics.latestMetric("boundary-peak-bytes").getValue().doubleValue() > 0);
            }
        }
    }

    private static void step(Trainer trainer, Shape shape, int vocab, int seed) {
        try (NDManager batch = trainer.getManager().newSubManager()) {
            NDArray ids = tokens(batch, shape, vocab, seed);
            NDArray labels = tokens(batch, shape, vocab, seed + 1);
            try (GradientCollector collector = trainer.newGradientCollector()) {
                NDList out = trainer.forward(new NDList(ids));
                collector.backward(trainer.getLoss().evaluate(new NDList(labels), out));
            }
            trainer.step();
        }
    }

    @Test
    void step_twoHundredTimes_nothingGrows() throws IOException {
        SelectiveCheckpointOffload offload = toFiles().build();
        Shape shape = new Shape(4, 64);
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(2, 32, 64));
            try (BoundedTrainer trainer = new BoundedTrainer(model, config(offload))) {
                trainer.initialize(shape);
                int arrays = 0;
                int slots = 0;
                long files = 0;
                long memory = 0;
                for (int i = 0; i < 250; i++) {
                    if (i == 50) {
                        System.gc();
                        arrays = trainer.getManager().getManagedArrays().size();
                        slots = offload.pool().slots();
                        files = openFiles();
                        memory = ProcessMemory.isKnown() ? ProcessMemory.nativeBytes() : 0;
                    }
                    step(trainer, shape, 64, i);
                }
                assertEquals(arrays, trainer.getManager().getManagedArrays().size());
                assertTrue(slots > 0);
                assertEquals(slots, offload.pool().slots());
                assertEquals(0, offload.pool().inUse());
                assertTrue(openFiles() <= files, files + " files, then " + openFiles());
                if (ProcessMemory.isKnown()) {
                    long growth = ProcessMemory.nativeBytes() - memory;
                    assertTrue(growth < 8 << 20, growth + " bytes more in 200 steps");
                }
            }
        }
        try (Stream<Path> left = Files.list(directory)) {
            assertEquals(0, left.count());
        }
    }

    /** Open files of this process, or 0 where the system does not tell. */
    private static long openFiles() throws IOException {
        Path descriptors = Path.of("/proc/self/fd");
        if (!Files.isDirectory(descriptors)) {
            return 0;
        }
        long slots = 0;
        try (Stream<Path> files = Files.list(descriptors)) {
            for (Path file : files.toList()) {
                try {
                    slots += Files.readSymbolicLink(file).toString().contains(".slot") ? 1 : 0;
                } catch (IOException e) {
                    // closed meanwhile
                }
            }
        }
        return slots;
    }

    @Test
    void trainer_closed_filesAreClosedAndTheListenerServesTheNext() throws IOException {
        SelectiveCheckpointOffload offload = toFiles().build();
        Map<String, float[]> first = run(offload, decoder -> {});
        assertEquals(0, openFiles());
        assertEquals(0, offload.allocatedBytes());
        assertSame(first, run(offload, decoder -> {}));
    }

    @Test
    void trainer_second_refusedWhileTheFirstIsOpen() {
        SelectiveCheckpointOffload offload = toFiles().build();
        try (Model model = Model.newInstance("decoder", "PyTorch");
                Model other = Model.newInstance("other", "PyTorch")) {
            model.setBlock(decoder(1, HIDDEN, 13));
            other.setBlock(decoder(1, HIDDEN, 13));
            try (BoundedTrainer trainer = new BoundedTrainer(model, config(offload))) {
                IllegalStateException e =
                        assertThrows(
                                IllegalStateException.class,
                                () -> new BoundedTrainer(other, config(offload)).close());
                assertTrue(e.getMessage().contains("another trainer"), e.getMessage());
            }
        }
    }

    @Test
    void trainer_stock_trainsAsEver() {
        SelectiveCheckpointOffload offload = toFiles().build();
        try (Model model = Model.newInstance("stock", "PyTorch")) {
            model.setBlock(TrainedNetwork.block(TrainedNetwork.Kind.CHAIN));
            try (Trainer trainer =
                    model.newTrainer(TrainedNetwork.config().addTrainingListeners(offload))) {
                trainer.initialize(new Shape(4, 9));
                NDManager manager = trainer.getManager();
                try (GradientCollector collector = trainer.newGradientCollector()) {
                    NDList out = trainer.forward(new NDList(manager.ones(new Shape(4, 9))));
                    collector.backward(out.head().sum());
                }
                trainer.step();
            }
        }
        assertEquals(0, offload.lastSession().bytesOut());
        assertEquals(0, offload.allocatedBytes());
    }

    @Test
    void trainingBegins_tierHasLessRoomThanTheBudget_refusedBeforeTheFirstStep() {
        SelectiveCheckpointOffload offload =
                SelectiveCheckpointOffload.builder()
                        .setBudget(Long.MAX_VALUE)
                        .optFileTier(directory)
                        .build();
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder(1, HIDDEN, 13));
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () -> new BoundedTrainer(model, config(offload)).close());
            assertTrue(e.getMessage().contains("smaller budget"), e.getMessage());
        }
    }

    @ParameterizedTest
    @ValueSource(longs = {0, -5})
    void build_budgetNotAboveZero_refused(long budget) {
        assertThrows(
                IllegalArgumentException.class,
                () -> SelectiveCheckpointOffload.builder().setBudget(budget).build());
        assertThrows(
                IllegalArgumentException.class, () -> SelectiveCheckpointOffload.builder().build());
        assertThrows(
                IllegalArgumentException.class,
                () ->
                        SelectiveCheckpointOffload.builder()
                                .setBudget(1)
                                .optFileTier(directory.resolve("missing")));
    }
}
