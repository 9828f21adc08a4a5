package org.djlmoe.maskcoft;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;
import org.djlmoe.io.TensorInfo;
import org.djlmoe.routing.ExpertMask;

/**
 * The arrays of a MaskCoFT run, {@code maskcoft.safetensors} in a checkpoint folder. Per MoE layer
 * l, with the prefix {@code model.layers.l.mlp.gate.}:
 *
 * <ul>
 *   <li>{@code mask}: BOOL [E], whether an expert is preferred
 *   <li>{@code mask_logits}: F64 [E], theta; only where it is known
 *   <li>{@code e_score_correction_bias}: F32 [E], what a loader adds to the router's softmax to
 *       rank experts; only where the prior is such a bias, see {@link ExpertPrior#selectionBias}
 * </ul>
 */
final class MaskFile {

    static final String NAME = "maskcoft.safetensors";

    private MaskFile() {}

    private static String name(int layer, String tensor) {
        return "model.layers." + layer + ".mlp.gate." + tensor;
    }

    /** Writes the arrays; theta may be null. */
    static void write(Path folder, ExpertPrior prior, double[][] theta) throws IOException {
        ExpertMask mask = prior.mask();
        int experts = mask.numExperts();
        SafetensorsWriter.Builder plan = SafetensorsWriter.builder();
        for (int l = 0; l < mask.numLayers(); l++) {
            plan.addTensor(name(l, "mask"), DType.BOOL, experts);
            if (theta != null) {
                plan.addTensor(name(l, "mask_logits"), DType.F64, experts);
            }
            if (prior.hasSelectionBias()) {
                plan.addTensor(name(l, "e_score_correction_bias"), DType.F32, experts);
            }
        }
        try (SafetensorsWriter writer = plan.build(folder.resolve(NAME))) {
            for (int l = 0; l < mask.numLayers(); l++) {
                ByteBuffer kept = ByteBuffer.allocate(experts);
                for (int e = 0; e < experts; e++) {
                    kept.put((byte) (mask.isKept(l, e) ? 1 : 0));
                }
                writer.writeBytes(name(l, "mask"), kept.flip());
                if (theta != null) {
                    ByteBuffer logits =
                            ByteBuffer.allocate(8 * experts).order(ByteOrder.LITTLE_ENDIAN);
                    logits.asDoubleBuffer().put(theta[l]);
                    writer.writeBytes(name(l, "mask_logits"), logits);
                }
                if (prior.hasSelectionBias()) {
                    writer.writeF32(
                            name(l, "e_score_correction_bias"),
                            FloatBuffer.wrap(prior.selectionBias(l)));
                }
            }
            writer.commit();
        }
    }

    /** Reads theta, [layers, experts]; null where the folder has none. */
    static double[][] readTheta(Path folder, ExpertMask mask) throws IOException {
        Path file = folder.resolve(NAME);
        if (!Files.exists(file)) {
            return null;
        }
        try (SafetensorsReader reader = SafetensorsReader.open(file)) {
            if (!reader.names().contains(name(0, "mask_logits"))) {
                return null;
            }
            double[][] theta = new double[mask.numLayers()][mask.numExperts()];
            for (int l = 0; l < theta.length; l++) {
                String name = name(l, "mask_logits");
                if (!reader.names().contains(name)) {
                    throw new IOException(file + " has no tensor " + name);
                }
                TensorInfo info = reader.info(name);
                if (info.dtype() != DType.F64 || info.elements() != theta[l].length) {
                    throw new IOException(
                            file
                                    + ": "
                                    + name
                                    + " is "
                                    + info
                                    + ", not F64 of "
                                    + theta[l].length
                                    + " experts");
                }
                ByteBuffer bytes =
                        ByteBuffer.allocate(8 * theta[l].length).order(ByteOrder.LITTLE_ENDIAN);
                reader.readBytes(name, 0, bytes);
                bytes.flip().asDoubleBuffer().get(theta[l]);
            }
            return theta;
        }
    }
}
