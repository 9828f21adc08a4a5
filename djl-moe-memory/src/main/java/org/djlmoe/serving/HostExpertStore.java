package org.djlmoe.serving;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Path;
import org.djlmoe.io.HalfFloats;
import org.djlmoe.model.MoeConfig;

/**
 * Experts in host memory outside the Java heap, as when they do not fit a device but the machine. A
 * load is a copy. Holds all experts, so it saves no memory where slots are host memory too.
 */
public final class HostExpertStore implements ExpertStore {

    private final ExpertLayout layout;
    private final ByteBuffer[][] records;

    private HostExpertStore(ExpertLayout layout, ByteBuffer[][] records) {
        this.layout = layout;
        this.records = records;
    }

    /**
     * Reads the experts of a checkpoint.
     *
     * @param checkpoint its folder
     * @param config its model
     * @param packing element type and padding
     * @return the store
     * @throws IOException if the checkpoint cannot be read
     */
    public static HostExpertStore load(Path checkpoint, MoeConfig config, Packing packing)
            throws IOException {
        ExpertLayout layout = packing.layout(config);
        ByteBuffer[][] records = new ByteBuffer[layout.layers()][layout.experts()];
        try (ExpertRecords source = new ExpertRecords(checkpoint, config, layout)) {
            for (int l = 0; l < layout.layers(); l++) {
                for (int e = 0; e < layout.experts(); e++) {
                    ByteBuffer record =
                            ByteBuffer.allocateDirect(layout.bytes())
                                    .order(ByteOrder.LITTLE_ENDIAN);
                    source.read(
                            l,
                            e,
                            piece -> {
                                while (piece.hasRemaining()) {
                                    if (layout.half()) {
                                        record.putShort(HalfFloats.floatToBf16(piece.get()));
                                    } else {
                                        record.putFloat(piece.get());
                                    }
                                }
                            });
                    records[l][e] = record.flip();
                }
            }
        }
        return new HostExpertStore(layout, records);
    }

    @Override
    public ExpertLayout layout() {
        return layout;
    }

    @Override
    public void read(int layer, int expert, ByteBuffer target) {
        target.put(0, records[layer][expert], 0, layout.bytes());
    }

    @Override
    public String describe() {
        return "host memory";
    }

    @Override
    public void close() {
        // The buffers go with the garbage.
    }
}
