package org.djlmoe.training;

import java.io.IOException;
import java.nio.file.Path;
import org.djlmoe.checkpoint.CheckpointException;
import org.djlmoe.checkpoint.PeftAdapter;
import org.djlmoe.optimizer.OffloadStreamAdamW;
import org.djlmoe.optimizer.StateReport;

/**
 * A complete saved state of a training run.
 *
 * @param folder a Hugging Face checkpoint folder, in F32, or an adapter in the format of Hugging
 *     Face PEFT, with the optimizer's state and the run's beside the weights
 * @param state how far the run was
 */
public record TrainingCheckpoint(Path folder, TrainingState state) {

    static final String OPTIMIZER_FILE = "optimizer.safetensors";

    /**
     * Reads the weights.
     *
     * @param chunks sizes of what runs piece by piece; those of the run that was saved, if the
     *     steps are to be the same to the bit
     * @return the model
     * @throws IOException if a file is missing or broken
     */
    public LanguageModel loadModel(LanguageModel.Chunks chunks) throws IOException {
        return LanguageModel.load(folder, chunks);
    }

    /**
     * Fills a model's adapters, and its routers where those have trained too.
     *
     * @param model the model that the run began with; its experts have adapters of the same rank
     * @param routers whether routers have trained
     * @throws CheckpointException if what was saved is of another model, another rank, or has
     *     routers where they have not trained; nothing has changed then
     * @throws IOException if a file is missing or broken
     */
    public void loadAdapters(LanguageModel model, boolean routers) throws IOException {
        PeftAdapter adapter = PeftAdapter.open(folder, model.decoder().config());
        if (adapter.hasRouters() != routers) {
            throw new CheckpointException(
                    folder
                            + (routers
                                    ? ": has no routers, but they train in this run"
                                    : ": has routers, but they do not train in this run"));
        }
        try {
            adapter.load(model.decoder().namedParameters());
        } catch (IllegalArgumentException e) {
            throw new CheckpointException(folder + ": does not fit the model: " + e.getMessage());
        }
    }

    /**
     * Reads the optimizer's state and lets a trainer go on after the last step.
     *
     * @param model the model, with the parameters frozen that are not to be trained
     * @param optimizer takes the state; new, or one whose state is to be replaced
     * @param trainer the trainer of both
     * @return what became of each parameter's state
     * @throws IOException if the file is missing or broken, or a shape differs
     */
    public StateReport restore(
            LanguageModel model, OffloadStreamAdamW optimizer, LanguageModelTrainer trainer)
            throws IOException {
        StateReport report = optimizer.load(folder.resolve(OPTIMIZER_FILE), model.decoder());
        trainer.resumeAt(state.step());
        return report;
    }
}
