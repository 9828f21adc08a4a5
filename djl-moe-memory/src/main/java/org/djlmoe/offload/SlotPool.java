package org.djlmoe.offload;

import java.util.ArrayList;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.djlmoe.tier.SlotTier;

/**
 * Slots within a budget, used again and again.
 *
 * <p>The budget counts what slots really take, idle ones too: idle slots are kept since the first
 * write of a new one is dear, and are freed only where their room is needed for a slot of another
 * size.
 */
final class SlotPool implements AutoCloseable {

    private final SlotTier tier;
    private final long budget;
    private final Map<SlotTier.Slot, Long> sizes = new HashMap<>();
    private final List<SlotTier.Slot> idle = new ArrayList<>();
    private long allocated;
    private boolean closed;

    SlotPool(SlotTier tier, long budget) {
        this.tier = tier;
        this.budget = budget;
    }

    /** Returns a slot for an array, or null if the budget does not hold it. */
    synchronized SlotTier.Slot acquire(long bytes) {
        if (closed) {
            return null;
        }
        long size = tier.sizeOf(bytes);
        SlotTier.Slot best = null;
        long idleBytes = 0;
        for (SlotTier.Slot slot : idle) {
            long capacity = sizes.get(slot);
            idleBytes += capacity;
            // A slot of more than twice the size is better freed than half used.
            if (capacity >= size
                    && capacity <= 2 * size
                    && (best == null || capacity < sizes.get(best))) {
                best = slot;
            }
        }
        if (best != null) {
            idle.remove(best);
            return best;
        }
        if (size > budget - (allocated - idleBytes)) {
            return null;
        }
        idle.sort(Comparator.comparing(sizes::get));
        while (size > budget - allocated) {
            free(idle.remove(0));
        }
        SlotTier.Slot slot = tier.newSlot(size);
        sizes.put(slot, size);
        allocated += size;
        return slot;
    }

    /** Takes a slot back whose content is no longer needed. */
    synchronized void release(SlotTier.Slot slot) {
        if (closed) {
            return;
        }
        if (!sizes.containsKey(slot) || idle.contains(slot)) {
            throw new IllegalStateException("The slot is not in use");
        }
        idle.add(slot);
    }

    /** Takes a slot back that could not be written; it is not used again. */
    synchronized void discard(SlotTier.Slot slot) {
        if (!closed && sizes.containsKey(slot)) {
            free(slot);
        }
    }

    private void free(SlotTier.Slot slot) {
        allocated -= sizes.remove(slot);
        slot.close();
    }

    /** Bytes that all slots take. */
    synchronized long allocated() {
        return allocated;
    }

    /** Number of slots, in use or idle. */
    synchronized int slots() {
        return sizes.size();
    }

    /** Number of slots in use. */
    synchronized int inUse() {
        return sizes.size() - idle.size();
    }

    synchronized boolean isClosed() {
        return closed;
    }

    @Override
    public synchronized void close() {
        if (!closed) {
            closed = true;
            sizes.clear();
            idle.clear();
            allocated = 0;
            tier.close();
        }
    }
}
