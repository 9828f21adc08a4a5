package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTimeoutPreemptively;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.djlmoe.cache.EvictionPolicy;
import org.djlmoe.cache.ExpertTrace;
import org.djlmoe.cache.LoadReplay;
import org.djlmoe.cache.ReplayResult;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.reference.ProcessMemory;
import org.djlmoe.routing.ExpertMask;
import org.junit.jupiter.api.Assumptions;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.EnumSource;
import org.junit.jupiter.params.provider.ValueSource;

class OffloadedExpertsTest {

    private static final int PROMPT = 9;
    private static final int TOKENS = 60;
    private static final MoeConfig CONFIG = ServedModel.config().build();

    @TempDir private static Path folder;
    private static Path packed;

    @BeforeAll
    static void pack() throws IOException {
        ServedModel.save(folder);
        packed = folder.resolve("experts.pack");
        FileExpertStore.pack(folder, CONFIG, Packing.EXACT, packed);
    }

    private static OffloadedExperts.Builder offloaded(ExpertStore store, int capacity) {
        return OffloadedExperts.builder()
                .setStore(store)
                .setCapacity(capacity)
                .setTopK(ServedModel.TOP_K)
                .optSeed(5)
                .optGamma(0.8)
                .optStaticSet(
                        ExpertMask.of(
                                new boolean[][] {
                                    {true, true, false, false, false, false, false, false},
                                    {false, false, false, true, true, false, false, false},
                                    {true, false, false, false, false, false, false, true}
                                }));
    }

    /** Logits of every position and the routing. */
    private record Run(
            float[][] logits, ExpertTrace trace, ExpertTraffic prompt, ExpertTraffic decode) {}

    private static Run run(ServedExperts experts, int chunk) throws IOException {
        try (IncrementalDecoder decoder = IncrementalDecoder.load(folder, experts);
                KvCache cache = decoder.newCache(1, TOKENS)) {
            ExpertTrace.Builder trace =
                    ExpertTrace.builder()
                            .setNumExperts(ServedModel.EXPERTS)
                            .setTopK(ServedModel.TOP_K)
                            .setNumLayers(ServedModel.LAYERS)
                            .beginRequest();
            for (int l = 0; l < ServedModel.LAYERS; l++) {
                int layer = l;
                decoder.decoder()
                        .moeBlocks()
                        .get(l)
                        .router()
                        .setObserver(ids -> trace.append(layer, ids.toLongArray()));
            }
            int[] tokens = ServedModel.tokens(TOKENS, 11);
            List<float[]> logits =
                    new ArrayList<>(
                            List.of(decoder.score(cache, Arrays.copyOf(tokens, PROMPT), chunk)));
            for (int t = PROMPT; t < TOKENS; t++) {
                logits.add(decoder.decode(cache, tokens[t])[0]);
            }
            return new Run(
                    logits.toArray(float[][]::new),
                    trace.build(),
                    experts.promptTraffic(),
                    experts.decodeTraffic());
        }
    }

    private static Run resident(int chunk) throws IOException {
        try (FileExpertStore store = FileExpertStore.open(packed, FileExpertStore.Reads.CACHED)) {
            return run(ResidentExperts.load(store), chunk);
        }
    }

    private static ReplayResult replay(
            ExpertTrace trace,
            EvictionPolicy.Type policy,
            EvictionPolicy.Admission admission,
            int capacity,
            int warmUp) {
        ExpertMask fixed =
                ExpertMask.of(
                        new boolean[][] {
                            {true, true, false, false, false, false, false, false},
                            {false, false, false, true, true, false, false, false},
                            {true, false, false, false, false, false, false, true}
                        });
        return LoadReplay.builder()
                .setCapacity(capacity)
                .optAdmission(admission)
                .optWarmUpTokens(warmUp)
                .optSeed(5)
                .optGamma(0.8)
                .optStaticSet(fixed)
                .build()
                .run(trace, policy);
    }

