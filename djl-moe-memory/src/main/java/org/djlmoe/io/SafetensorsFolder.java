package org.djlmoe.io;

import com.google.gson.Strictness;
import com.google.gson.stream.JsonReader;
import com.google.gson.stream.JsonToken;
import com.google.gson.stream.MalformedJsonException;
import java.io.Closeable;
import java.io.EOFException;
import java.io.IOException;
import java.io.Reader;
import java.nio.FloatBuffer;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.NoSuchElementException;
import java.util.Set;
import java.util.regex.Pattern;

/**
 * The tensors of a checkpoint folder, whether they lie in one {@code model.safetensors} or in
 * shards listed by {@code model.safetensors.index.json}.
 *
 * <p>Opening checks every header and that the index and the shards agree tensor by tensor. A folder
 * with both forms is refused, since one of them is a leftover and nobody can tell which. One file
 * handle per shard stays open until {@link #close()}.
 */
public final class SafetensorsFolder implements Closeable {

    /** The name of an unsharded checkpoint. */
    public static final String SINGLE_FILE = "model.safetensors";

    /** The name of the list of shards. */
    public static final String INDEX_FILE = "model.safetensors.index.json";

    /** Keeps an index from reaching outside its folder. */
    private static final Pattern PLAIN_NAME = Pattern.compile("[^./\\\\\\x00][^/\\\\\\x00]*");

    private final Path folder;
    private final Map<String, SafetensorsReader> readers;
    private final Map<String, SafetensorsReader> files;

    private SafetensorsFolder(
            Path folder,
            Map<String, SafetensorsReader> readers,
            Map<String, SafetensorsReader> files) {
        this.folder = folder;
        this.readers = Collections.unmodifiableMap(readers);
        this.files = files;
    }

    /**
     * Opens a checkpoint folder.
     *
     * @param folder the folder
     * @return its tensors
     * @throws SafetensorsException if a file breaks the format, a shard is missing, or index and
     *     shards disagree; the message names file and tensor
     * @throws IOException if it cannot be read
     */
    public static SafetensorsFolder open(Path folder) throws IOException {
        Path single = folder.resolve(SINGLE_FILE);
        Path index = folder.resolve(INDEX_FILE);
        boolean hasSingle = Files.exists(single);
        boolean hasIndex = Files.exists(index);
        if (hasSingle && hasIndex) {
            throw new SafetensorsException(
                    folder,
                    "holds both "
                            + SINGLE_FILE
                            + " and "
                            + INDEX_FILE
                            + "; one is a leftover: remove the one that does not belong");
        }
        if (!hasSingle && !hasIndex) {
            throw new SafetensorsException(
                    folder, "holds neither " + SINGLE_FILE + " nor " + INDEX_FILE);
        }
        Map<String, SafetensorsReader> readers = new LinkedHashMap<>();
        Map<String, SafetensorsReader> files = new LinkedHashMap<>();
        try {
            if (hasSingle) {
                SafetensorsReader reader = SafetensorsReader.open(single);
                files.put(SINGLE_FILE, reader);
                reader.names().forEach(name -> readers.put(name, reader));
            } else {
                openShards(folder, index, readers, files);
            }
            return new SafetensorsFolder(folder, readers, files);
        } catch (IOException | RuntimeException e) {
            closeAll(files, e);
            throw e;
        }
    }

