package org.djlmoe.examples.bench;

import ai.djl.Model;
import ai.djl.ndarray.NDArray;
import ai.djl.nn.Parameter;
import ai.djl.training.EasyTrain;
import ai.djl.training.Trainer;
import ai.djl.training.dataset.ArrayDataset;
import ai.djl.training.dataset.Batch;
import ai.djl.training.listener.TrainingListener;
import ai.djl.training.listener.TrainingListenerAdapter;
import ai.djl.translate.TranslateException;
import ai.djl.util.Pair;
import java.io.IOException;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.autograd.Gradients;
import org.djlmoe.examples.dropin.BoundedTraining;
import org.djlmoe.examples.dropin.DropInSettings;
import org.djlmoe.examples.dropin.StockTraining;
import org.djlmoe.examples.dropin.Tokens;

/** Training steps of the drop-in example. */
public final class DropInWorkload implements Workload {

    static final String OURS = "ours";
    static final String STOCK = "stock";

    /**
     * Shifts whose gradient is zero but for rounding, so that there is nothing to compare: a
     * softmax does not see that all keys move, and a norm over the batch not that all tokens do.
     */
    private static final List<String> VANISHING =
            List.of(
                    "keyProjection_bias",
                    "valueProjection_bias",
                    "resultProjection_bias",
                    "outputBlock_03Linear_bias",
                    "outputNorm_beta");

    private final Model model;
    private final Trainer trainer;
    private final ArrayDataset dataset;
    private final Map<String, NDArray> first = new LinkedHashMap<>();

    /**
     * Creates the workload.
     *
     * @param settings vocab, hidden, layers, heads, batch, sequence, seed
     */
    public DropInWorkload(CaseSettings settings) {
        DropInSettings shape =
                new DropInSettings(
                        settings.number("vocab"),
                        settings.number("hidden"),
                        settings.number("layers"),
                        settings.number("heads"),
                        settings.number("batch"),
                        settings.number("sequence"),
                        1,
                        1,
                        settings.number("seed"));
        TrainingListener keep =
                new TrainingListenerAdapter() {
                    @Override
                    public void onTrainingBatch(Trainer trainer, BatchData batch) {
                        if (first.isEmpty()) {
                            keep(trainer, batch);
                        }
                    }
                };
        model = Model.newInstance("dropin", "PyTorch");
        trainer =
                settings.name().equals(STOCK)
                        ? StockTraining.trainer(model, shape, keep)
                        : BoundedTraining.trainer(model, shape, keep);
        dataset = Tokens.dataset(trainer.getManager(), shape);
    }

    private void keep(Trainer trainer, TrainingListener.BatchData batch) {
        NDArray loss =
                trainer.getLoss()
                        .evaluate(
                                batch.getLabels().values().iterator().next(),
                                batch.getPredictions().values().iterator().next());
        first.put("loss", trainer.getManager().create(loss.getFloat()));
        int place = 0;
        for (Pair<String, Parameter> parameter : trainer.getModel().getBlock().getParameters()) {
            NDArray gradient = Gradients.of(parameter.getValue());
            if (gradient != null && VANISHING.stream().noneMatch(parameter.getKey()::endsWith)) {
                NDArray copy = gradient.duplicate();
                copy.attach(trainer.getManager());
                gradient.close();
                // A wrapper changes names, but not the order.
                first.put("gradient" + place, copy);
            }
            place++;
        }
    }

    @Override
    public void run() {
        try {
            for (Batch batch : trainer.iterateDataset(dataset)) {
                EasyTrain.trainBatch(trainer, batch);
                trainer.step();
                batch.close();
            }
        } catch (IOException | TranslateException e) {
            throw new IllegalStateException(e);
        }
    }

    /** Returns how many arrays the model and all that belongs to it own. */
    int managedArrays() {
        return model.getNDManager().getManagedArrays().size();
    }

    @Override
    public Map<String, NDArray> results() {
        return new LinkedHashMap<>(first);
    }

    @Override
    public void close() {
        trainer.close();
        model.close();
    }
}