    private static long misses(ReplayResult result) {
        return result.misses().stream().mapToLong(Long::longValue).sum();
    }

    @ParameterizedTest
    @EnumSource(value = EvictionPolicy.Type.class, mode = EnumSource.Mode.EXCLUDE, names = "BELADY")
    void run_everyPolicyAndAdmission_residentLogitsAndReplayedLoads(EvictionPolicy.Type policy)
            throws IOException {
        Run expected = resident(4);
        for (EvictionPolicy.Admission admission : EvictionPolicy.Admission.values()) {
            for (int capacity : new int[] {2, 3, 5}) {
                try (FileExpertStore store =
                        FileExpertStore.open(packed, FileExpertStore.Reads.CACHED)) {
                    OffloadedExperts experts =
                            offloaded(store, capacity)
                                    .optPolicy(policy)
                                    .optAdmission(admission)
                                    .build();
                    Run actual = run(experts, 4);
                    String what = policy + " " + admission + " " + capacity;
                    assertEquals(TOKENS, actual.logits().length);
                    for (int t = 0; t < TOKENS; t++) {
                        assertArrayEquals(expected.logits()[t], actual.logits()[t], what);
                    }
                    long predicted =
                            misses(replay(actual.trace(), policy, admission, capacity, PROMPT));
                    assertEquals(predicted, actual.decode().loads(), what);
                    assertEquals(predicted, actual.decode().misses(), what);
                    assertEquals(
                            misses(replay(actual.trace(), policy, admission, capacity, 0)),
                            actual.decode().misses() + actual.prompt().misses(),
                            what);
                    assertTrue(actual.prompt().loads() <= actual.prompt().misses(), what);
                }
            }
        }
    }

    @Test
    void run_promptTokenByToken_loadsOfTheReplayFromTheFirstToken() throws IOException {
        try (HostExpertStore store = HostExpertStore.load(folder, CONFIG, Packing.EXACT)) {
            Run run = run(offloaded(store, 4).optPolicy(EvictionPolicy.Type.LRU).build(), 1);
            assertEquals(
                    misses(
                            replay(
                                    run.trace(),
                                    EvictionPolicy.Type.LRU,
                                    EvictionPolicy.Admission.ALWAYS,
                                    4,
                                    0)),
                    run.prompt().loads() + run.decode().loads());
            assertEquals(TOKENS - PROMPT, run.decode().tokens());
            assertEquals(PROMPT, run.prompt().tokens());
            assertEquals(
                    (run.prompt().loads() + run.decode().loads()) * store.layout().bytes(),
                    run.prompt().bytes() + run.decode().bytes());
        }
    }

    @ParameterizedTest
    @EnumSource(value = Prefetch.class, mode = EnumSource.Mode.EXCLUDE, names = "OFF")
    void run_prefetch_sameLogitsSameMissesFewerLoadsAndNoSlotLost(Prefetch prefetch)
            throws IOException {
        Run expected = resident(4);
        try (FileExpertStore store = FileExpertStore.open(packed, FileExpertStore.Reads.CACHED)) {
            OffloadedExperts experts =
                    offloaded(store, 3)
                            .optPolicy(EvictionPolicy.Type.LRU)
                            .optPrefetch(prefetch)
                            .build();
            Run actual = run(experts, 4);
            for (int t = 0; t < TOKENS; t++) {
                assertArrayEquals(expected.logits()[t], actual.logits()[t]);
            }
            ExpertTraffic decode = actual.decode();
            assertEquals(
                    misses(
                            replay(
                                    actual.trace(),
                                    EvictionPolicy.Type.LRU,
                                    EvictionPolicy.Admission.ALWAYS,
                                    3,
                                    PROMPT)),
                    decode.misses());
            assertEquals(decode.misses(), decode.loads() + decode.prefetchHits());
            assertTrue(decode.prefetchHits() > 0, decode.toString());
            assertTrue(decode.prefetches() >= decode.prefetchHits(), decode.toString());
            assertEquals(0, actual.prompt().prefetches());
            int residents = 0;
            for (int l = 0; l < ServedModel.LAYERS; l++) {
                residents += experts.residents(l).length;
            }
            assertEquals(3 * ServedModel.LAYERS, residents);
            assertEquals(3 * ServedModel.LAYERS + 2 * ServedModel.TOP_K, experts.totalSlots());
            assertTrue(
                    experts.freeSlots() >= ServedModel.TOP_K
                            && experts.freeSlots() <= 2 * ServedModel.TOP_K,
                    "free: " + experts.freeSlots());
        }
    }

