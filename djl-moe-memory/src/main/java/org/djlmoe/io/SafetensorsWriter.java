package org.djlmoe.io;

import com.google.gson.stream.JsonWriter;
import java.io.Closeable;
import java.io.IOException;
import java.io.StringWriter;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Collection;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;

/**
 * Writes one safetensors file piece by piece.
 *
 * <p>The format puts the header first, so the tensors are planned before the first value is
 * written; then the data of each is streamed in the planned order. Memory stays at one scratch
 * buffer of 256 KiB. The file grows under a temporary name and takes its own in {@link #commit()};
 * closing without a commit leaves nothing behind and an older file of that name untouched.
 *
 * <pre>{@code
 * try (SafetensorsWriter writer =
 *         SafetensorsWriter.builder().addTensor("w", DType.BF16, 4, 8).build(file)) {
 *     writer.writeF32("w", values);
 *     writer.commit();
 * }
 * }</pre>
 *
 * <p>A writer serves one thread at a time.
 */
public final class SafetensorsWriter implements Closeable {

    private static final int SCRATCH_BYTES = 1 << 18;

    private final Path file;
    private final Path temporary;
    private final FileChannel channel;
    private final List<TensorInfo> plan;
    private final ByteBuffer scratch =
            ByteBuffer.allocateDirect(SCRATCH_BYTES).order(ByteOrder.LITTLE_ENDIAN);
    private int current;
    private long written;
    private boolean committed;

    private SafetensorsWriter(Path file, Builder builder) throws IOException {
        this.file = file;
        plan = List.copyOf(builder.tensors.values());
        temporary = AtomicFiles.temporaryFor(file);
        FileChannel opened = null;
        try {
            opened = FileChannel.open(temporary, StandardOpenOption.WRITE);
            Channels.writeFully(file, opened, encodeHeader(plan, builder.metadata));
        } catch (IOException | RuntimeException e) {
            if (opened != null) {
                opened.close();
            }
            Files.deleteIfExists(temporary);
            throw e;
        }
        channel = opened;
        skipEmpty();
    }

    /**
     * Starts the plan of a file.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Appends values to a tensor, narrowed to its type with ties to even.
     *
     * @param name the tensor whose turn it is in the plan
     * @param piece the next values, consumed
     * @throws IllegalArgumentException if the tensor is neither F32, F16 nor BF16, or the piece is
     *     longer than what the tensor still lacks
     * @throws IllegalStateException if it is another tensor's turn
     * @throws IOException if writing fails, naming the file
     */
    public void writeF32(String name, FloatBuffer piece) throws IOException {
        if (!piece.hasRemaining()) {
            return;
        }
        TensorInfo info = expect(name);
        DType dtype = info.dtype();
        if (!dtype.isWritableFromF32()) {
            throw new IllegalArgumentException(
                    label(name) + " is " + dtype + ", which is not written from F32");
        }
        checkRoom(info, (long) piece.remaining() * dtype.bytes());
        while (piece.hasRemaining()) {
            int count = Math.min(piece.remaining(), SCRATCH_BYTES / dtype.bytes());
            scratch.clear().limit(count * dtype.bytes());
            if (dtype == DType.F32) {
                scratch.asFloatBuffer().put(piece.slice(piece.position(), count));
                piece.position(piece.position() + count);
            } else {
                HalfFloats.narrow(dtype, piece, scratch.asShortBuffer());
            }
            append(info, scratch);
        }
    }

    /**
     * Appends raw little-endian bytes to a tensor of any type.
     *
     * @param name the tensor whose turn it is in the plan
     * @param piece the next bytes, consumed
     * @throws IllegalArgumentException if the piece is longer than what the tensor still lacks
     * @throws IllegalStateException if it is another tensor's turn
     * @throws IOException if writing fails
     */
    public void writeBytes(String name, ByteBuffer piece) throws IOException {
        if (!piece.hasRemaining()) {
            return;
        }
        TensorInfo info = expect(name);
        checkRoom(info, piece.remaining());
        append(info, piece);
    }

    /**
     * Forces the finished file to the disk and gives it its name.
     *
     * @throws IllegalStateException if a tensor is incomplete
     * @throws IOException if that fails
     */
    public void commit() throws IOException {
        finish();
        publish();
    }

    /** Closes the complete file, still under its temporary name. */
    void finish() throws IOException {
        if (current < plan.size()) {
            TensorInfo info = plan.get(current);
            throw new IllegalStateException(
                    label(info.name())
                            + " is incomplete: "
                            + written
                            + " of "
                            + info.byteSize()
                            + " bytes written");
        }
        if (channel.isOpen()) {
            Channels.force(file, channel);
            channel.close();
        }
    }

    /** Gives the finished file its name. */
    void publish() throws IOException {
        if (!committed) {
            AtomicFiles.publish(temporary, file);
            committed = true;
        }
    }

    /** Closes the file; without a {@link #commit()} nothing of it is left. */
    @Override
    public void close() throws IOException {
        channel.close();
        if (!committed) {
            Files.deleteIfExists(temporary);
        }
    }

