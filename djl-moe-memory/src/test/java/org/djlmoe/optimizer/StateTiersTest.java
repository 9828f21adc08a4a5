package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.tracker.Tracker;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.StepOptimizer.Slot;
import org.djlmoe.optimizer.BucketPipeline.Job;
import org.djlmoe.optimizer.StateBuckets.Need;
import org.djlmoe.tier.HostTier;
import org.djlmoe.tier.Tier;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** Where the state lies, and how it gets to the update, changes no bit of a result. */
class StateTiersTest {

    /** The ways of a bucket. */
    enum Way {
        MEMORY,
        FILES,
        STAGED,
        STAGED_FILES;

        OffloadStreamAdamW.Builder apply(OffloadStreamAdamW.Builder builder, Path folder) {
            if (this == FILES || this == STAGED_FILES) {
                builder.optFileTier(folder);
            }
            return builder.optStaged(this == STAGED || this == STAGED_FILES);
        }
    }

    private static final Path FOLDER = Path.of("target");

    @TempDir Path folder;

    private static OffloadStreamAdamW.Builder builder() {
        return OffloadStreamAdamW.builder()
                .setLearningRateTracker(Tracker.fixed(0.01f))
                .optWeightDecay(0.1);
    }

    /** Weights after some steps with random gradients, of which some are missing. */
    private static Map<String, float[]> trained(
            OffloadStreamAdamW.Builder builder, long seed, int parameters, int steps) {
        Random random = new Random(seed);
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = builder.build()) {
            Map<String, NDArray> weights = new LinkedHashMap<>();
            for (int p = 0; p < parameters; p++) {
                Shape shape = new Shape(1 + random.nextInt(9), 1 + random.nextInt(20));
                weights.put("p" + p, values(manager, random, shape));
            }
            for (int step = 0; step < steps; step++) {
                List<Slot> slots = new ArrayList<>();
                for (Map.Entry<String, NDArray> weight : weights.entrySet()) {
                    NDArray gradient = values(manager, random, weight.getValue().getShape());
                    if (random.nextInt(4) > 0) {
                        slots.add(
                                new Slot(
                                        weight.getKey(),
                                        weight.getKey(),
                                        weight.getValue(),
                                        gradient));
                    }
                }
                optimizer.step(slots);
            }
            Map<String, float[]> results = new LinkedHashMap<>();
            weights.forEach((path, weight) -> results.put(path, weight.toFloatArray()));
            for (String path : optimizer.state().paths()) {
                results.put("m." + path, optimizer.state().expAvg(manager, path).toFloatArray());
                results.put("v." + path, optimizer.state().expAvgSq(manager, path).toFloatArray());
            }
            return results;
        }
    }

    private static NDArray values(NDManager manager, Random random, Shape shape) {
        float[] x = new float[(int) shape.size()];
        for (int i = 0; i < x.length; i++) {
            x[i] = (float) random.nextGaussian();
        }
        return manager.create(x, shape);
    }

    @Property(tries = 25)
    void step_anyWay_sameBitsAsInMemory(
            @ForAll long seed,
            @ForAll @IntRange(min = 1, max = 6) int parameters,
            @ForAll @IntRange(min = 1, max = 200) int bucket,
            @ForAll Way way) {
        Map<String, float[]> memory =
                trained(builder().optClipNorm(1).optBucketElements(bucket), seed, parameters, 5);
        Map<String, float[]> other =
                trained(
                        way.apply(builder(), FOLDER).optClipNorm(1).optBucketElements(bucket),
                        seed,
                        parameters,
                        5);
        assertEquals(memory.keySet(), other.keySet());
        memory.forEach((path, values) -> assertArrayEquals(values, other.get(path), path));
    }

    @ParameterizedTest
    @EnumSource(names = {"STAGED", "STAGED_FILES"})
    void lastStep_staged_buffersAreTwoBucketsAndNeverMore(Way way) {
        int beta = 64;
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        way.apply(builder(), folder).optBucketElements(beta).build()) {
            assertEquals(0, optimizer.lastStep().stagingBytes());
            NDArray weight = manager.ones(new Shape(50, 20));
            for (int step = 0; step < 20; step++) {
                NDArray gradient = manager.ones(weight.getShape());
                optimizer.step(List.of(new Slot("w", "w", weight, gradient)));
                OptimizerStatistics statistics = optimizer.lastStep();
                assertEquals(2 * beta * 8, statistics.stagingBytes());
                assertTrue(statistics.fetchSeconds() > 0);
                assertTrue(statistics.updateSeconds() > 0);
                assertTrue(statistics.writeBackSeconds() > 0);
            }
        }
    }

    @ParameterizedTest
    @EnumSource(names = {"MEMORY", "FILES"})
    void lastStep_inPlace_thereAreNoBuffers(Way way) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        way.apply(builder(), folder).optBucketElements(64).build()) {
            NDArray weight = manager.ones(new Shape(50, 20));
            NDArray gradient = manager.ones(weight.getShape());
            optimizer.step(List.of(new Slot("w", "w", weight, gradient)));
            assertEquals(0, optimizer.lastStep().stagingBytes());
        }
    }

    /** Of several small parameters in one bucket, an update must leave the others' state alone. */
    @ParameterizedTest
    @EnumSource
    void update_oneOfTwoInABucket_otherKeepsItsState(Way way) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer = way.apply(builder(), folder).build()) {
            NDArray a = manager.ones(new Shape(5));
            NDArray b = manager.ones(new Shape(3));
            optimizer.step(
                    List.of(
                            new Slot("a", "a", a, manager.ones(new Shape(5))),
                            new Slot("b", "b", b, manager.ones(new Shape(3)))));
            float[] m = optimizer.state().expAvg(manager, "a").toFloatArray();
            optimizer.update("b", b, manager.ones(new Shape(3)).mul(3));
            assertArrayEquals(m, optimizer.state().expAvg(manager, "a").toFloatArray());
            assertEquals(1, optimizer.state().step("a"));
            assertEquals(2, optimizer.state().step("b"));
            assertEquals(
                    0.9f * 0.1f + 0.1f * 3,
                    optimizer.state().expAvg(manager, "b").toFloatArray()[0],
                    1e-6f);
        }
    }

    @ParameterizedTest
    @EnumSource
    void close_thenAnything_isRefused(Way way) throws IOException {
        OffloadStreamAdamW optimizer = way.apply(builder(), folder).optBucketElements(4).build();
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            NDArray weight = manager.ones(new Shape(33));
            NDArray gradient = manager.ones(new Shape(33));
            Slot slot = new Slot("w", "w", weight, gradient);
            optimizer.step(List.of(slot));
            float[] before = weight.toFloatArray();
            optimizer.close();
            optimizer.close();
            assertEquals(0, optimizer.lastStep().stagingBytes());
            assertThrows(IllegalStateException.class, () -> optimizer.step(List.of(slot)));
            assertThrows(
                    IllegalStateException.class, () -> optimizer.update("w", weight, gradient));
            IllegalStateException e = assertThrows(IllegalStateException.class, optimizer::state);
            assertTrue(e.getMessage().contains("closed"), e.getMessage());
            assertArrayEquals(before, weight.toFloatArray());
        }
        try (Stream<Path> files = Files.list(folder)) {
            assertEquals(0, files.count());
        }
    }

    @Test
    void optFileTier_badFolderOrTwoPlaces_areRefused() {
        IllegalArgumentException e =
                assertThrows(
                        IllegalArgumentException.class,
                        () -> builder().optFileTier(folder.resolve("none")));
        assertTrue(e.getMessage().contains("none"), e.getMessage());
        assertThrows(
                IllegalArgumentException.class,
                () -> builder().optFileTier(folder).optTier(new HostTier()).build());
    }

    /** A tier that fails when it is told to, and counts what it holds. */
    private static final class Failing implements Tier {

        private final HostTier tier = new HostTier();
        private final AdamWKernels kernels = AdamWKernels.best();
        private final Map<String, NDArray> arrays = new LinkedHashMap<>();
        int allocations = -1;
        boolean reads;
        boolean writes;

        /** Whether pages come and go from one question to the next. */
        boolean flickers;

        private int asked;

        @Override
        public NDArray allocate(String name, long elements) {
            if (allocations-- == 0) {
                throw new UncheckedIOException(new IOException("No space left on device"));
            }
            arrays.put(name, tier.allocate(name, elements));
            return arrays.get(name);
        }

        @Override
        public void free(String name) {
            tier.free(name);
        }

        @Override
        public boolean isBackedByFiles() {
            return true;
        }

        @Override
        public boolean isInMemory(String name) {
            return flickers && asked++ % 2 == 0;
        }

        @Override
        public void read(String name, NDArray target) {
            if (reads) {
                throw new UncheckedIOException(new IOException("read failed"));
            }
            long size = arrays.get(name).size();
            kernels.copy(target, 0, arrays.get(name), 0, size);
        }

        @Override
        public void write(String name, NDArray source) {
            if (writes) {
                throw new UncheckedIOException(new IOException("write failed"));
            }
            kernels.copy(arrays.get(name), 0, source, 0, arrays.get(name).size());
        }

        @Override
        public long bytes() {
            return tier.bytes();
        }

        @Override
        public void close() {
            tier.close();
        }
    }

    @Test
    void step_diskFullAtTheThirdBucket_changesNothingAndCanBeTriedAgain() {
        Failing tier = new Failing();
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        builder().optTier(tier).optBucketElements(10).build()) {
            NDArray weight = manager.ones(new Shape(33));
            Slot slot = new Slot("w", "w", weight, manager.ones(new Shape(33)));
            tier.allocations = 2;
            UncheckedIOException e =
                    assertThrows(UncheckedIOException.class, () -> optimizer.step(List.of(slot)));
            assertTrue(e.getMessage().contains("No space"), e.getMessage());
            assertEquals(0, tier.bytes());
            assertFalse(optimizer.state().paths().contains("w"));
            assertEquals(1f, weight.toFloatArray()[32]);

            optimizer.step(List.of(slot));
            assertEquals(1, optimizer.state().step("w"));
            assertEquals(0.99f, weight.toFloatArray()[32], 1e-6f);
        }
        tier.close();
    }

    @ParameterizedTest
    @EnumSource(names = {"MEMORY", "STAGED"})
    void step_readOrWriteFails_isReportedAndTheNextStepsGoOn(Way way) {
        Failing tier = new Failing();
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        way.apply(builder(), folder).optTier(tier).optBucketElements(10).build()) {
            NDArray weight = manager.ones(new Shape(33));
            Runnable step =
                    () ->
                            optimizer.step(
                                    List.of(
                                            new Slot(
                                                    "w",
                                                    "w",
                                                    weight,
                                                    manager.ones(new Shape(33)))));
            step.run();
            tier.reads = true;
            assertTrue(
                    assertThrows(UncheckedIOException.class, step::run)
                            .getMessage()
                            .contains("read failed"));
            tier.reads = false;
            tier.writes = true;
            assertTrue(
                    assertThrows(UncheckedIOException.class, step::run)
                            .getMessage()
                            .contains("write failed"));
            tier.writes = false;
            float before = weight.toFloatArray()[32];
            step.run();
            assertTrue(weight.toFloatArray()[32] < before);
            // buffers for buckets of 10, whatever the way
            assertEquals(2 * 10 * 8, optimizer.lastStep().stagingBytes());
        }
        tier.close();
    }

    /** Files that fell out of memory are read and written through the buffers: same bits. */
    @Property(tries = 15)
    void step_filesNotInMemory_sameBitsAsInMemory(
            @ForAll long seed,
            @ForAll @IntRange(min = 1, max = 6) int parameters,
            @ForAll @IntRange(min = 1, max = 200) int bucket) {
        Failing tier = new Failing();
        Map<String, float[]> memory =
                trained(builder().optBucketElements(bucket), seed, parameters, 5);
        Map<String, float[]> other =
                trained(builder().optTier(tier).optBucketElements(bucket), seed, parameters, 5);
        assertEquals(memory.keySet(), other.keySet());
        memory.forEach((path, values) -> assertArrayEquals(values, other.get(path), path));
        tier.close();
    }

    /** Buffers that were made for a small bucket, when pages of a large one go at any moment. */
    @Test
    void step_pagesDroppedWhileTheyAreAskedFor_sameBitsAsInMemory() {
        Failing tier = new Failing();
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW files = builder().optTier(tier).build();
                OffloadStreamAdamW memory = builder().build()) {
            Map<OffloadStreamAdamW, NDArray> weights = new LinkedHashMap<>();
            for (OffloadStreamAdamW optimizer : List.of(files, memory)) {
                tier.flickers = false;
                optimizer.step(
                        List.of(
                                new Slot(
                                        "s",
                                        "s",
                                        manager.ones(new Shape(3)),
                                        manager.ones(new Shape(3)))));
                tier.flickers = true;
                NDArray weight = manager.ones(new Shape(50));
                weights.put(optimizer, weight);
                for (int i = 0; i < 4; i++) {
                    optimizer.step(
                            List.of(new Slot("w", "w", weight, manager.ones(new Shape(50)))));
                }
            }
            assertArrayEquals(
                    weights.get(memory).toFloatArray(), weights.get(files).toFloatArray());
        }
        tier.close();
    }

    /** The next bucket is read while the last one is updated, and not only then asked for. */
    @ParameterizedTest
    @EnumSource(names = {"MEMORY", "STAGED"})
    void run_twoBuckets_nextIsFetchedDuringTheUpdate(Way way) {
        CountDownLatch fetched = new CountDownLatch(2);
        HostTier host = new HostTier();
        Tier tier =
                new Tier() {
                    @Override
                    public NDArray allocate(String name, long elements) {
                        return host.allocate(name, elements);
                    }

                    @Override
                    public void free(String name) {
                        host.free(name);
                    }

                    @Override
                    public boolean isBackedByFiles() {
                        return true;
                    }

                    @Override
                    public void readAhead(String name) {
                        fetched.countDown();
                    }

                    @Override
                    public long bytes() {
                        return host.bytes();
                    }

                    @Override
                    public void close() {
                        host.close();
                    }
                };
        StateBuckets buckets = new StateBuckets(tier, 10);
        buckets.ensure(Map.of("w", new Need(new Shape(20), false)));
        List<Job> jobs =
                List.of(new Job(buckets.bucket(0), 0, 10), new Job(buckets.bucket(1), 0, 10));
        try (BucketPipeline pipeline =
                new BucketPipeline(tier, AdamWKernels.best(), way == Way.STAGED)) {
            pipeline.run(
                    jobs,
                    null,
                    Device.cpu(),
                    (job, state) -> {
                        try {
                            assertTrue(fetched.await(1, TimeUnit.MINUTES));
                        } catch (InterruptedException e) {
                            throw new IllegalStateException(e);
                        }
                    });
        }
        tier.close();
    }

    /** Background threads start with the gradient mode on; the caller's must stay as it was. */
    @Test
    void step_staged_leavesTheGradientMode() {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch");
                OffloadStreamAdamW optimizer =
                        builder().optStaged(true).optBucketElements(5).build();
                GradMode on = GradMode.on()) {
            NDArray weight = manager.ones(new Shape(33));
            weight.setRequiresGradient(true);
            optimizer.step(List.of(new Slot("w", "w", weight, manager.ones(new Shape(33)))));
            assertTrue(GradMode.isOn());
            assertEquals(0.99f, weight.toFloatArray()[7], 1e-6f);
            assertEquals(DataType.FLOAT32, weight.getDataType());
        }
    }
}