    @ParameterizedTest
    @ValueSource(ints = {8, 100})
    void run_capacityOfAllExperts_eachLoadedOnce(int capacity) throws IOException {
        try (FileExpertStore store = FileExpertStore.open(packed, FileExpertStore.Reads.CACHED)) {
            Run actual = run(offloaded(store, capacity).build(), 4);
            long used =
                    Arrays.stream(actual.trace().usage())
                            .flatMapToLong(Arrays::stream)
                            .filter(n -> n > 0)
                            .count();
            assertEquals(used, actual.prompt().loads() + actual.decode().loads());
            Run expected = resident(4);
            for (int t = 0; t < TOKENS; t++) {
                assertArrayEquals(expected.logits()[t], actual.logits()[t]);
            }
        }
    }

    @ParameterizedTest
    @CsvSource({"1, true", "1, false", "3, true", "3, false"})
    void run_bf16AndPadding_sameAsResidentAndNearTheModel(int widen, boolean half)
            throws IOException {
        Run exact = resident(4);
        Path file = folder.resolve("padded-" + widen + half);
        FileExpertStore.pack(folder, CONFIG, new Packing(half, widen), file);
        try (FileExpertStore store = FileExpertStore.open(file, FileExpertStore.Reads.CACHED)) {
            assertEquals(12 * widen, store.layout().inner());
            assertEquals(3 * 16 * 12 * widen * (half ? 2 : 4), store.layout().bytes());
            Run resident = run(ResidentExperts.load(store), 4);
            Run offloaded = run(offloaded(store, 3).build(), 4);
            for (int t = 0; t < TOKENS; t++) {
                assertArrayEquals(resident.logits()[t], offloaded.logits()[t]);
                if (!half) {
                    assertArrayEquals(exact.logits()[t], offloaded.logits()[t], 1e-5f);
                }
            }
            assertArrayEquals(exact.logits()[0], offloaded.logits()[0], half ? 0.2f : 1e-5f);
            if (!half) {
                assertArrayEquals(exact.trace().usage(), offloaded.trace().usage());
            }
            // The other store holds the same records.
            try (HostExpertStore host =
                    HostExpertStore.load(folder, CONFIG, new Packing(half, widen))) {
                ByteBuffer one = ByteBuffer.allocateDirect(store.layout().bytes());
                ByteBuffer other = ByteBuffer.allocateDirect(store.layout().bytes());
                store.read(2, 5, one);
                host.read(2, 5, other);
                assertEquals(one.clear(), other.clear());
            }
        }
    }

    @Test
    void decode_fourThousandTokens_memoryFlat() throws IOException {
        Assumptions.assumeTrue(ProcessMemory.isKnown(), "memory is read from /proc");
        try (FileExpertStore store = FileExpertStore.open(packed, FileExpertStore.Reads.CACHED);
                IncrementalDecoder decoder =
                        IncrementalDecoder.load(
                                folder, offloaded(store, 3).optPrefetch(Prefetch.ROUTER).build());
                KvCache cache = decoder.newCache(1, 500)) {
            long before = 0;
            for (int round = 0; round < 10; round++) {
                cache.clear();
                for (int token : ServedModel.tokens(500, round)) {
                    decoder.decode(cache, token);
                }
                if (round == 1) {
                    before = ProcessMemory.nativeBytes();
                }
            }
            long growth = ProcessMemory.nativeBytes() - before;
            assertTrue(growth <= 8 << 20, "grew by " + (growth >> 10) + " KiB");
        }
    }

