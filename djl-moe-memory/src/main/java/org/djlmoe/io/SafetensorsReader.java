package org.djlmoe.io;

import java.io.Closeable;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Set;

/**
 * Reads one safetensors file piece by piece.
 *
 * <p>Opening reads and checks the header alone. Every read is a positional read of the piece asked
 * for, through a scratch buffer of 256 KiB: memory stays constant however large the file is, and
 * nothing is mapped (mapped pages would count as memory of the process). Tensors beyond 2 GB are
 * read like any other, in pieces.
 *
 * <p>A reader serves one thread at a time. For random access to single elements map the file
 * instead; here each read is a system call.
 */
public final class SafetensorsReader implements Closeable {

    private static final int SCRATCH_BYTES = 1 << 18;

    private final Path file;
    private final FileChannel channel;
    private final SafetensorsHeader header;
    private ByteBuffer scratch;

    private SafetensorsReader(Path file, FileChannel channel, SafetensorsHeader header) {
        this.file = file;
        this.channel = channel;
        this.header = header;
    }

    /**
     * Opens a file and checks its header.
     *
     * @param file a safetensors file
     * @return the reader
     * @throws SafetensorsException if the file breaks the format; the message names file and tensor
     * @throws IOException if it cannot be read
     */
    public static SafetensorsReader open(Path file) throws IOException {
        FileChannel channel = FileChannel.open(file, StandardOpenOption.READ);
        try {
            return new SafetensorsReader(file, channel, SafetensorsHeader.read(file, channel));
        } catch (IOException | RuntimeException e) {
            channel.close();
            throw e;
        }
    }

    /**
     * Returns the file.
     *
     * @return the path that was opened
     */
    public Path file() {
        return file;
    }

    /**
     * Returns the tensors' names.
     *
     * @return the names in header order
     */
    public Set<String> names() {
        return header.tensors.keySet();
    }

    /**
     * Returns the strings stored beside the tensors.
     *
     * @return the metadata, empty if there is none
     */
    public Map<String, String> metadata() {
        return header.metadata;
    }

    /**
     * Describes a tensor.
     *
     * @param name its name
     * @return type, shape and place
     * @throws NoSuchElementException if the file has no such tensor
     */
    public TensorInfo info(String name) {
        TensorInfo info = header.tensors.get(name);
        if (info == null) {
            throw new NoSuchElementException(file + ": no tensor '" + name + "'");
        }
        return info;
    }

    /**
     * Reads elements as F32 until {@code target} is full. F16 and BF16 are widened exactly, F64 is
     * rounded to the nearest F32.
     *
     * @param name the tensor
     * @param elementOffset index of the first element, counted through the flattened tensor
     * @param target receives {@code target.remaining()} values; its position advances
     * @throws IllegalArgumentException if the tensor is not floating point or the range leaves it
     * @throws IOException if reading fails
     */
    public void readF32(String name, long elementOffset, FloatBuffer target) throws IOException {
        TensorInfo info = info(name);
        DType dtype = info.dtype();
        if (!dtype.isReadableAsF32()) {
            throw new IllegalArgumentException(
                    label(name) + " holds " + dtype + ", which is not read as F32; use readBytes");
        }
        checkRange(name, elementOffset, target.remaining(), info.elements(), "elements");
        if (scratch == null) {
            scratch = ByteBuffer.allocateDirect(SCRATCH_BYTES).order(ByteOrder.LITTLE_ENDIAN);
        }
        long position = header.dataStart + info.begin() + elementOffset * dtype.bytes();
        while (target.hasRemaining()) {
            int count = Math.min(target.remaining(), SCRATCH_BYTES / dtype.bytes());
            scratch.clear().limit(count * dtype.bytes());
            Channels.readFully(file, channel, position, scratch);
            scratch.flip();
            switch (dtype) {
                case F32 -> target.put(scratch.asFloatBuffer());
                case F64 -> {
                    while (scratch.hasRemaining()) {
                        target.put((float) scratch.getDouble());
                    }
                }
                default -> HalfFloats.widen(dtype, scratch.asShortBuffer(), target);
            }
            position += (long) count * dtype.bytes();
        }
    }

    /**
     * Reads raw little-endian bytes of a tensor of any type until {@code target} is full.
     *
     * @param name the tensor
     * @param byteOffset first byte within the tensor
     * @param target receives {@code target.remaining()} bytes; its position advances
     * @throws IllegalArgumentException if the range leaves the tensor
     * @throws IOException if reading fails
     */
    public void readBytes(String name, long byteOffset, ByteBuffer target) throws IOException {
        TensorInfo info = info(name);
        checkRange(name, byteOffset, target.remaining(), info.byteSize(), "bytes");
        Channels.readFully(file, channel, header.dataStart + info.begin() + byteOffset, target);
    }

    @Override
    public void close() throws IOException {
        scratch = null;
        channel.close();
    }

    private void checkRange(String name, long offset, int count, long size, String unit) {
        if (offset < 0 || offset > size - count) {
            throw new IllegalArgumentException(
                    label(name)
                            + " has "
                            + size
                            + " "
                            + unit
                            + ": "
                            + count
                            + " from "
                            + offset
                            + " on leave it");
        }
    }

    private String label(String name) {
        return file + ": tensor '" + name + "'";
    }
}
