package org.djlmoe.cache;

import com.google.gson.Strictness;
import com.google.gson.stream.JsonReader;
import com.google.gson.stream.JsonToken;
import com.google.gson.stream.MalformedJsonException;
import java.io.EOFException;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.zip.GZIPInputStream;
import java.util.zip.ZipException;

/** Reads the file that {@link ExpertTrace#write} describes. */
final class TraceReader {

    private static final int BUFFER = 1 << 16;

    private final Path file;
    private int experts = -1;
    private int topK = -1;
    private boolean hasRequests;
    private ExpertTrace.Builder trace;

    /** Where the reader is, for messages; counted from 0, -1 outside. */
    private int request = -1;

    private int layer = -1;
    private int numLayers;

    TraceReader(Path file) {
        this.file = file;
    }

    ExpertTrace read() throws IOException {
        try {
            scan();
            if (trace == null) {
                require(TraceWriter.EXPERTS, experts >= 0);
                require(TraceWriter.TOP_K, topK >= 0);
                require(TraceWriter.REQUESTS, hasRequests);
                // The sizes came last. Now that they are known, the requests can be read.
                hasRequests = false;
                scan();
            }
            request = -1;
            return trace.build();
        } catch (MalformedJsonException | EOFException | ZipException e) {
            throw fail("not a whole JSON file: " + firstLine(e), e);
        } catch (NumberFormatException e) {
            throw fail("not a whole number: " + firstLine(e), e);
        } catch (IllegalStateException e) {
            // Gson's word for a value of another kind than expected; also the builder's for no
            // tokens at all.
            throw fail(firstLine(e), e);
        }
    }

    private void scan() throws IOException {
        try (InputStream bytes = Files.newInputStream(file);
                InputStream plain =
                        TraceWriter.isGzip(file) ? new GZIPInputStream(bytes, BUFFER) : bytes;
                JsonReader json =
                        new JsonReader(new InputStreamReader(plain, StandardCharsets.UTF_8))) {
            json.setStrictness(Strictness.STRICT);
            json.beginObject();
            while (json.hasNext()) {
                switch (json.nextName()) {
                    case TraceWriter.EXPERTS -> experts = json.nextInt();
                    case TraceWriter.TOP_K -> topK = json.nextInt();
                    case TraceWriter.REQUESTS -> readRequests(json);
                    default -> json.skipValue();
                }
            }
            json.endObject();
            if (json.peek() != JsonToken.END_DOCUMENT) {
                throw fail("something follows the trace", null);
            }
        }
    }

    private void readRequests(JsonReader json) throws IOException {
        if (hasRequests) {
            throw fail("\"requests\" is there twice", null);
        }
        hasRequests = true;
        if (experts < 0 || topK < 0) {
            json.skipValue();
            return;
        }
        if (experts < 1 || experts > 1 << 16) {
            throw fail("\"experts\" is " + experts + ": it must be 1 to 65536", null);
        }
        if (topK < 1 || topK > experts) {
            throw fail("\"top_k\" is " + topK + ": it must be 1 to " + experts, null);
        }
        json.beginArray();
        for (request = 0; json.hasNext(); request++) {
            boolean read = false;
            json.beginObject();
            while (json.hasNext()) {
                if (json.nextName().equals(TraceWriter.LAYERS) && !read) {
                    readLayers(json);
                    read = true;
                } else {
                    json.skipValue();
                }
            }
            json.endObject();
            require(TraceWriter.LAYERS, read);
        }
        json.endArray();
        request = -1;
        if (trace == null) {
            throw fail("there is no request", null);
        }
    }

    private void readLayers(JsonReader json) throws IOException {
        List<int[]> layers = new ArrayList<>();
        json.beginArray();
        for (layer = 0; json.hasNext(); layer++) {
            int[] ids = readIds(json);
            if (!layers.isEmpty() && ids.length != layers.get(0).length) {
                throw fail(ids.length + " ids where layer 0 has " + layers.get(0).length, null);
            }
            layers.add(ids);
        }
        json.endArray();
        layer = -1;
        if (trace == null) {
            if (layers.isEmpty()) {
                throw fail("there is no layer", null);
            }
            numLayers = layers.size();
            trace =
                    ExpertTrace.builder()
                            .setNumExperts(experts)
                            .setTopK(topK)
                            .setNumLayers(numLayers);
        } else if (layers.size() != numLayers) {
            throw fail(layers.size() + " layers where request 0 has " + numLayers, null);
        }
        trace.beginRequest();
        for (layer = 0; layer < numLayers; layer++) {
            try {
                trace.append(layer, layers.get(layer));
            } catch (IllegalArgumentException e) {
                throw fail(e.getMessage().replaceFirst("^Layer \\d+: ", ""), e);
            }
        }
        layer = -1;
    }

    private int[] readIds(JsonReader json) throws IOException {
        int[] ids = new int[16 * topK];
        int size = 0;
        json.beginArray();
        while (json.hasNext()) {
            if (size == ids.length) {
                ids = Arrays.copyOf(ids, 2 * size);
            }
            ids[size++] = json.nextInt();
        }
        json.endArray();
        return Arrays.copyOf(ids, size);
    }

    private void require(String key, boolean there) {
        if (!there) {
            throw fail("\"" + key + "\" is missing", null);
        }
    }

    private IllegalArgumentException fail(String problem, Exception cause) {
        String where = request < 0 ? "" : "request " + request;
        if (layer >= 0) {
            where += ", layer " + layer;
        }
        return new IllegalArgumentException(
                file + ": " + where + (where.isEmpty() ? "" : ": ") + problem, cause);
    }

    // The further lines of Gson's messages are links to its manual.
    private static String firstLine(Exception e) {
        String message = e.getMessage();
        return message == null ? e.getClass().getSimpleName() : message.lines().findFirst().get();
    }
}
