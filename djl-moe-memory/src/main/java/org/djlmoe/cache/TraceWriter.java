package org.djlmoe.cache;

import com.google.gson.stream.JsonWriter;
import java.io.BufferedOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.OutputStreamWriter;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Locale;
import java.util.zip.GZIPOutputStream;
import org.djlmoe.io.AtomicFiles;

/** Writes the file that {@link ExpertTrace#write} describes. */
final class TraceWriter {

    static final String EXPERTS = "experts";
    static final String TOP_K = "top_k";
    static final String REQUESTS = "requests";
    static final String LAYERS = "layers";

    private static final int BUFFER = 1 << 16;

    private TraceWriter() {}

    static boolean isGzip(Path file) {
        return file.getFileName().toString().toLowerCase(Locale.ROOT).endsWith(".gz");
    }

    static void write(ExpertTrace trace, Path file) throws IOException {
        AtomicFiles.write(
                file,
                out -> {
                    if (isGzip(file)) {
                        GZIPOutputStream packed = new GZIPOutputStream(out, BUFFER);
                        write(trace, packed);
                        packed.finish();
                    } else {
                        write(trace, out);
                    }
                });
    }

    private static void write(ExpertTrace trace, OutputStream out) throws IOException {
        JsonWriter json =
                new JsonWriter(
                        new OutputStreamWriter(
                                new BufferedOutputStream(out, BUFFER), StandardCharsets.UTF_8));
        json.beginObject();
        json.name(EXPERTS).value(trace.numExperts());
        json.name(TOP_K).value(trace.topK());
        json.name(REQUESTS).beginArray();
        for (ExpertTrace.Request request : trace.requests()) {
            json.beginObject().name(LAYERS).beginArray();
            int end = request.firstToken() + request.tokens();
            for (int l = 0; l < trace.numLayers(); l++) {
                json.beginArray();
                for (int t = request.firstToken(); t < end; t++) {
                    for (int i = 0; i < trace.topK(); i++) {
                        json.value(trace.expert(l, t, i));
                    }
                }
                json.endArray();
            }
            json.endArray().endObject();
        }
        json.endArray().endObject();
        json.flush();
    }
}
