package org.djlmoe.examples.demo;

import java.io.FileNotFoundException;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import org.djlmoe.io.AtomicFiles;

/**
 * The base model that comes with the examples: eight experts a layer, trained on all languages of
 * the parliament transcripts by {@code ./moe train --preset demo}. How exactly stands in its {@code
 * training.json}.
 */
public final class BaseModel {

    /** The file that says how the model was trained. */
    public static final String RECORD = "training.json";

    private static final String[] FILES = {
        "config.json", "model.safetensors", "tokenizer.json", RECORD
    };

    private BaseModel() {}

    /**
     * Copies the model out of the class path.
     *
     * @param folder where to, created if missing
     * @return the folder
     * @throws IOException if writing fails
     */
    public static Path extract(Path folder) throws IOException {
        Files.createDirectories(folder);
        for (String file : FILES) {
            try (InputStream in = BaseModel.class.getResourceAsStream("base/" + file)) {
                if (in == null) {
                    throw new FileNotFoundException(
                            "The base model's " + file + " is not on the class path");
                }
                AtomicFiles.write(folder.resolve(file), in::transferTo);
            }
        }
        return folder;
    }
}
