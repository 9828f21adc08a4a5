package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import org.junit.jupiter.api.Test;

class WarmupCosineTrackerTest {

    @Test
    void getNewValue_overASchedule_risesFallsAndStays() {
        WarmupCosineTracker tracker =
                WarmupCosineTracker.builder()
                        .setPeak(0.8)
                        .setUpdates(14)
                        .optWarmup(4)
                        .optLast(0.2)
                        .build();

        assertEquals(0.2f, tracker.getNewValue(1), 1e-7f);
        assertEquals(0.8f, tracker.getNewValue(4), 1e-7f);
        assertEquals(0.5f, tracker.getNewValue(9), 1e-7f); // halfway between
        assertEquals(0.2f, tracker.getNewValue(14), 1e-7f);
        assertEquals(0.2f, tracker.getNewValue(1000), 1e-7f);
        for (int n = 5; n <= 14; n++) {
            assertEquals(
                    -1, Float.compare(tracker.getNewValue(n), tracker.getNewValue(n - 1)), "" + n);
        }
    }

    @Test
    void getNewValue_noWarmup_startsBelowThePeak() {
        WarmupCosineTracker tracker =
                WarmupCosineTracker.builder().setPeak(1).setUpdates(2).build();

        assertEquals(1f, tracker.getNewValue(0), 0f);
        assertEquals(0.5f, tracker.getNewValue(1), 1e-7f);
        assertEquals(0f, tracker.getNewValue(2), 0f);
    }

    @Test
    void build_missingOrImpossibleNumbers_areRefused() {
        WarmupCosineTracker.Builder noPeak = WarmupCosineTracker.builder().setUpdates(10);
        assertThrows(IllegalArgumentException.class, noPeak::build);
        WarmupCosineTracker.Builder noLength = WarmupCosineTracker.builder().setPeak(1);
        assertThrows(IllegalArgumentException.class, noLength::build);
        WarmupCosineTracker.Builder tooLong =
                WarmupCosineTracker.builder().setPeak(1).setUpdates(10).optWarmup(11);
        assertThrows(IllegalArgumentException.class, tooLong::build);
    }
}
