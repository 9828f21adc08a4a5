package org.djlmoe.examples.study;

import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonParseException;
import java.io.IOException;
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
        Path file = file(name);
        if (!Files.exists(file)) {
            return null;
        }
        Figures.Unit unit;
        try {
            unit = GSON.fromJson(Files.readString(file), Figures.Unit.class);
        } catch (JsonParseException e) {
            throw new IllegalArgumentException(
                    file + " is no result of a study: delete it to have it made anew", e);
        }
        if (unit == null || unit.series() == null || unit.settings() == null) {
            throw new IllegalArgumentException(
                    file + " is no result of a study: delete it to have it made anew");
        }
        if (!unit.settings().equals(settings)) {
            throw new IllegalArgumentException(
                    "%s was made with other settings (%s, now %s): choose another --out, or delete it"
                            .formatted(file, unit.settings(), settings));
        }
        return unit;
    }

    void write(Figures.Unit unit) throws IOException {
        AtomicFiles.writeString(file(unit.unit()), GSON.toJson(unit) + "\n");
    }

    private Path file(String name) {
        return folder.resolve(name + ".json");
    }
}
