package org.djlmoe.serving;

import java.util.Arrays;

/**
 * Which slot of fast memory holds which expert: ids only.
 *
 * <p>A slot belongs to an expert of a layer, is held aside for an expert that may be asked for
 * soon, or is free. All slots are alike, so an expert changes layers and sides without a copy.
 */
final class SlotTable {

    private final int[][] slots;
    private final int[] free;
    private int numFree;

    SlotTable(int layers, int experts, int total) {
        slots = new int[layers][experts];
        for (int[] layer : slots) {
            Arrays.fill(layer, -1);
        }
        free = new int[total];
        // The lowest slots are taken first, so that those never needed are never touched.
        for (int s = 0; s < total; s++) {
            free[s] = total - 1 - s;
        }
        numFree = total;
    }

    /** Returns the slot of an expert, or -1. */
    int slot(int layer, int expert) {
        return slots[layer][expert];
    }

    int free() {
        return numFree;
    }

    /** Takes a free slot for nobody yet. */
    int take() {
        if (numFree == 0) {
            throw new IllegalStateException("No slot is free");
        }
        return free[--numFree];
    }

    /** Gives a taken slot to an expert. */
    void assign(int layer, int expert, int slot) {
        if (slots[layer][expert] >= 0) {
            throw new IllegalStateException(
                    "Expert " + expert + " of layer " + layer + " has a slot already");
        }
        slots[layer][expert] = slot;
    }

    /** Frees a taken slot that was given to no expert. */
    void giveBack(int slot) {
        free[numFree++] = slot;
    }

    /** Frees the slot of an expert. */
    void release(int layer, int expert) {
        int slot = slots[layer][expert];
        if (slot < 0) {
            throw new IllegalStateException(
                    "Expert " + expert + " of layer " + layer + " has no slot");
        }
        slots[layer][expert] = -1;
        giveBack(slot);
    }
}
