package org.djlmoe.model;

import static org.djlmoe.reference.Numbers.assertClose;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.engine.Engine;
import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.BoundedTrainer;
import org.djlmoe.autograd.GradMode;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.parallel.InProcessGroup;
import org.djlmoe.parallel.ProcessGroup;
import org.djlmoe.parallel.SoloGroup;
import org.djlmoe.serving.IncrementalDecoder;
import org.djlmoe.vocab.RingDtpLoss;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** A decoder over ranks beside the same decoder in one process. A hang is a failure. */
@Timeout(120)
class MoeDecoderOverRanksTest {

    private static final int VOCAB = 13;
    private static final int EXPERTS = 5;
    private static final double BOUND = 1e-5;

    /**
     * The thread that loads the engine has its gradient mode off, as other tests expect of theirs.
     */
    @BeforeAll
    static void loadEngine() {
        assertEquals("PyTorch", Engine.getEngine("PyTorch").getEngineName());
    }

    private static MoeConfig config(boolean extended) {
        return MoeConfig.builder()
                .setVocabSize(VOCAB)
                .setHiddenSize(8)
                .setIntermediateSize(6)
                .setNumLayers(2)
                .setNumHeads(4)
                .optNumKeyValueHeads(2)
                .setNumExperts(EXPERTS)
                .setTopK(2)
                .optRopeTheta(100)
                .optInitializerRange(0.3)
                .optSharedExperts(extended ? 7 : 0, true)
                .optRoutingBias(extended)
                .build();
    }

    private static MoeDecoder.Builder builder(boolean extended) {
        return MoeDecoder.builder()
                .setConfig(config(extended))
                .optChunkTokens(4)
                .optBalanceCoefficient(extended ? 0.1 : 0);
    }

