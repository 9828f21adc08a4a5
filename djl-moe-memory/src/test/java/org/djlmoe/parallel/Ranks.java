package org.djlmoe.parallel;

import static org.junit.jupiter.api.Assertions.assertThrows;

/** Ranks of a test that are to fail. */
public final class Ranks {

    private Ranks() {}

    /** Returns how a run ends that must not end well. */
    public static ProcessGroupException failure(int size, InProcessGroup.RankTask<?> task) {
        return assertThrows(ProcessGroupException.class, () -> InProcessGroup.run(size, task));
    }
}