    private TensorInfo expect(String name) {
        if (!channel.isOpen()) {
            throw new IllegalStateException(file + ": the writer is closed");
        }
        if (current == plan.size()) {
            throw new IllegalStateException(
                    label(name) + " has no turn left: all planned tensors are complete");
        }
        TensorInfo info = plan.get(current);
        if (!info.name().equals(name)) {
            throw new IllegalStateException(
                    label(name) + " was given, but it is the turn of '" + info.name() + "'");
        }
        return info;
    }

    private void checkRoom(TensorInfo info, long bytes) {
        if (bytes > info.byteSize() - written) {
            throw new IllegalArgumentException(
                    label(info.name())
                            + " lacks "
                            + (info.byteSize() - written)
                            + " bytes, but the piece has "
                            + bytes);
        }
    }

    private void append(TensorInfo info, ByteBuffer bytes) throws IOException {
        written += bytes.remaining();
        Channels.writeFully(file, channel, bytes);
        if (written == info.byteSize()) {
            current++;
            written = 0;
            skipEmpty();
        }
    }

    private void skipEmpty() {
        while (current < plan.size() && plan.get(current).byteSize() == 0) {
            current++;
        }
    }

    private String label(String name) {
        return file + ": tensor '" + name + "'";
    }

    private static ByteBuffer encodeHeader(
            Collection<TensorInfo> plan, Map<String, String> metadata) throws IOException {
        StringWriter text = new StringWriter();
        try (JsonWriter json = new JsonWriter(text)) {
            json.beginObject();
            if (!metadata.isEmpty()) {
                json.name(SafetensorsHeader.METADATA).beginObject();
                for (Map.Entry<String, String> entry : metadata.entrySet()) {
                    json.name(entry.getKey()).value(entry.getValue());
                }
                json.endObject();
            }
            for (TensorInfo info : plan) {
                json.name(info.name()).beginObject();
                json.name("dtype").value(info.dtype().name());
                json.name("shape").beginArray();
                for (long axis : info.shape()) {
                    json.value(axis);
                }
                json.endArray();
                json.name("data_offsets").beginArray();
                json.value(info.begin()).value(info.end()).endArray().endObject();
            }
            json.endObject();
        }
        byte[] bytes = text.toString().getBytes(StandardCharsets.UTF_8);
        // Spaces after the JSON align the data to 8 bytes, as other writers do.
        int padded = (bytes.length + 7) / 8 * 8;
        if (padded > SafetensorsHeader.MAX_HEADER_BYTES) {
            throw new IllegalArgumentException(
                    "The header would have " + padded + " bytes, more than the format allows");
        }
        ByteBuffer header =
                ByteBuffer.allocate(SafetensorsHeader.PREFIX_BYTES + padded)
                        .order(ByteOrder.LITTLE_ENDIAN);
        header.putLong(padded).put(bytes);
        while (header.hasRemaining()) {
            header.put((byte) ' ');
        }
        return header.flip();
    }

    /** The plan of a file: what will be in it, in which order. */
    public static final class Builder {

        private final Map<String, TensorInfo> tensors = new LinkedHashMap<>();
        private Map<String, String> metadata = Map.of();
        private long end;

        private Builder() {}

        /**
         * Appends a tensor to the plan.
         *
         * @param name its name, not used before
         * @param dtype its element type
         * @param shape its axes, none for a scalar
         * @return this builder
         */
        public Builder addTensor(String name, DType dtype, long... shape) {
            if (SafetensorsHeader.METADATA.equals(name)) {
                throw new IllegalArgumentException("'" + name + "' is no name for a tensor");
            }
            for (long axis : shape) {
                if (axis < 0) {
                    throw new IllegalArgumentException(
                            "Tensor '" + name + "' has the negative axis " + axis);
                }
            }
            long next;
            try {
                long count = TensorInfo.elementCount(shape);
                next = Math.addExact(end, Math.multiplyExact(count, (long) dtype.bytes()));
            } catch (ArithmeticException e) {
                throw new IllegalArgumentException(
                        "Tensor '" + name + "' takes the file beyond 2^63 bytes", e);
            }
            TensorInfo info = new TensorInfo(name, dtype, shape, end, next);
            if (tensors.putIfAbsent(name, info) != null) {
                throw new IllegalArgumentException("Tensor '" + name + "' is planned twice");
            }
            end = next;
            return this;
        }

        /**
         * Sets the strings to store beside the tensors.
         *
         * @param strings the metadata; default none
         * @return this builder
         */
        public Builder optMetadata(Map<String, String> strings) {
            metadata = new TreeMap<>(strings);
            return this;
        }

        /**
         * Returns the planned tensors.
         *
         * @return name, type, shape and place of each
         */
        public List<TensorInfo> tensors() {
            return new ArrayList<>(tensors.values());
        }

        /**
         * Creates the temporary file and writes the header.
         *
         * @param file the final name; its folder must exist
         * @return the writer
         * @throws IOException if the file cannot be created
         */
        public SafetensorsWriter build(Path file) throws IOException {
            return new SafetensorsWriter(file, this);
        }
    }
}
