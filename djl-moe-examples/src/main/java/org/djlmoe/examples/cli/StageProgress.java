package org.djlmoe.examples.cli;

import java.util.Locale;

/** Progress of work in stages: a new bar for every new label. */
final class StageProgress implements AutoCloseable {

    private final CommonOptions options;
    private String label;
    private ProgressBar bar;
    private int done;
    private String initialStage;
    private int initial;
    private long tokensDone;

    StageProgress(CommonOptions options) {
        this.options = options;
    }

    /** Lets a stage begin after steps that were done in another run. */
    StageProgress after(String stage, int steps) {
        initialStage = stage;
        initial = steps;
        return this;
    }

    /**
     * Shows that a step is done.
     *
     * @param stage the stage's label
     * @param step steps done in it
     * @param steps its steps in all
     * @param tokens tokens of this step
     * @param loss the loss to show, or NaN for none
     */
    void step(String stage, int step, int steps, long tokens, double loss) {
        if (!stage.equals(label)) {
            close();
            label = stage;
            done = stage.equals(initialStage) ? initial : 0;
            bar = options.progress(stage, steps).optUnit("tokens").optInitial(done).build();
        }
        if (!Double.isNaN(loss)) {
            bar.note(String.format(Locale.ROOT, "loss %.3f", loss));
        }
        bar.advance(step - done, tokens);
        tokensDone += tokens;
        done = step;
    }

    /** Returns the tokens of all steps of all stages. */
    long tokens() {
        return tokensDone;
    }

    @Override
    public void close() {
        if (bar != null) {
            bar.close();
            bar = null;
        }
    }
}
