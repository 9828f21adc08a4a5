package org.djlmoe.serving;

import ai.djl.ndarray.types.Shape;
import java.io.IOException;
import java.nio.FloatBuffer;
import java.nio.file.Path;
import java.util.Map;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.checkpoint.StackedTensors;
import org.djlmoe.model.MoeConfig;

/** Reads a checkpoint's experts as records, zero padding included, in pieces of at most 1 MiB. */
final class ExpertRecords implements AutoCloseable {

    private static final int PIECE = 1 << 18;

    private final StackedTensors tensors;
    private final Map<String, Shape> shapes;
    private final MoeConfig config;
    private final ExpertLayout layout;
    private final FloatBuffer piece = FloatBuffer.allocate(PIECE);

    ExpertRecords(Path checkpoint, MoeConfig config, ExpertLayout layout) throws IOException {
        this.config = config;
        this.layout = layout;
        shapes = HfCheckpoint.parameterShapes(config);
        tensors = StackedTensors.open(checkpoint);
    }

    /** Takes the pieces of a record in order. */
    interface Sink {
        void accept(FloatBuffer piece) throws IOException;
    }

    void read(int layer, int expert, Sink sink) throws IOException {
        int hidden = config.hiddenSize();
        int inner = config.intermediateSize();
        int padding = layout.inner() - inner;
        String prefix = "model.layers." + layer + ".mlp.experts.";
        String gateUp = prefix + "gate_up_proj";
        long half = (long) inner * hidden;
        for (int part = 0; part < 2; part++) {
            copy(gateUp, (2L * expert + part) * half, half, sink);
            zeros((long) padding * hidden, sink);
        }
        String down = prefix + "down_proj";
        if (padding == 0) {
            copy(down, expert * half, half, sink);
            return;
        }
        for (int row = 0; row < hidden; row++) {
            copy(down, expert * half + (long) row * inner, inner, sink);
            zeros(padding, sink);
        }
    }

    private void copy(String parameter, long offset, long count, Sink sink) throws IOException {
        long[] shape = shapes.get(parameter).getShape();
        for (long done = 0; done < count; done += PIECE) {
            piece.clear().limit((int) Math.min(PIECE, count - done));
            tensors.read(parameter, shape, offset + done, piece);
            sink.accept(piece.flip());
        }
    }

    private void zeros(long count, Sink sink) throws IOException {
        for (long done = 0; done < count; done += PIECE) {
            piece.clear().limit((int) Math.min(PIECE, count - done));
            while (piece.hasRemaining()) {
                piece.put(0);
            }
            sink.accept(piece.flip());
        }
    }

    @Override
    public void close() throws IOException {
        tensors.close();
    }
}
