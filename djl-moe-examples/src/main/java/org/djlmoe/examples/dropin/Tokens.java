package org.djlmoe.examples.dropin;

import ai.djl.ndarray.NDArray;
import ai.djl.ndarray.NDManager;
import ai.djl.ndarray.index.NDIndex;
import ai.djl.ndarray.types.DataType;
import ai.djl.ndarray.types.Shape;
import ai.djl.training.Trainer;
import ai.djl.training.TrainingResult;
import ai.djl.training.dataset.ArrayDataset;
import ai.djl.training.evaluator.Evaluator;
import ai.djl.training.listener.TrainingListenerAdapter;
import java.util.Locale;

/** What both programs share: the text, which counts up in steps, and how far training is. */
public final class Tokens {

    private Tokens() {}

    /**
     * Returns sequences that start and step at random, in batches; labels are the next tokens. Part
     * of the vocabulary is used only, so that something can be learned in a few steps.
     *
     * @param manager the owner of the text
     * @param settings the shape
     * @return data (B, S) and labels (B, S, 1)
     */
    public static ArrayDataset dataset(NDManager manager, DropInSettings settings) {
        int rows = settings.batch() * settings.batches();
        long used = Math.min(settings.vocab(), 50);
        Shape column = new Shape(rows, 1);
        NDArray start = manager.randomInteger(0, used, column, DataType.INT64);
        NDArray step = manager.randomInteger(1, 4, column, DataType.INT64);
        NDArray places = manager.arange(settings.sequence() + 1).toType(DataType.INT64, false);
        NDArray text = places.expandDims(0).mul(step).add(start).mod(used);
        return new ArrayDataset.Builder()
                .setData(text.get(new NDIndex(":, :-1")))
                // DJL's cross-entropy takes labels of as many axes as its predictions.
                .optLabels(text.get(new NDIndex(":, 1:")).expandDims(2))
                .setSampling(settings.batch(), false)
                .build();
    }

    /** Prints loss and accuracy at the end of every epoch. */
    static final class Printer extends TrainingListenerAdapter {

        @Override
        public void onEpoch(Trainer trainer) {
            TrainingResult result = trainer.getTrainingResult();
            StringBuilder line = new StringBuilder();
            for (Evaluator evaluator : trainer.getEvaluators()) {
                String name = evaluator.getName();
                line.append(
                        String.format(
                                Locale.ROOT, "%s %.4f  ", name, result.getTrainEvaluation(name)));
            }
            System.out.println(line.toString().strip());
        }
    }
}
