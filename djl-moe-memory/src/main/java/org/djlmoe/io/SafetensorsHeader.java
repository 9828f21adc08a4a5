package org.djlmoe.io;

import com.google.gson.Strictness;
import com.google.gson.stream.JsonReader;
import com.google.gson.stream.JsonToken;
import com.google.gson.stream.MalformedJsonException;
import java.io.EOFException;
import java.io.IOException;
import java.io.StringReader;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.channels.FileChannel;
import java.nio.charset.CharacterCodingException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;

/**
 * The parsed and checked head of a safetensors file.
 *
 * <p>The file is: the length of the header (8 bytes, little-endian), the header (JSON: name to
 * {@code {"dtype", "shape", "data_offsets": [begin, end]}}, plus strings under {@code
 * "__metadata__"}), and the data, which the tensors cover without gap or overlap.
 */
final class SafetensorsHeader {

    /** The format's own limit; also keeps a damaged length from asking for gigabytes. */
    static final long MAX_HEADER_BYTES = 100_000_000;

    static final int PREFIX_BYTES = 8;
    static final String METADATA = "__metadata__";

    final Map<String, TensorInfo> tensors;
    final Map<String, String> metadata;
    final long dataStart;

    private SafetensorsHeader(
            Map<String, TensorInfo> tensors, Map<String, String> metadata, long dataStart) {
        this.tensors = Collections.unmodifiableMap(tensors);
        this.metadata = Collections.unmodifiableMap(metadata);
        this.dataStart = dataStart;
    }

    static SafetensorsHeader read(Path file, FileChannel channel) throws IOException {
        long fileBytes = channel.size();
        if (fileBytes < PREFIX_BYTES) {
            throw new SafetensorsException(
                    file, "truncated: " + fileBytes + " bytes, not even a header length");
        }
        ByteBuffer prefix = ByteBuffer.allocate(PREFIX_BYTES).order(ByteOrder.LITTLE_ENDIAN);
        Channels.readFully(file, channel, 0, prefix);
        long headerBytes = prefix.flip().getLong();
        if (headerBytes < 0 || headerBytes > MAX_HEADER_BYTES) {
            throw new SafetensorsException(
                    file,
                    "header length "
                            + Long.toUnsignedString(headerBytes)
                            + " exceeds the format's limit of "
                            + MAX_HEADER_BYTES
                            + " bytes; this is not a safetensors file or it is damaged");
        }
        if (headerBytes > fileBytes - PREFIX_BYTES) {
            throw new SafetensorsException(
                    file,
                    "header of "
                            + headerBytes
                            + " bytes is longer than the file ("
                            + fileBytes
                            + " bytes); the file is truncated or damaged");
        }
        ByteBuffer json = ByteBuffer.allocate((int) headerBytes);
        Channels.readFully(file, channel, PREFIX_BYTES, json);
        String text;
        try {
            text = StandardCharsets.UTF_8.newDecoder().decode(json.flip()).toString();
        } catch (CharacterCodingException e) {
            throw new SafetensorsException(file, "header is not UTF-8", e);
        }
        long dataStart = PREFIX_BYTES + headerBytes;
        return new Parser(file, text).parse(dataStart, fileBytes - dataStart);
    }

    /** One pass over the JSON; refuses everything that the format does not name. */
    private static final class Parser {

        private final Path file;
        private final JsonReader json;
        private final Map<String, TensorInfo> tensors = new LinkedHashMap<>();
        private final Map<String, String> metadata = new LinkedHashMap<>();
        private boolean metadataSeen;

        Parser(Path file, String text) {
            this.file = file;
            json = new JsonReader(new StringReader(text));
            json.setStrictness(Strictness.STRICT);
        }

        SafetensorsHeader parse(long dataStart, long dataBytes) throws SafetensorsException {
            try {
                json.beginObject();
                while (json.hasNext()) {
                    String name = json.nextName();
                    if (METADATA.equals(name)) {
                        parseMetadata();
                    } else {
                        TensorInfo info = parseTensor(name);
                        if (tensors.put(name, info) != null) {
                            throw fail(name, "appears twice in the header");
                        }
                    }
                }
                json.endObject();
                if (json.peek() != JsonToken.END_DOCUMENT) {
                    throw new SafetensorsException(file, "text after the header's last brace");
                }
            } catch (SafetensorsException e) {
                throw e;
            } catch (MalformedJsonException | EOFException | IllegalStateException e) {
                throw new SafetensorsException(
                        file, "header is not valid JSON: " + e.getMessage(), e);
            } catch (IOException e) {
                throw new SafetensorsException(file, "header cannot be read", e);
            }
            checkCoverage(dataBytes);
            return new SafetensorsHeader(tensors, metadata, dataStart);
        }

        private void parseMetadata() throws IOException {
            if (metadataSeen) {
                throw new SafetensorsException(file, METADATA + " appears twice in the header");
            }
            metadataSeen = true;
            json.beginObject();
            while (json.hasNext()) {
                String key = json.nextName();
                if (json.peek() != JsonToken.STRING) {
                    throw new SafetensorsException(
                            file, METADATA + " entry '" + key + "' is not a string");
                }
                if (metadata.put(key, json.nextString()) != null) {
                    throw new SafetensorsException(
                            file, METADATA + " entry '" + key + "' appears twice");
                }
            }
            json.endObject();
        }

