package org.djlmoe.examples.bench;

import ai.djl.ndarray.NDArray;
import java.util.Map;

/** The drop-in example, and what the process holds between its steps. */
public final class SoakWorkload implements Workload {

    private final DropInWorkload steps;

    public SoakWorkload(CaseSettings settings) {
        steps = new DropInWorkload(settings);
    }

    @Override
    public void run() {
        for (int i = 0; i < 50; i++) {
            steps.run();
        }
    }

    @Override
    public Map<String, NDArray> results() {
        return steps.results();
    }

    @Override
    public Map<String, Double> figures() {
        return Map.of(
                "held", (double) ProcessStatus.held(), "arrays", (double) steps.managedArrays());
    }

    @Override
    public void close() {
        steps.close();
    }
}
