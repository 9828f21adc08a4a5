package org.djlmoe.autograd;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;

import ai.djl.Device;
import ai.djl.Model;
import ai.djl.ndarray.NDList;
import ai.djl.ndarray.types.Shape;
import ai.djl.nn.Parameter;
import ai.djl.nn.SequentialBlock;
import ai.djl.nn.core.Linear;
import ai.djl.nn.norm.Dropout;
import ai.djl.training.DefaultTrainingConfig;
import ai.djl.training.GradientCollector;
import ai.djl.training.initializer.ConstantInitializer;
import ai.djl.training.loss.Loss;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import org.junit.jupiter.api.Test;

/** Dropout in a trainer that goes on for another. */
class ResumedRandomnessTest {

    private static List<float[]> masks(long from, int passes) {
        SequentialBlock block =
                new SequentialBlock()
                        .add(Linear.builder().setUnits(16).build())
                        .add(new Checkpointed(Dropout.builder().optRate(0.5f).build()));
        try (Model model = Model.newInstance("dropout", "PyTorch")) {
            model.setBlock(block);
            DefaultTrainingConfig config =
                    new DefaultTrainingConfig(Loss.l2Loss())
                            .optInitializer(new ConstantInitializer(1), Parameter.Type.WEIGHT)
                            .optDevices(new Device[] {Device.cpu()});
            try (BoundedTrainer trainer = new BoundedTrainer(model, config, 9)) {
                trainer.initialize(new Shape(1, 4));
                trainer.setCollectors(from);
                List<float[]> masks = new ArrayList<>();
                for (int i = 0; i < passes; i++) {
                    try (GradientCollector collector = trainer.newGradientCollector()) {
                        NDList x = new NDList(trainer.getManager().ones(new Shape(1, 4)));
                        NDList y = trainer.forward(x);
                        masks.add(y.singletonOrThrow().toFloatArray());
                        collector.backward(y.singletonOrThrow().sum());
                    }
                }
                assertEquals(from + passes, trainer.collectors());
                assertThrows(IllegalArgumentException.class, () -> trainer.setCollectors(-1));
                return masks;
            }
        }
    }

    @Test
    void setCollectors_anotherRunsNumber_dropoutGoesOnWhereItStopped() {
        List<float[]> whole = masks(0, 6);
        List<float[]> rest = masks(4, 2);
        assertArrayEquals(whole.get(4), rest.get(0));
        assertArrayEquals(whole.get(5), rest.get(1));
        assertFalse(Arrays.equals(whole.get(0), rest.get(0)));
    }
}