    @Test
    void run_coldReads_sameLogitsAndTheyAreNamed() throws IOException {
        try (FileExpertStore store = FileExpertStore.open(packed, FileExpertStore.Reads.COLD)) {
            assertTrue(
                    store.describe().contains("posix_fadvise")
                            || store.describe().contains("O_DIRECT"),
                    store.describe());
            Run expected = resident(4);
            Run actual = run(offloaded(store, 3).build(), 4);
            for (int t = 0; t < TOKENS; t++) {
                assertArrayEquals(expected.logits()[t], actual.logits()[t]);
            }
        }
    }

    @Test
    void directReads_everyRecord_bytesOfOrdinaryReads() throws IOException {
        try (FileExpertStore store = FileExpertStore.open(packed, FileExpertStore.Reads.CACHED);
                FileExpertStore.DirectReads direct =
                        FileExpertStore.DirectReads.open(packed, store.layout().bytes())) {
            int bytes = store.layout().bytes();
            for (int r = 0; r < ServedModel.LAYERS * ServedModel.EXPERTS; r++) {
                ByteBuffer one = ByteBuffer.allocateDirect(bytes);
                ByteBuffer other = ByteBuffer.allocateDirect(bytes);
                store.read(r / ServedModel.EXPERTS, r % ServedModel.EXPERTS, one);
                direct.read((long) r * bytes, other);
                assertEquals(one.clear(), other.clear(), "record " + r);
            }
        }
    }

    /** A store whose reads fail, or take their time, from some moment on. */
    private static final class Flaky implements ExpertStore {
        private final ExpertStore store;
        private volatile Throwable failure;

        Flaky(ExpertStore store) {
            this.store = store;
        }

        @Override
        public ExpertLayout layout() {
            return store.layout();
        }

        @Override
        public void read(int layer, int expert, ByteBuffer target) throws IOException {
            if (failure instanceof IOException io) {
                throw io;
            }
            if (failure instanceof Error error) {
                throw error;
            }
            store.read(layer, expert, target);
        }

        @Override
        public String describe() {
            return "flaky store";
        }

        @Override
        public void close() throws IOException {
            store.close();
        }
    }

    @ParameterizedTest
    @ValueSource(booleans = {true, false})
    void load_fails_clearErrorNoHangAndNoFurtherUse(boolean io) throws IOException {
        try (Flaky store = new Flaky(HostExpertStore.load(folder, CONFIG, Packing.EXACT))) {
            OffloadedExperts experts = offloaded(store, 2).optPrefetch(Prefetch.ROUTER).build();
            try (IncrementalDecoder decoder = IncrementalDecoder.load(folder, experts);
                    KvCache cache = decoder.newCache(1, 100)) {
                decoder.prefill(cache, new int[][] {{1, 2, 3}}, 4);
                store.failure = io ? new IOException("disk gone") : new StackOverflowError("deep");
                RuntimeException first =
                        assertTimeoutPreemptively(
                                Duration.ofSeconds(30),
                                () ->
                                        assertThrows(
                                                RuntimeException.class,
                                                () -> decodeAll(decoder, cache)));
                assertEquals(
                        io ? UncheckedIOException.class : IllegalStateException.class,
                        first.getClass());
                assertTrue(
                        first.getMessage()
                                .matches(
                                        "Cannot load expert \\d of layer \\d from flaky store: .*"),
                        first.getMessage());
                store.failure = null;
                IllegalStateException second =
                        assertThrows(IllegalStateException.class, () -> decodeAll(decoder, cache));
                assertTrue(second.getMessage().contains("make new ones"), second.getMessage());
            }
            assertThrows(
                    IllegalStateException.class, () -> experts.begin(0, new long[] {0, 1}, true));
        }
    }