    /** Weights of a whole decoder by name, balancing biases included. */
    private static Map<String, float[]> weights(boolean extended) {
        Engine.getEngine("PyTorch").setRandomSeed(3);
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            MoeDecoder decoder = builder(extended).build();
            decoder.initialize(manager, DataType.FLOAT32, new Shape(1, 1));
            Map<String, float[]> weights = new LinkedHashMap<>();
            decoder.checkpointParameters()
                    .forEach((name, p) -> weights.put(name, p.getArray().toFloatArray()));
            weights.replaceAll(
                    (name, w) -> name.endsWith("bias") ? new float[] {0, 0.1f, 0, -0.1f, 0} : w);
            return weights;
        }
    }

    private static boolean isOfExperts(String name) {
        return name.contains(".experts.");
    }

    private static int firstExpert(MoeDecoder decoder) {
        return decoder.moeBlocks().get(0).dispatch() == null
                ? 0
                : decoder.moeBlocks().get(0).dispatch().firstExpert();
    }

    private static void fill(MoeDecoder decoder, Map<String, float[]> weights, NDManager manager) {
        try (GradMode off = GradMode.off()) {
            decoder.checkpointParameters()
                    .forEach(
                            (name, p) -> {
                                NDArray target = p.getArray();
                                float[] all = weights.get(name);
                                int first =
                                        isOfExperts(name)
                                                ? firstExpert(decoder) * (all.length / EXPERTS)
                                                : 0;
                                float[] own =
                                        Arrays.copyOfRange(all, first, first + (int) target.size());
                                try (NDArray values = manager.create(own, target.getShape())) {
                                    target.subi(target).addi(values);
                                }
                            });
        }
    }

    /** Ranks have batches of different sizes. */
    private static NDArray tokens(NDManager manager, int rank, int step) {
        Shape shape = new Shape(2 + rank, 5);
        long[] ids = new long[(int) shape.size()];
        Arrays.setAll(ids, i -> (i * i + 3L * i + step + 5L * rank) % VOCAB);
        return manager.create(ids, shape);
    }

    /** Loss and gradients of one batch. */
    private record Pass(float loss, Map<String, float[]> gradients) {}

    private static Pass run(MoeDecoder decoder, Map<String, float[]> weights, int rank) {
        try (Model model = Model.newInstance("decoder", "PyTorch")) {
            model.setBlock(decoder);
            DefaultTrainingConfig training =
                    new DefaultTrainingConfig(RingDtpLoss.builder().build())
                            .optDevices(new Device[] {Device.cpu()});
            try (BoundedTrainer trainer = new BoundedTrainer(model, training)) {
                trainer.initialize(new Shape(1, 5));
                fill(decoder, weights, trainer.getManager());
                float value;
                try (NDManager batch = trainer.getManager().newSubManager();
                        GradientCollector collector = trainer.newGradientCollector()) {
                    NDList out = trainer.forward(new NDList(tokens(batch, rank, 0)));
                    NDArray loss =
                            trainer.getLoss().evaluate(new NDList(tokens(batch, rank, 1)), out);
                    collector.backward(loss);
                    value = loss.getFloat();
                }
                Map<String, float[]> gradients = new LinkedHashMap<>();
                for (Map.Entry<String, Parameter> p : decoder.checkpointParameters().entrySet()) {
                    if (p.getValue().getArray().hasGradient()) {
                        try (NDArray gradient = Gradients.of(p.getValue())) {
                            gradients.put(p.getKey(), gradient.toFloatArray());
                        }
                    }
                }
                return new Pass(value, gradients);
            }
        }
    }

    @ParameterizedTest
    @CsvSource({"2, false", "2, true", "3, true"})
    void forwardAndBackward_overRanks_asInOneProcess(int ranks, boolean extended) {
        Map<String, float[]> weights = weights(extended);
        Pass[] expected = new Pass[ranks];
        for (int r = 0; r < ranks; r++) {
            expected[r] = run(builder(extended).build(), weights, r);
        }
        List<Pass> got =
                InProcessGroup.run(
                        ranks,
                        group -> {
                            MoeDecoder decoder =
                                    builder(extended).optGroup(group, d -> d.optLambda(1)).build();
                            Pass pass = run(decoder, weights, group.rank());
                            decoder.moeBlocks()
                                    .forEach(
                                            b ->
                                                    assertTrue(
                                                            b.dispatch().metrics().peakBufferBytes()
                                                                    > 0));
                            return pass;
                        });
        for (int r = 0; r < ranks; r++) {
            assertEquals(expected[r].loss(), got.get(r).loss(), BOUND, "loss of rank " + r);
        }
        assertEquals(expected[0].gradients().keySet(), got.get(0).gradients().keySet());
        // The rank's own where it has the parameter whole, else those of all ranks in order.
        for (String name : expected[0].gradients().keySet()) {
            if (isOfExperts(name)) {
                float[] sum = new float[expected[0].gradients().get(name).length];
                for (Pass pass : expected) {
                    float[] gradient = pass.gradients().get(name);
                    for (int i = 0; i < sum.length; i++) {
                        sum[i] += gradient[i];
                    }
                }
                float[] all = new float[sum.length];
                int at = 0;
                for (Pass pass : got) {
                    float[] gradient = pass.gradients().get(name);
                    System.arraycopy(gradient, 0, all, at, gradient.length);
                    at += gradient.length;
                }
                assertEquals(all.length, at);
                assertClose(sum, all, BOUND, name);
            } else {
                for (int r = 0; r < ranks; r++) {
                    assertClose(
                            expected[r].gradients().get(name),
                            got.get(r).gradients().get(name),
                            BOUND,
                            name + " of rank " + r);
                }
            }
        }
    }

    @Test
    void optGroup_oneProcess_hasAllExperts() {
        try (SoloGroup solo = new SoloGroup()) {
            MoeDecoder decoder = builder(false).optGroup(solo).build();
            decoder.moeBlocks().forEach(block -> assertNull(block.dispatch()));
        }
    }

    /** A part of the experts is neither a checkpoint nor a model to serve. */
    @Test
    void saveAndServe_partOfTheExperts_refused(@TempDir Path folder) {
        InProcessGroup.run(
                2,
                group -> {
                    refuse(group, folder);
                    return null;
                });
    }

    private static void refuse(ProcessGroup group, Path folder) {
        try (NDManager manager = NDManager.newBaseManager(Device.cpu(), "PyTorch")) {
            MoeDecoder decoder = builder(true).optGroup(group).build();
            assertNotNull(decoder.moeBlocks().get(1).dispatch());
            decoder.initialize(manager, DataType.FLOAT32, new Shape(1, 1));
            IllegalArgumentException e =
                    assertThrows(
                            IllegalArgumentException.class,
                            () ->
                                    HfCheckpoint.save(
                                            folder,
                                            decoder.config(),
                                            decoder.checkpointParameters(),
                                            SaveOptions.builder().build()));
            assertTrue(e.getMessage().contains("experts.gate_up_proj"), e.getMessage());
            e = assertThrows(IllegalArgumentException.class, () -> IncrementalDecoder.of(decoder));
            assertTrue(e.getMessage().contains("several ranks"), e.getMessage());
        }
    }
}
