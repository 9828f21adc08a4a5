package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.checkpoint.SaveOptions;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.training.LanguageModel;
import picocli.CommandLine.Option;

/** The option {@code --adapter}, with errors for people; a mixin. */
final class AdapterFolder {

    @Option(
            names = "--adapter",
            paramLabel = "DIR",
            description =
                    "Merge the adapters of this folder, in the format of Hugging Face PEFT, into the"
                            + " model; its prior, if it has one, replaces the model's.")
    private Path adapter;

    /** Returns the folder, or null. */
    Path path() {
        return adapter;
    }

    /** Whose prior counts. */
    CheckpointFolder prior(CheckpointFolder model) {
        return adapter != null && Files.exists(adapter.resolve(ExpertPrior.FILE))
                ? new CheckpointFolder(adapter, model.config())
                : model;
    }

    /** Merges the adapters, if any. */
    void merge(LanguageModel model) throws IOException {
        if (adapter == null) {
            return;
        }
        try {
            model.attachAdapter(adapter);
        } catch (CheckpointException | SafetensorsException e) {
            throw new UserError("--adapter: " + e.getMessage(), e);
        } catch (NoSuchFileException e) {
            throw new UserError("--adapter: there is no file " + e.getFile(), e);
        }
        model.mergeAdapters();
    }

    /**
     * Writes the merged model, with its prior.
     *
     * @param target a folder for it
     * @return the folder; the model's own without an adapter
     */
    CheckpointFolder merged(CheckpointFolder model, Path target) throws IOException {
        if (adapter == null) {
            return model;
        }
        try (LanguageModel loaded = model.load()) {
            merge(loaded);
            loaded.save(target, SaveOptions.builder().build());
        }
        ExpertPrior prior = ExpertPrior.load(prior(model).path());
        if (prior != null) {
            prior.save(target);
        }
        return CheckpointFolder.of(target);
    }
}