    private static void decodeAll(IncrementalDecoder decoder, KvCache cache) {
        for (int token : ServedModel.tokens(50, 12)) {
            decoder.decode(cache, token);
        }
    }

    @Test
    void open_missingTruncatedOrForeignFile_namesFileAndFix() throws IOException {
        Path missing = folder.resolve("nowhere");
        IOException e =
                assertThrows(
                        IOException.class,
                        () -> FileExpertStore.open(missing, FileExpertStore.Reads.CACHED));
        assertTrue(e.getMessage().contains("nowhere: pack it"), e.getMessage());

        Path cut = folder.resolve("cut");
        Files.copy(packed, cut);
        try (FileChannel channel = FileChannel.open(cut, StandardOpenOption.WRITE)) {
            channel.truncate(channel.size() - 100);
        }
        e =
                assertThrows(
                        SafetensorsException.class,
                        () -> FileExpertStore.open(cut, FileExpertStore.Reads.CACHED));
        assertTrue(e.getMessage().contains("cut"), e.getMessage());

        Path garbage = Files.write(folder.resolve("garbage"), new byte[1000]);
        assertThrows(
                SafetensorsException.class,
                () -> FileExpertStore.open(garbage, FileExpertStore.Reads.CACHED));

        Path model = folder.resolve("model.safetensors");
        e =
                assertThrows(
                        SafetensorsException.class,
                        () -> FileExpertStore.open(model, FileExpertStore.Reads.CACHED));
        assertTrue(e.getMessage().contains("no expert store"), e.getMessage());
    }

    @Test
    void read_fileCutWhileOpen_errorNotOldBytes() throws IOException {
        Path file = Files.copy(packed, folder.resolve("shrinking"));
        try (FileExpertStore store = FileExpertStore.open(file, FileExpertStore.Reads.CACHED)) {
            try (FileChannel channel = FileChannel.open(file, StandardOpenOption.WRITE)) {
                channel.truncate(channel.size() / 2);
            }
            UncheckedIOException e =
                    assertThrows(
                            UncheckedIOException.class, () -> run(offloaded(store, 2).build(), 4));
            assertTrue(e.getMessage().contains("truncated"), e.getMessage());
        }
    }

    @Test
    void openOrPack_sameCheckpoint_keptAndAnotherPackingOrCheckpointRepacked() throws IOException {
        Path copy = Files.createDirectories(folder.resolve("copy"));
        for (String name : List.of("config.json", "model.safetensors")) {
            Files.copy(folder.resolve(name), copy.resolve(name));
        }
        Path file = folder.resolve("kept");
        open(copy, Packing.EXACT, file);
        Object first = Files.readAttributes(file, "unix:ino").get("ino");
        open(copy, Packing.EXACT, file);
        assertEquals(first, Files.readAttributes(file, "unix:ino").get("ino"));
        open(copy, new Packing(true, 1), file);
        try (FileExpertStore store = FileExpertStore.open(file, FileExpertStore.Reads.CACHED)) {
            assertTrue(store.layout().half());
        }
        Object second = Files.readAttributes(file, "unix:ino").get("ino");
        Files.setLastModifiedTime(
                copy.resolve("model.safetensors"),
                java.nio.file.attribute.FileTime.fromMillis(1_000_000));
        byte[] before = Files.readAllBytes(file);
        open(copy, new Packing(true, 1), file);
        assertFalse(Arrays.equals(before, Files.readAllBytes(file)), "not packed again: " + second);
    }

    private static void open(Path checkpoint, Packing packing, Path file) throws IOException {
        FileExpertStore.openOrPack(checkpoint, CONFIG, packing, file, FileExpertStore.Reads.CACHED)
                .close();
    }