        private TensorInfo parseTensor(String name) throws IOException {
            if (json.peek() != JsonToken.BEGIN_OBJECT) {
                throw fail(name, "is not described by a JSON object");
            }
            DType dtype = null;
            long[] shape = null;
            long[] offsets = null;
            json.beginObject();
            while (json.hasNext()) {
                String key = json.nextName();
                boolean seen;
                switch (key) {
                    case "dtype" -> {
                        seen = dtype != null;
                        dtype = parseDType(name);
                    }
                    case "shape" -> {
                        seen = shape != null;
                        shape = parseLongs(name, key);
                    }
                    case "data_offsets" -> {
                        seen = offsets != null;
                        offsets = parseLongs(name, key);
                    }
                    default -> throw fail(name, "has the unknown key '" + key + "'");
                }
                if (seen) {
                    throw fail(name, "has the key '" + key + "' twice");
                }
            }
            json.endObject();
            if (dtype == null || shape == null || offsets == null) {
                throw fail(name, "lacks dtype, shape or data_offsets");
            }
            if (offsets.length != 2) {
                throw fail(name, "has " + offsets.length + " data_offsets instead of two");
            }
            checkSize(name, dtype, shape, offsets);
            return new TensorInfo(name, dtype, shape, offsets[0], offsets[1]);
        }

        private DType parseDType(String name) throws IOException {
            if (json.peek() != JsonToken.STRING) {
                throw fail(name, "has a dtype that is not a string");
            }
            String text = json.nextString();
            for (DType dtype : DType.values()) {
                if (dtype.name().equals(text)) {
                    return dtype;
                }
            }
            throw fail(
                    name,
                    "has the unknown dtype '"
                            + text
                            + "'; known are "
                            + Arrays.toString(DType.values()));
        }

        private long[] parseLongs(String name, String key) throws IOException {
            if (json.peek() != JsonToken.BEGIN_ARRAY) {
                throw fail(name, key + " is not an array");
            }
            List<Long> values = new ArrayList<>();
            json.beginArray();
            while (json.hasNext()) {
                if (json.peek() != JsonToken.NUMBER) {
                    throw fail(name, key + " holds something other than a number");
                }
                // As text: Gson would quietly take 1.0 or 1e3 for a whole number.
                String text = json.nextString();
                try {
                    long value = Long.parseLong(text);
                    if (value < 0) {
                        throw fail(name, key + " holds the negative number " + text);
                    }
                    values.add(value);
                } catch (NumberFormatException e) {
                    throw fail(name, key + " holds " + text + ", not a whole number below 2^63");
                }
            }
            json.endArray();
            return values.stream().mapToLong(Long::longValue).toArray();
        }

        private void checkSize(String name, DType dtype, long[] shape, long[] offsets)
                throws SafetensorsException {
            if (offsets[1] < offsets[0]) {
                throw fail(name, "ends before it begins: data_offsets " + Arrays.toString(offsets));
            }
            long bytes;
            try {
                bytes = Math.multiplyExact(TensorInfo.elementCount(shape), (long) dtype.bytes());
            } catch (ArithmeticException e) {
                throw fail(name, "has a shape of 2^63 bytes or more: " + Arrays.toString(shape));
            }
            if (bytes != offsets[1] - offsets[0]) {
                throw fail(
                        name,
                        "of "
                                + dtype
                                + Arrays.toString(shape)
                                + " needs "
                                + bytes
                                + " bytes, but its data_offsets span "
                                + (offsets[1] - offsets[0]));
            }
        }

        /** The data must be covered from the first byte to the last, each byte once. */
        private void checkCoverage(long dataBytes) throws SafetensorsException {
            List<TensorInfo> ordered = new ArrayList<>(tensors.values());
            ordered.sort(
                    Comparator.comparingLong(TensorInfo::begin).thenComparingLong(TensorInfo::end));
            long covered = 0;
            String previous = null;
            for (TensorInfo info : ordered) {
                if (info.end() > dataBytes) {
                    throw fail(
                            info.name(),
                            "ends at byte "
                                    + info.end()
                                    + " of a data section of "
                                    + dataBytes
                                    + " bytes: offsets are out of range or the file is truncated");
                }
                if (info.begin() < covered) {
                    throw fail(info.name(), "overlaps tensor '" + previous + "'");
                }
                if (info.begin() > covered) {
                    throw fail(
                            info.name(),
                            "begins at byte "
                                    + info.begin()
                                    + " of the data section, which leaves a gap of "
                                    + (info.begin() - covered)
                                    + " bytes before it");
                }
                covered = info.end();
                previous = info.name();
            }
            if (covered != dataBytes) {
                throw new SafetensorsException(
                        file, (dataBytes - covered) + " bytes at the end belong to no tensor");
            }
        }

        private SafetensorsException fail(String tensor, String detail) {
            return new SafetensorsException(file, "tensor '" + tensor + "' " + detail);
        }
    }
}
