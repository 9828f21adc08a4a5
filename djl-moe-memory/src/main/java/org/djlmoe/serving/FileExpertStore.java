package org.djlmoe.serving;

import com.sun.nio.file.ExtendedOpenOption;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.StringJoiner;
import java.util.stream.Stream;
import org.djlmoe.io.DType;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.io.SafetensorsReader;
import org.djlmoe.io.SafetensorsWriter;
import org.djlmoe.io.TensorInfo;
import org.djlmoe.model.MoeConfig;

/**
 * Experts in a packed file, read at positions, one read a load.
 *
 * <p>The file is safetensors: a tensor {@code layers.L.experts.E} an expert and layer, its record
 * flat, F32 or BF16, layer after layer; the metadata hold {@code hidden} and {@code inner}. A read
 * goes straight into the slot's memory.
 *
 * <p>The operating system keeps what it has read as long as memory is free, so that a repeated load
 * is a copy out of its page cache. {@link Reads#COLD} makes every load come from the disk, as when
 * the experts do not fit the machine's memory.
 */
public final class FileExpertStore implements ExpertStore {

    /** How the operating system's page cache takes part. */
    public enum Reads {
        /** As it comes: loads may be served from the page cache. */
        CACHED,
        /**
         * From the disk: the file's pages are dropped after every load (Linux), else reads bypass
         * the page cache, which takes one copy more.
         */
        COLD
    }

    private static final String SOURCE = "source";

    private final Path file;
    private final ExpertLayout layout;
    private final SafetensorsReader reader;
    private final PageCache pages;
    private final DirectReads direct;

    private FileExpertStore(
            Path file,
            ExpertLayout layout,
            SafetensorsReader reader,
            PageCache pages,
            DirectReads direct) {
        this.file = file;
        this.layout = layout;
        this.reader = reader;
        this.pages = pages;
        this.direct = direct;
    }

    /**
     * Packs the experts of a checkpoint into a file.
     *
     * @param checkpoint its folder
     * @param config its model
     * @param packing element type and padding
     * @param file the packed file, replaced if it exists
     * @throws IOException if reading or writing fails; then nothing of the new file is left
     */
    public static void pack(Path checkpoint, MoeConfig config, Packing packing, Path file)
            throws IOException {
        ExpertLayout layout = packing.layout(config);
        SafetensorsWriter.Builder builder =
                SafetensorsWriter.builder()
                        .optMetadata(
                                Map.of(
                                        "hidden",
                                        Integer.toString(layout.hidden()),
                                        "inner",
                                        Integer.toString(layout.inner()),
                                        SOURCE,
                                        sourceOf(checkpoint)));
        DType dtype = layout.half() ? DType.BF16 : DType.F32;
        for (int l = 0; l < layout.layers(); l++) {
            for (int e = 0; e < layout.experts(); e++) {
                builder.addTensor(name(l, e), dtype, layout.elements());
            }
        }
        try (ExpertRecords source = new ExpertRecords(checkpoint, config, layout);
                SafetensorsWriter writer = builder.build(file)) {
            for (int l = 0; l < layout.layers(); l++) {
                for (int e = 0; e < layout.experts(); e++) {
                    String name = name(l, e);
                    source.read(l, e, piece -> writer.writeF32(name, piece));
                }
            }
            writer.commit();
        }
    }

    /**
     * Opens a packed file.
     *
     * @param file the file
     * @param reads how the page cache takes part
     * @return the store
     * @throws SafetensorsException if it is no packed file, is truncated or incomplete
     * @throws IOException if it is missing or cannot be read, or if cold reads are wanted and this
     *     system offers no way
     */
    public static FileExpertStore open(Path file, Reads reads) throws IOException {
        SafetensorsReader reader;
        try {
            reader = SafetensorsReader.open(file);
        } catch (NoSuchFileException e) {
            throw new IOException(
                    "There is no expert store " + file + ": pack it from a checkpoint first", e);
        }
        try {
            ExpertLayout layout = layout(file, reader);
            if (reads == Reads.CACHED) {
                return new FileExpertStore(file, layout, reader, null, null);
            }
            PageCache pages = PageCache.open(file);
            DirectReads direct = pages == null ? DirectReads.open(file, layout.bytes()) : null;
            return new FileExpertStore(file, layout, reader, pages, direct);
        } catch (IOException | RuntimeException e) {
            reader.close();
            throw e;
        }
    }

    /**
     * Opens a packed file if it was made of these very checkpoint files, as they are now, with this
     * packing; packs it otherwise.
     *
     * @param checkpoint the checkpoint's folder
     * @param config its model
     * @param packing element type and padding
     * @param file the packed file
     * @param reads how the page cache takes part
     * @return the store
     * @throws IOException if reading or writing fails, or the file is there but no expert store
     */
    public static FileExpertStore openOrPack(
            Path checkpoint, MoeConfig config, Packing packing, Path file, Reads reads)
            throws IOException {
        if (Files.exists(file)) {
            ExpertLayout layout = packing.layout(config);
            String source = sourceOf(checkpoint);
            FileExpertStore store = open(file, reads);
            if (store.layout.equals(layout) && source.equals(store.reader.metadata().get(SOURCE))) {
                return store;
            }
            store.close();
        }
        pack(checkpoint, config, packing, file);
        return open(file, reads);
    }