    @Test
    void build_wrongSettings_refusedWithTheFix() throws IOException {
        try (HostExpertStore store = HostExpertStore.load(folder, CONFIG, Packing.EXACT)) {
            assertRefused("capacity of at least 2", offloaded(store, 1));
            assertRefused("call setStore", OffloadedExperts.builder().setCapacity(2).setTopK(2));
            assertRefused("topK", offloaded(store, 4).setTopK(0));
            assertRefused(
                    "replayed trace", offloaded(store, 4).optPolicy(EvictionPolicy.Type.BELADY));
            assertRefused(
                    "needs its set",
                    offloaded(store, 4).optPolicy(EvictionPolicy.Type.STATIC).optStaticSet(null));
            try (OffloadedExperts other = offloaded(store, 4).setTopK(3).build()) {
                IllegalArgumentException e =
                        assertThrows(
                                IllegalArgumentException.class,
                                () -> IncrementalDecoder.load(folder, other));
                assertTrue(e.getMessage().contains("top-3"), e.getMessage());
            }
        }
    }

    private static void assertRefused(String part, OffloadedExperts.Builder builder) {
        IllegalArgumentException e = assertThrows(IllegalArgumentException.class, builder::build);
        assertTrue(e.getMessage().contains(part), e.getMessage());
    }

    /** A load that nobody waited for may still be filling the slot that its expert has. */
    @Test
    void begin_layerBeforeNeverComputed_refused() throws IOException {
        try (FileExpertStore store = FileExpertStore.open(packed, FileExpertStore.Reads.CACHED);
                OffloadedExperts experts =
                        OffloadedExperts.builder()
                                .setStore(store)
                                .setTopK(ServedModel.TOP_K)
                                .setCapacity(4)
                                .build()) {
            experts.begin(0, new long[] {0, 1}, true);
            IllegalStateException e =
                    assertThrows(
                            IllegalStateException.class,
                            () -> experts.begin(0, new long[] {0, 1}, true));
            assertTrue(e.getCause().getMessage().contains("never computed"), e.toString());
        }
    }

    @Test
    void close_whileLoadsWait_endsTheLoaderThread() throws IOException {
        try (HostExpertStore store = HostExpertStore.load(folder, CONFIG, Packing.EXACT)) {
            OffloadedExperts experts = offloaded(store, 2).build();
            experts.requireFor(CONFIG);
            experts.begin(0, new long[] {0, 1, 2, 3}, false);
            experts.close();
            experts.close();
            assertFalse(
                    Thread.getAllStackTraces().keySet().stream()
                            .anyMatch(t -> t.getName().equals("expert-loader") && t.isAlive()));
        }
    }

    @Test
    void decode_interrupted_errorAndFlagKept() throws IOException {
        try (HostExpertStore store = HostExpertStore.load(folder, CONFIG, Packing.EXACT);
                IncrementalDecoder decoder =
                        IncrementalDecoder.load(folder, offloaded(new Slow(store), 2).build());
                KvCache cache = decoder.newCache(1, 100)) {
            Thread.currentThread().interrupt();
            IllegalStateException e =
                    assertThrows(IllegalStateException.class, () -> decodeAll(decoder, cache));
            assertTrue(Thread.interrupted());
            assertTrue(e.getMessage().contains("Interrupted"), e.getMessage());
        }
    }

    /** A store that takes long enough for a wait to begin. */
    private record Slow(ExpertStore store) implements ExpertStore {
        @Override
        public ExpertLayout layout() {
            return store.layout();
        }

        @Override
        public void read(int layer, int expert, ByteBuffer target) throws IOException {
            try {
                Thread.sleep(50);
            } catch (InterruptedException e) {
                throw new IOException(e);
            }
            store.read(layer, expert, target);
        }

        @Override
        public String describe() {
            return store.describe();
        }

        @Override
        public void close() {}
    }
}