    private static void openShards(
            Path folder,
            Path index,
            Map<String, SafetensorsReader> readers,
            Map<String, SafetensorsReader> files)
            throws IOException {
        Map<String, String> weightMap = readIndex(index);
        for (Map.Entry<String, String> entry : weightMap.entrySet()) {
            String tensor = entry.getKey();
            String shard = entry.getValue();
            SafetensorsReader reader = files.get(shard);
            if (reader == null) {
                if (!PLAIN_NAME.matcher(shard).matches()) {
                    throw new SafetensorsException(
                            index, "shard '" + shard + "' is not a plain file name");
                }
                Path path = folder.resolve(shard);
                try {
                    reader = SafetensorsReader.open(path);
                } catch (NoSuchFileException e) {
                    throw new SafetensorsException(
                            path,
                            "shard is missing; " + index + " lists it for '" + tensor + "'",
                            e);
                }
                files.put(shard, reader);
            }
            if (!reader.names().contains(tensor)) {
                throw new SafetensorsException(
                        reader.file(), "lacks tensor '" + tensor + "' that " + index + " promises");
            }
            readers.put(tensor, reader);
        }
        for (SafetensorsReader reader : files.values()) {
            for (String tensor : reader.names()) {
                if (readers.get(tensor) != reader) {
                    throw new SafetensorsException(
                            reader.file(),
                            "holds tensor '" + tensor + "' that " + index + " does not place here");
                }
            }
        }
    }

    private static Map<String, String> readIndex(Path index) throws IOException {
        Map<String, String> weightMap = null;
        try (Reader text = Files.newBufferedReader(index, StandardCharsets.UTF_8);
                JsonReader json = new JsonReader(text)) {
            json.setStrictness(Strictness.STRICT);
            json.beginObject();
            while (json.hasNext()) {
                if (!"weight_map".equals(json.nextName())) {
                    json.skipValue();
                    continue;
                }
                if (weightMap != null) {
                    throw new SafetensorsException(index, "has weight_map twice");
                }
                weightMap = new LinkedHashMap<>();
                json.beginObject();
                while (json.hasNext()) {
                    String tensor = json.nextName();
                    if (json.peek() != JsonToken.STRING) {
                        throw new SafetensorsException(
                                index, "tensor '" + tensor + "' is not mapped to a file name");
                    }
                    if (weightMap.put(tensor, json.nextString()) != null) {
                        throw new SafetensorsException(
                                index, "tensor '" + tensor + "' appears twice");
                    }
                }
                json.endObject();
            }
            json.endObject();
        } catch (MalformedJsonException
                | EOFException
                | CharacterCodingException
                | IllegalStateException e) {
            throw new SafetensorsException(index, "is not a valid index: " + e.getMessage(), e);
        }
        if (weightMap == null) {
            throw new SafetensorsException(index, "has no weight_map");
        }
        return weightMap;
    }

    /**
     * Returns the folder.
     *
     * @return the path that was opened
     */
    public Path folder() {
        return folder;
    }

    /**
     * Returns the names of all tensors.
     *
     * @return the names, shard by shard
     */
    public Set<String> names() {
        return readers.keySet();
    }

    /**
     * Returns the reader of the file that holds a tensor.
     *
     * @param name the tensor
     * @return its reader, owned by this folder
     * @throws NoSuchElementException if no file holds it
     */
    public SafetensorsReader reader(String name) {
        SafetensorsReader reader = readers.get(name);
        if (reader == null) {
            throw new NoSuchElementException(folder + ": no tensor '" + name + "'");
        }
        return reader;
    }

    /**
     * Describes a tensor.
     *
     * @param name its name
     * @return type, shape and place within its file
     * @throws NoSuchElementException if no file holds it
     */
    public TensorInfo info(String name) {
        return reader(name).info(name);
    }

    /**
     * Reads elements as F32, see {@link SafetensorsReader#readF32}.
     *
     * @param name the tensor
     * @param elementOffset index of the first element
     * @param target filled to its limit
     * @throws IOException if reading fails
     */
    public void readF32(String name, long elementOffset, FloatBuffer target) throws IOException {
        reader(name).readF32(name, elementOffset, target);
    }

    @Override
    public void close() throws IOException {
        IOException failure = null;
        for (SafetensorsReader reader : files.values()) {
            try {
                reader.close();
            } catch (IOException e) {
                failure = e;
            }
        }
        if (failure != null) {
            throw failure;
        }
    }

    private static void closeAll(Map<String, SafetensorsReader> files, Exception reason) {
        for (SafetensorsReader reader : files.values()) {
            try {
                reader.close();
            } catch (IOException e) {
                reason.addSuppressed(e);
            }
        }
    }
}
