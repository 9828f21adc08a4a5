package org.djlmoe.examples.cli;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.checkpoint.HfCheckpoint;
import org.djlmoe.examples.demo.BaseModel;
import org.djlmoe.examples.text.ByteLevelTokenizer;
import org.djlmoe.io.SafetensorsException;
import org.djlmoe.io.SafetensorsFolder;
import org.djlmoe.maskcoft.ExpertPrior;
import org.djlmoe.model.MoeConfig;
import org.djlmoe.routing.SelectionPrior;
import org.djlmoe.training.LanguageModel;

/**
 * The folder that {@code --model} names, with errors for people.
 *
 * @param path the folder
 * @param config the model's sizes
 */
record CheckpointFolder(Path path, MoeConfig config) {

    /**
     * Looks at a folder.
     *
     * @throws UserError if it holds no model for the byte-level tokenizer
     */
    static CheckpointFolder of(Path path) throws IOException {
        return of("--model", path);
    }

    /**
     * Looks at a folder.
     *
     * @param option what named it, for the messages
     * @throws UserError if it holds no model for the byte-level tokenizer
     */
    static CheckpointFolder of(String option, Path path) throws IOException {
        Path config = path.resolve(HfCheckpoint.CONFIG_FILE);
        if (!Files.isDirectory(path)) {
            throw new UserError(option + ": there is no folder " + path);
        }
        if (!Files.isRegularFile(config)) {
            throw new UserError(
                    option
                            + ": "
                            + path
                            + " is not a checkpoint folder: it has no "
                            + HfCheckpoint.CONFIG_FILE);
        }
        CheckpointFolder folder = new CheckpointFolder(path, MoeConfig.fromJson(config));
        if (folder.config.vocabSize() != ByteLevelTokenizer.VOCAB_SIZE) {
            throw new UserError(
                    option
                            + ": "
                            + path
                            + " has a vocabulary of "
                            + folder.config.vocabSize()
                            + " tokens, but the text here is cut into the "
                            + ByteLevelTokenizer.VOCAB_SIZE
                            + " of the byte-level tokenizer");
        }
        return explained(
                option,
                () -> {
                    HfCheckpoint.check(path, folder.config);
                    return folder;
                });
    }

    /** Returns whether a file of this name in a checkpoint folder is part of the checkpoint. */
    static boolean holds(String name) {
        return name.endsWith(".safetensors")
                || name.equals(SafetensorsFolder.INDEX_FILE)
                || name.equals(HfCheckpoint.CONFIG_FILE)
                || name.equals(ExpertPrior.FILE)
                || name.equals(ByteLevelTokenizer.FILE)
                || name.equals(BaseModel.RECORD);
    }

    /** Something that reads a folder. */
    private interface Reading<T> {
        T run() throws IOException;
    }

    private static <T> T explained(String option, Reading<T> reading) throws IOException {
        try {
            return reading.run();
        } catch (CheckpointException | SafetensorsException e) {
            throw new UserError(option + ": " + e.getMessage(), e);
        } catch (NoSuchFileException e) {
            throw new UserError(option + ": there is no file " + e.getFile(), e);
        }
    }

    /** Loads the weights. */
    LanguageModel load() throws IOException {
        return load(LanguageModel.Chunks.DEFAULT);
    }

    /** Loads the weights into a model that runs in pieces of the given sizes. */
    LanguageModel load(LanguageModel.Chunks chunks) throws IOException {
        return explained("--model", () -> LanguageModel.load(path, chunks));
    }

    /** Loads the weights, those of the experts in BF16. */
    LanguageModel loadHalf(LanguageModel.Chunks chunks) throws IOException {
        return explained("--model", () -> LanguageModel.loadHalf(path, chunks));
    }

    /**
     * Reads the folder's prior.
     *
     * @param choice {@code none}, {@code hard} or a strength instead of the file's; null for what
     *     the file says
     * @return the prior, or null for none
     * @throws UserError if the choice is none of these, or needs a mask and the folder has none
     */
    ExpertPrior prior(String choice) throws IOException {
        if ("none".equalsIgnoreCase(choice)) {
            return null;
        }
        ExpertPrior own = ExpertPrior.load(path);
        if (choice == null) {
            return own;
        }
        boolean hard = choice.equalsIgnoreCase("hard");
        double beta = hard ? Double.POSITIVE_INFINITY : beta(choice);
        if (own == null) {
            throw new UserError(
                    "--prior "
                            + choice
                            + " needs the preferred experts, but "
                            + path
                            + " has no "
                            + ExpertPrior.FILE);
        }
        return own.withPrior(
                hard
                        ? SelectionPrior.hardMask()
                        : own.prior().isHardMask()
                                ? SelectionPrior.additive(beta)
                                : new SelectionPrior(
                                        own.prior().form(),
                                        beta,
                                        own.prior().protectedTop(),
                                        own.prior().logitRange()));
    }

    private static double beta(String text) {
        double beta;
        try {
            beta = Double.parseDouble(text);
        } catch (NumberFormatException e) {
            beta = Double.NaN;
        }
        if (!(beta >= 0) || Double.isInfinite(beta)) {
            throw new UserError(
                    "--prior must be none, hard or a strength of 0 or more, not '" + text + "'");
        }
        return beta;
    }
}
