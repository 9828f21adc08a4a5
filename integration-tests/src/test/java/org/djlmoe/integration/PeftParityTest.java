package org.djlmoe.integration;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.ParameterStore;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import org.djlmoe.checkpoint.PeftAdapter;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.training.LanguageModel;
import org.djlmoe.training.MergedModel;
import org.djlmoe.vocab.VocabProjection;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** Adapters against Hugging Face PEFT, in both directions: see {@code fixtures/peft/README.md}. */
class PeftParityTest {

    private static final Path PEFT = PeftFixture.FIXTURES.resolve("peft");

    private static Path base(String folder) {
        return folder.equals("square") ? PEFT.resolve("square-base") : PeftFixture.BASE;
    }

    @Test
    void save_theFixturesAdapter_writesTheFilesThatPeftHasLoaded(@TempDir Path folder)
            throws IOException {
        PeftFixture.write(folder);
        for (String file : new String[] {PeftAdapter.CONFIG_FILE, PeftAdapter.WEIGHTS_FILE}) {
            assertEquals(
                    -1, Files.mismatch(PeftFixture.OURS.resolve(file), folder.resolve(file)), file);
        }
    }

    @Test
    void logits_ofOurAdapter_equalWhatPeftComputesFromItsFiles() throws IOException {
        try (LanguageModel model = load(PeftFixture.BASE)) {
            assertClose("base", model, "ours", 1e-5);
            PeftFixture.attach(model);
            assertClose("logits", model, "ours", 1e-5);
        }
    }

    @ParameterizedTest
    @CsvSource({
        "ours, 4, true",
        "stacked, 4, true",
        "down-only, 2, false",
        "per-expert, 6, false",
        "converted, 6, false",
        "square, 2, false"
    })
    void attachAdapter_everyForm_logitsOfPeft(String folder, int rank, boolean routers)
            throws IOException {
        try (LanguageModel model = load(base(folder))) {
            PeftAdapter adapter = model.attachAdapter(PEFT.resolve(folder));
            assertEquals(rank, adapter.rank());
            assertEquals(routers, adapter.hasRouters());
            assertClose("logits", model, folder, 1e-5);
            float[] unmerged = logits(model, folder);
            try (MergedModel merged = model.mergeAdaptersForNow()) {
                assertTrue(merged.changed() > 0);
                assertClose(unmerged, logits(model, folder), 1e-5);
                assertClose("logits", model, folder, 1e-5);
            }
            assertArrayEquals(unmerged, logits(model, folder), "as before the merge, to the bit");
            model.mergeAdapters();
            assertClose("logits", model, folder, 1e-5);
        }
    }

    @ParameterizedTest
    @CsvSource({"stacked, true", "per-expert, false", "down-only, false", "square, false"})
    void saveAdapter_oneThatPeftWrote_readAgainTheSameLogits(
            String folder, boolean routers, @TempDir Path again) throws IOException {
        float[] expected;
        try (LanguageModel model = load(base(folder))) {
            model.attachAdapter(PEFT.resolve(folder));
            expected = logits(model, folder);
            model.saveAdapter(again, null, routers);
        }
        try (LanguageModel model = load(base(folder))) {
            model.attachAdapter(again);
            assertArrayEquals(expected, logits(model, folder));
        }
    }

    private static LanguageModel load(Path folder) throws IOException {
        return LanguageModel.load(folder, LanguageModel.Chunks.DEFAULT);
    }

    private static void assertClose(
            String expected, LanguageModel model, String folder, double bound) throws IOException {
        try (SafetensorsReader file =
                SafetensorsReader.open(PEFT.resolve(folder).resolve("reference.safetensors"))) {
            FloatBuffer values = FloatBuffer.allocate((int) file.info(expected).elements());
            file.readF32(expected, 0, values);
            assertClose(values.array(), logits(model, folder), bound);
        }
    }

    private static void assertClose(float[] expected, float[] actual, double bound) {
        assertEquals(expected.length, actual.length);
        double difference = 0;
        double norm = 0;
        for (int i = 0; i < expected.length; i++) {
            difference += Math.pow((double) expected[i] - actual[i], 2);
            norm += Math.pow(expected[i], 2);
        }
        double error = Math.sqrt(difference / norm);
        assertTrue(error <= bound, "relative error " + error + " > " + bound);
    }

    private static float[] logits(LanguageModel model, String folder) throws IOException {
        try (SafetensorsReader file =
                        SafetensorsReader.open(
                                PEFT.resolve(folder).resolve("reference.safetensors"));
                NDManager manager = model.manager().newSubManager()) {
            int count = (int) file.info("input_ids").elements();
            ByteBuffer bytes = ByteBuffer.allocate(count * 8).order(ByteOrder.LITTLE_ENDIAN);
            file.readBytes("input_ids", 0, bytes);
            long[] ids = new long[count];
            bytes.flip().asLongBuffer().get(ids);
            NDList out =
                    model.decoder()
                            .forward(
                                    new ParameterStore(manager, false),
                                    new NDList(manager.create(ids, new Shape(2, count / 2))),
                                    false);
            NDArray logits = VocabProjection.logits(out.get(0), out.get(1), null);
            return logits.toFloatArray();
        }
    }
}
