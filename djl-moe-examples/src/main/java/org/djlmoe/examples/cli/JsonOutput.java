package org.djlmoe.examples.cli;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.TypeAdapter;
import com.google.gson.stream.JsonReader;
import com.google.gson.stream.JsonWriter;
import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Path;
import org.djlmoe.io.AtomicFiles;

/**
 * Writes figures as JSON, indented. A reader never sees half a file: it is written beside its place
 * and then moved there; a device or a pipe is written to as it is. NaN and the infinities, which
 * JSON does not have, become null.
 */
public final class JsonOutput {
    /** The name that stands for standard output. */
    public static final String STDOUT = "-";

    private static final Gson GSON =
            new GsonBuilder()
                    .setPrettyPrinting()
                    .disableHtmlEscaping()
                    .serializeNulls()
                    .registerTypeAdapter(double.class, new FiniteNumber())
                    .registerTypeAdapter(Double.class, new FiniteNumber())
                    .registerTypeAdapter(float.class, new FiniteNumber())
                    .registerTypeAdapter(Float.class, new FiniteNumber())
                    .create();

    private JsonOutput() {}

    /**
     * Writes figures.
     *
     * @param figures a record, map or list
     * @param target a file, replaced if it exists, its directory made if needed; or {@link #STDOUT}
     * @param stdout what {@link #STDOUT} stands for
     * @throws UserError if the file's place cannot be used
     * @throws IOException if writing fails half-way
     */
    public static void write(Object figures, String target, PrintWriter stdout) throws IOException {
        String text = GSON.toJson(figures);
        if (STDOUT.equals(target)) {
            stdout.println(text);
            return;
        }
        AtomicFiles.writeString(check(target), text + "\n");
    }

    /**
     * Makes sure that a file can be written, without writing it; its directory is made if needed.
     *
     * @param target the file, or {@link #STDOUT}, which always can
     * @return the file's absolute path
     * @throws UserError if it cannot
     */
    static Path check(String target) {
        if (STDOUT.equals(target)) {
            return Path.of(target).toAbsolutePath();
        }
        return Arguments.outputFile("--json", target);
    }

    private static final class FiniteNumber extends TypeAdapter<Number> {
        @Override
        public void write(JsonWriter out, Number value) throws IOException {
            if (value == null || !Double.isFinite(value.doubleValue())) {
                out.nullValue();
            } else {
                out.value(value);
            }
        }

        @Override
        public Number read(JsonReader in) {
            throw new UnsupportedOperationException("figures are only written");
        }
    }
}
