package org.djlmoe.io;

import com.google.gson.stream.JsonWriter;
import java.io.Closeable;
import java.io.IOException;
import java.io.StringWriter;
import java.nio.ByteBuffer;
import java.nio.FloatBuffer;
import java.nio.file.DirectoryStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.TreeMap;
import java.util.regex.Pattern;

/**
 * Writes the tensors of a checkpoint folder, cut into shards of a largest size.
 *
 * <p>What fits into one file becomes {@code model.safetensors}; more becomes {@code
 * model-00001-of-00003.safetensors} and so on with {@code model.safetensors.index.json}. A tensor
 * is never split: one that alone exceeds the largest size gets a shard of its own.
 *
 * <p>All shards are written and forced to the disk under temporary names first. {@link #commit()}
 * then removes the weights that lay in the folder before, renames the shards and writes the index
 * last; a crash on the way leaves a folder that is refused, never a mixture that loads. Closing
 * without a commit leaves the folder as it was.
 */
public final class ShardedSafetensorsWriter implements Closeable {

    private static final Pattern SHARD = Pattern.compile("model-\\d{5,}-of-\\d{5,}\\.safetensors");

    private final Path folder;
    private final List<SafetensorsWriter.Builder> plans;
    private final List<Path> files = new ArrayList<>();
    private final Map<String, Integer> shardOf = new HashMap<>();
    private final List<SafetensorsWriter> writers = new ArrayList<>();

    private ShardedSafetensorsWriter(Builder builder) {
        folder = builder.folder;
        plans = builder.cut();
        for (int i = 0; i < plans.size(); i++) {
            for (TensorInfo info : plans.get(i).tensors()) {
                shardOf.put(info.name(), i);
            }
            String name =
                    plans.size() == 1
                            ? SafetensorsFolder.SINGLE_FILE
                            : String.format("model-%05d-of-%05d.safetensors", i + 1, plans.size());
            files.add(folder.resolve(name));
        }
    }

    /**
     * Starts the plan of a folder.
     *
     * @return a builder
     */
    public static Builder builder() {
        return new Builder();
    }

    /**
     * Appends values to a tensor, see {@link SafetensorsWriter#writeF32}. Tensors come in the
     * planned order.
     *
     * @param name the tensor whose turn it is
     * @param piece the next values, consumed
     * @throws IOException if writing fails
     */
    public void writeF32(String name, FloatBuffer piece) throws IOException {
        writer(name).writeF32(name, piece);
    }

    /**
     * Appends raw bytes to a tensor, see {@link SafetensorsWriter#writeBytes}.
     *
     * @param name the tensor whose turn it is
     * @param piece the next bytes, consumed
     * @throws IOException if writing fails
     */
    public void writeBytes(String name, ByteBuffer piece) throws IOException {
        writer(name).writeBytes(name, piece);
    }

    private SafetensorsWriter writer(String name) throws IOException {
        Integer shard = shardOf.get(name);
        if (shard == null) {
            throw new IllegalStateException(
                    folder + ": tensor '" + name + "' was given, but it is not planned");
        }
        openUpTo(shard);
        return writers.get(shard);
    }

    /** Completes the shards before {@code shard}, so that one file at a time is open. */
    private void openUpTo(int shard) throws IOException {
        while (writers.size() <= shard) {
            if (!writers.isEmpty()) {
                writers.get(writers.size() - 1).finish();
            }
            int next = writers.size();
            writers.add(plans.get(next).build(files.get(next)));
        }
    }

    /**
     * Puts the finished files in place of whatever weights the folder held.
     *
     * @throws IllegalStateException if a tensor is incomplete
     * @throws IOException if that fails
     */
    public void commit() throws IOException {
        openUpTo(plans.size() - 1);
        writers.get(writers.size() - 1).finish();
        // The entry points go first: from here until the end the folder does not load at all. A
        // single file over a single file needs no such gap, the rename swaps them.
        Files.deleteIfExists(folder.resolve(SafetensorsFolder.INDEX_FILE));
        if (files.size() > 1) {
            Files.deleteIfExists(folder.resolve(SafetensorsFolder.SINGLE_FILE));
        }
        deleteOldShards();
        for (SafetensorsWriter writer : writers) {
            writer.publish();
        }
        if (files.size() > 1) {
            AtomicFiles.writeString(folder.resolve(SafetensorsFolder.INDEX_FILE), index());
        }
    }

