package org.djlmoe.examples.study;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonParseException;
import java.io.IOException;
import java.nio.charset.CharacterCodingException;
import java.nio.file.Files;
import java.nio.file.Path;
import org.djlmoe.io.AtomicFiles;

/** The finished units of a study, a file each, so that a study that stopped goes on from there. */
final class UnitStore {

    private static final Gson GSON =
            new GsonBuilder().setPrettyPrinting().serializeSpecialFloatingPointValues().create();

    private final Path folder;

    UnitStore(Path folder) throws IOException {
        this.folder = Files.createDirectories(folder);
    }

    /**
     * Reads a unit.
     *
     * @param name its name
     * @param settings the text of the settings that it must have been made with
     * @return the unit, or null if it is not finished
     * @throws IllegalArgumentException if it was made with other settings, or is no unit
     */
    Figures.Unit read(String name, String settings) throws IOException {
        Figures.Unit unit = read(name, Figures.Unit.class);
        if (unit != null) {
            check(name, unit.series() != null, unit.settings(), settings);
        }
        return unit;
    }

    /** Reads the times of a seed, as {@link #read} does a unit. */
    Figures.Times readTimes(String name, String settings) throws IOException {
        Figures.Times times = read(name, Figures.Times.class);
        if (times != null) {
            check(name, times.timings() != null, times.settings(), settings);
        }
        return times;
    }

    private <T> T read(String name, Class<T> type) throws IOException {
        Path file = file(name);
        if (!Files.exists(file)) {
            return null;
        }
        try {
            T unit = GSON.fromJson(Files.readString(file), type);
            if (unit != null) {
                return unit;
            }
        } catch (JsonParseException | CharacterCodingException e) {
            throw new IllegalArgumentException(broken(file), e);
        }
        throw new IllegalArgumentException(broken(file));
    }

    private static String broken(Path file) {
        return file + " is no result of a study: delete it to have it made anew";
    }

    private void check(String name, boolean whole, String made, String wanted) {
        if (!whole || made == null) {
            throw new IllegalArgumentException(broken(file(name)));
        }
        if (!made.equals(wanted)) {
            throw new IllegalArgumentException(
                    "%s was made with other settings (%s, now %s): choose another --out, or delete it"
                            .formatted(file(name), made, wanted));
        }
    }

    void write(Figures.Unit unit) throws IOException {
        AtomicFiles.writeString(file(unit.unit()), GSON.toJson(unit) + "\n");
    }

    void write(Figures.Times times) throws IOException {
        AtomicFiles.writeString(file(times.unit()), GSON.toJson(times) + "\n");
    }

    /** Returns where the model of a unit is kept while its decoding is not timed yet. */
    Path model(String name) {
        return folder.resolve(name + "-model");
    }

    private Path file(String name) {
        return folder.resolve(name + ".json");
    }
}