    /** Names, sizes and ages of the checkpoint's files. */
    private static String sourceOf(Path checkpoint) throws IOException {
        List<Path> files;
        try (Stream<Path> all = Files.list(checkpoint)) {
            files = all.filter(f -> f.toString().endsWith(".safetensors")).sorted().toList();
        }
        StringJoiner source = new StringJoiner(";");
        for (Path f : files) {
            source.add(
                    f.getFileName()
                            + ":"
                            + Files.size(f)
                            + ":"
                            + Files.getLastModifiedTime(f).toMillis());
        }
        return source.toString();
    }

    private static ExpertLayout layout(Path file, SafetensorsReader reader)
            throws SafetensorsException {
        int experts = 0;
        while (reader.names().contains(name(0, experts))) {
            experts++;
        }
        if (experts == 0 || reader.names().size() % experts != 0) {
            throw new SafetensorsException(
                    file, "is no expert store: it lacks 'layers.L.experts.E' of every expert");
        }
        int layers = reader.names().size() / experts;
        TensorInfo first = reader.info(name(0, 0));
        ExpertLayout layout;
        try {
            layout =
                    new ExpertLayout(
                            layers,
                            experts,
                            Integer.parseInt(reader.metadata().getOrDefault("hidden", "")),
                            Integer.parseInt(reader.metadata().getOrDefault("inner", "")),
                            first.dtype() == DType.BF16);
        } catch (NumberFormatException e) {
            throw new SafetensorsException(
                    file, "is no expert store: its metadata lack hidden and inner", e);
        }
        DType dtype = layout.half() ? DType.BF16 : DType.F32;
        long[] shape = {layout.elements()};
        for (int l = 0; l < layers; l++) {
            for (int e = 0; e < experts; e++) {
                String name = name(l, e);
                if (!reader.names().contains(name)
                        || reader.info(name).dtype() != dtype
                        || !Arrays.equals(reader.info(name).shape(), shape)) {
                    throw new SafetensorsException(
                            file,
                            "tensor '%s' must be %s[%d], as hidden %d and inner %d say"
                                    .formatted(
                                            name,
                                            dtype,
                                            shape[0],
                                            layout.hidden(),
                                            layout.inner()));
                }
            }
        }
        return layout;
    }

    private static String name(int layer, int expert) {
        return "layers." + layer + ".experts." + expert;
    }

    @Override
    public ExpertLayout layout() {
        return layout;
    }

    @Override
    public void read(int layer, int expert, ByteBuffer target) throws IOException {
        String name = name(layer, expert);
        ByteBuffer record = target.duplicate().position(0).limit(layout.bytes());
        if (direct != null) {
            direct.read(reader.info(name).begin(), record);
            return;
        }
        reader.readBytes(name, 0, record);
        if (pages != null) {
            pages.drop();
        }
    }

    @Override
    public String describe() {
        String how = "read through the page cache";
        if (pages != null) {
            how = "page cache dropped after every load (posix_fadvise)";
        } else if (direct != null) {
            how = "page cache bypassed (O_DIRECT)";
        }
        return "file " + file + ", " + how;
    }

    @Override
    public void close() throws IOException {
        try {
            reader.close();
        } finally {
            if (pages != null) {
                pages.close();
            }
            if (direct != null) {
                direct.close();
            }
        }
    }

    /** Reads past the page cache: whole blocks into an aligned buffer, then a copy. */
    static final class DirectReads implements AutoCloseable {

        private final Path file;
        private final FileChannel channel;
        private final int block;
        private final long dataStart;
        private final ByteBuffer blocks;

        private DirectReads(
                Path file, FileChannel channel, int block, long dataStart, ByteBuffer blocks) {
            this.file = file;
            this.channel = channel;
            this.block = block;
            this.dataStart = dataStart;
            this.blocks = blocks;
        }

        static DirectReads open(Path file, int recordBytes) throws IOException {
            long dataStart;
            try (FileChannel plain = FileChannel.open(file, StandardOpenOption.READ)) {
                ByteBuffer length = ByteBuffer.allocate(8).order(ByteOrder.LITTLE_ENDIAN);
                while (length.hasRemaining() && plain.read(length, length.position()) >= 0) {
                    continue;
                }
                dataStart = 8 + length.getLong(0);
            }
            try {
                int block = (int) Files.getFileStore(file).getBlockSize();
                ByteBuffer blocks =
                        ByteBuffer.allocateDirect(Math.addExact(recordBytes, 4 * block))
                                .alignedSlice(block);
                FileChannel channel =
                        FileChannel.open(file, StandardOpenOption.READ, ExtendedOpenOption.DIRECT);
                return new DirectReads(file, channel, block, dataStart, blocks);
            } catch (UnsupportedOperationException | IOException e) {
                throw new IOException(
                        "Neither dropping the page cache nor reading past it works for "
                                + file
                                + ": do without cold reads, or move the store to another disk",
                        e);
            }
        }

        /** Fills a record from its place in the data section. */
        void read(long begin, ByteBuffer record) throws IOException {
            long from = dataStart + begin;
            long aligned = from / block * block;
            int needed = (int) (from - aligned) + record.remaining();
            blocks.clear().limit((needed + block - 1) / block * block);
            while (blocks.position() < needed) {
                int count = channel.read(blocks, aligned + blocks.position());
                if (count <= 0 || blocks.position() < needed && blocks.position() % block != 0) {
                    throw new SafetensorsException(file, "ends early (truncated?)");
                }
            }
            record.put(record.position(), blocks, (int) (from - aligned), record.remaining());
        }

        @Override
        public void close() throws IOException {
            channel.close();
        }
    }
}