    @Override
    public void close() throws IOException {
        IOException failure = null;
        for (SafetensorsWriter writer : writers) {
            try {
                writer.close();
            } catch (IOException e) {
                failure = e;
            }
        }
        if (failure != null) {
            throw failure;
        }
    }

    private void deleteOldShards() throws IOException {
        List<Path> old = new ArrayList<>();
        try (DirectoryStream<Path> entries = Files.newDirectoryStream(folder)) {
            for (Path entry : entries) {
                if (SHARD.matcher(entry.getFileName().toString()).matches()) {
                    old.add(entry);
                }
            }
        }
        for (Path entry : old) {
            Files.delete(entry);
        }
    }

    private String index() throws IOException {
        Map<String, String> weightMap = new TreeMap<>();
        long bytes = 0;
        long parameters = 0;
        for (int i = 0; i < plans.size(); i++) {
            for (TensorInfo info : plans.get(i).tensors()) {
                weightMap.put(info.name(), files.get(i).getFileName().toString());
                bytes += info.byteSize();
                parameters += info.elements();
            }
        }
        StringWriter text = new StringWriter();
        try (JsonWriter json = new JsonWriter(text)) {
            json.setIndent("  ");
            json.beginObject();
            json.name("metadata").beginObject();
            json.name("total_parameters").value(parameters);
            json.name("total_size").value(bytes).endObject();
            json.name("weight_map").beginObject();
            for (Map.Entry<String, String> entry : weightMap.entrySet()) {
                json.name(entry.getKey()).value(entry.getValue());
            }
            json.endObject().endObject();
        }
        return text + "\n";
    }

    /** The plan of a folder: which tensors, in which order, and how large a shard may be. */
    public static final class Builder {

        private record Planned(String name, DType dtype, long[] shape) {}

        private final Map<String, Planned> tensors = new LinkedHashMap<>();
        private Path folder;
        private long maxShardBytes = 5_000_000_000L;
        private Map<String, String> metadata = Map.of();

        private Builder() {}

        /**
         * Sets the folder.
         *
         * @param path an existing folder
         * @return this builder
         */
        public Builder setFolder(Path path) {
            folder = path;
            return this;
        }

        /**
         * Sets the largest size of a shard, counted over its tensors' data.
         *
         * @param bytes the limit; default 5 GB (10^9 bytes)
         * @return this builder
         */
        public Builder optMaxShardBytes(long bytes) {
            if (bytes <= 0) {
                throw new IllegalArgumentException(
                        "The largest shard must have more than 0 bytes, not " + bytes);
            }
            maxShardBytes = bytes;
            return this;
        }

        /**
         * Sets the strings to store in every shard.
         *
         * @param strings the metadata; default none
         * @return this builder
         */
        public Builder optMetadata(Map<String, String> strings) {
            metadata = Map.copyOf(strings);
            return this;
        }

        /**
         * Appends a tensor to the plan.
         *
         * @param name its name, not used before
         * @param dtype its element type
         * @param shape its axes, none for a scalar
         * @return this builder
         */
        public Builder addTensor(String name, DType dtype, long... shape) {
            if (tensors.putIfAbsent(name, new Planned(name, dtype, shape.clone())) != null) {
                throw new IllegalArgumentException("Tensor '" + name + "' is planned twice");
            }
            return this;
        }

        /**
         * Fixes the shards.
         *
         * @return the writer; no file is created before the first tensor arrives
         */
        public ShardedSafetensorsWriter build() {
            Objects.requireNonNull(folder, "setFolder is required");
            return new ShardedSafetensorsWriter(this);
        }

        private List<SafetensorsWriter.Builder> cut() {
            List<SafetensorsWriter.Builder> shards = new ArrayList<>();
            SafetensorsWriter.Builder shard = null;
            long room = 0;
            for (Planned tensor : tensors.values()) {
                long bytes =
                        Math.multiplyExact(
                                TensorInfo.elementCount(tensor.shape), (long) tensor.dtype.bytes());
                if (shard == null || bytes > room) {
                    shard = SafetensorsWriter.builder().optMetadata(metadata);
                    shards.add(shard);
                    room = maxShardBytes;
                }
                shard.addTensor(tensor.name, tensor.dtype, tensor.shape);
                room -= bytes;
            }
            if (shards.isEmpty()) {
                shards.add(SafetensorsWriter.builder().optMetadata(metadata));
            }
            return shards;
        }
    }
}
