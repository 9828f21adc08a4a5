package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.Arrays;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.checkpoint.Layout;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.checkpoint.StackedTensors;
import org.djlmoe.io.DType;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.training.LanguageModel;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.EnumSource;

/** Reading a checkpoint's experts where they lie, and the rest without them. */
class CheckpointWithoutExpertsTest {

    private static final MoeConfig CONFIG = ServedModel.config().build();
    private static final String GATE_UP = "model.layers.1.mlp.experts.gate_up_proj";

    @TempDir private Path folder;

    @ParameterizedTest
    @EnumSource(Layout.class)
    void read_anyLayoutShardedOrNot_valuesOfTheStackedParameter(Layout layout) throws IOException {
        try (LanguageModel model = ServedModel.create(CONFIG)) {
            model.save(
                    folder,
                    SaveOptions.builder().optLayout(layout).optMaxShardBytes(20_000).build());
            for (String name : new String[] {GATE_UP, GATE_UP.replace("gate_up", "down")}) {
                Shape shape = HfCheckpoint.parameterShapes(CONFIG).get(name);
                float[] expected =
                        model.decoder().checkpointParameters().get(name).getArray().toFloatArray();
                try (StackedTensors tensors = StackedTensors.open(folder)) {
                    // runs that begin and end within a tensor and that span several
                    for (int start : new int[] {0, 7, 191, 192, 400}) {
                        for (int count : new int[] {1, 100, 600}) {
                            FloatBuffer target = FloatBuffer.allocate(count);
                            tensors.read(name, shape.getShape(), start, target);
                            assertArrayEquals(
                                    Arrays.copyOfRange(expected, start, start + count),
                                    target.array(),
                                    name + " from " + start);
                        }
                    }
                    FloatBuffer beyond = FloatBuffer.allocate(2);
                    assertThrows(
                            IllegalArgumentException.class,
                            () ->
                                    tensors.read(
                                            name, shape.getShape(), expected.length - 1, beyond));
                }
            }
        }
    }

    @Test
    void read_missingTensorOrOtherShape_namesIt() throws IOException {
        ServedModel.save(folder);
        try (StackedTensors tensors = StackedTensors.open(folder)) {
            FloatBuffer one = FloatBuffer.allocate(1);
            CheckpointException e =
                    assertThrows(
                            CheckpointException.class,
                            () ->
                                    tensors.read(
                                            GATE_UP.replace("1", "9"),
                                            new long[] {8, 24, 16},
                                            0,
                                            one));
            assertTrue(e.getMessage().contains("layers.9"), e.getMessage());
            e =
                    assertThrows(
                            CheckpointException.class,
                            () -> tensors.read(GATE_UP, new long[] {8, 26, 16}, 0, one));
            assertTrue(e.getMessage().contains("[13, 16]"), e.getMessage());
        }
    }

    @Test
    void load_expertsMissingOrOfAnotherWidth_refused() throws IOException {
        ServedModel.save(folder);
        MoeConfig wider = ServedModel.config().setIntermediateSize(20).build();
        wider.toJson(folder.resolve("config.json"), "float32");
        try (HostExpertStore store = storeOf(wider)) {
            CheckpointException e =
                    assertThrows(
                            CheckpointException.class,
                            () -> IncrementalDecoder.load(folder, ResidentExperts.load(store)));
            assertTrue(e.getMessage().contains("experts.0"), e.getMessage());
        }
    }

    private HostExpertStore storeOf(MoeConfig config) throws IOException {
        Path other = folder.resolve("other");
        try (LanguageModel model = ServedModel.create(config)) {
            model.save(other, SaveOptions.builder().build());
        }
        return HostExpertStore.load(other, config, Packing.EXACT);
    }

    @Test
    void load_storeOfAnotherModel_refusedWithTheFix() throws IOException {
        ServedModel.save(folder);
        MoeConfig wider = ServedModel.config().setNumExperts(6).build();
        try (HostExpertStore store = storeOf(wider)) {
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () -> IncrementalDecoder.load(folder, ResidentExperts.load(store)));
            assertTrue(e.getMessage().contains("pack it again"), e.getMessage());
        }
    }

    @Test
    void load_bf16Checkpoint_logitsOfTheWidenedModel() throws IOException {
        try (LanguageModel model = ServedModel.create(CONFIG)) {
            model.save(folder, SaveOptions.builder().optDtype(DType.BF16).build());
        }
        int[] tokens = ServedModel.tokens(9, 3);
        try (LanguageModel model = LanguageModel.load(folder, LanguageModel.Chunks.DEFAULT);
                HostExpertStore store = HostExpertStore.load(folder, CONFIG, Packing.EXACT);
                IncrementalDecoder decoder =
                        IncrementalDecoder.load(folder, ResidentExperts.load(store));
                KvCache cache = decoder.newCache(1, 9)) {
            float[][] expected = ServedModel.fullForward(model, tokens);
            float[][] actual = decoder.score(cache, tokens, 4);
            for (int t = 0; t < 9; t++) {
                assertArrayEquals(expected[t], actual[t], 1e-5f);
            }
        }
    }
}
