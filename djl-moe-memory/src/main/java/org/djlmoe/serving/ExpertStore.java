package org.djlmoe.serving;

import java.io.IOException;
import java.nio.ByteBuffer;

/**
 * The slower tier: all experts of a model, read one at a time.
 *
 * <p>Used by one thread at a time; {@link OffloadedExperts} reads from its loader thread.
 */
public interface ExpertStore extends AutoCloseable {

    /**
     * Returns what a record looks like.
     *
     * @return sizes and element type
     */
    ExpertLayout layout();

    /**
     * Reads one expert.
     *
     * @param layer the MoE layer
     * @param expert its id
     * @param target filled from position 0 with {@code layout().bytes()} bytes, little-endian
     * @throws IOException if the record cannot be read, naming why
     */
    void read(int layer, int expert, ByteBuffer target) throws IOException;

    /**
     * Says where the experts lie and how they are read.
     *
     * @return a phrase for a report
     */
    String describe();

    /**
     * Closes the store.
     *
     * @throws IOException if that fails
     */
    @Override
    void close() throws IOException;
}
