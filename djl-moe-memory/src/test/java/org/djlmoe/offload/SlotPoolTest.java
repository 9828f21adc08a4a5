package org.djlmoe.offload;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import ai.djl.ndarray.NDArray;
import java.util.ArrayList;
import java.util.List;
import java.util.Random;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import net.jqwik.api.constraints.LongRange;
import net.jqwik.api.constraints.Size;
import org.djlmoe.tier.SlotTier;
import org.junit.jupiter.api.Test;

class SlotPoolTest {

    /** Counts what is really allocated, in blocks. */
    private static final class CountingTier implements SlotTier {

        private final long block;
        private long bytes;
        private int made;

        CountingTier(long block) {
            this.block = block;
        }

        @Override
        public long sizeOf(long size) {
            return (size + block - 1) / block * block;
        }

        @Override
        public long available() {
            return Long.MAX_VALUE;
        }

        @Override
        public Slot newSlot(long size) {
            assertEquals(0, size % block);
            bytes += size;
            made++;
            return new Slot() {
                private boolean open = true;

                @Override
                public void write(NDArray source) {
                    throw new AssertionError();
                }

                @Override
                public void read(NDArray target) {
                    throw new AssertionError();
                }

                @Override
                public void close() {
                    assertTrue(open, "freed twice");
                    open = false;
                    bytes -= size;
                }
            };
        }

        @Override
        public void close() {
            bytes = 0;
        }
    }

    @Property(tries = 300)
    void acquire_anySequence_budgetIsNeverExceededAndNoSlotIsUsedTwice(
            @ForAll @Size(max = 60) List<@IntRange(min = -30, max = 100) Integer> steps,
            @ForAll @LongRange(min = 1, max = 400) long budget,
            @ForAll @IntRange(min = 1, max = 16) int block) {
        CountingTier tier = new CountingTier(block);
        SlotPool pool = new SlotPool(tier, budget);
        List<SlotTier.Slot> used = new ArrayList<>();
        List<Long> sizes = new ArrayList<>();
        Random random = new Random(steps.hashCode());
        for (int step : steps) {
            if (step <= 0) {
                if (!used.isEmpty()) {
                    int i = random.nextInt(used.size());
                    pool.release(used.remove(i));
                    sizes.remove(i);
                }
                continue;
            }
            SlotTier.Slot slot = pool.acquire(step);
            if (slot != null) {
                assertTrue(used.stream().noneMatch(other -> other == slot), "used twice");
                used.add(slot);
                sizes.add((long) step);
            } else {
                // Refused only where the slots in use, at most twice what lies in them, leave no
                // room.
                long most = sizes.stream().mapToLong(size -> 2 * tier.sizeOf(size)).sum();
                assertTrue(most + tier.sizeOf(step) > budget, "refused though there is room");
            }
            assertTrue(tier.bytes <= budget, tier.bytes + " bytes of " + budget);
            assertEquals(tier.bytes, pool.allocated());
            assertEquals(used.size(), pool.inUse());
        }
        pool.close();
        assertEquals(0, tier.bytes);
    }

    @Test
    void acquire_sameSizesStepAfterStep_noNewSlots() {
        CountingTier tier = new CountingTier(1);
        SlotPool pool = new SlotPool(tier, 350);
        for (int step = 0; step < 100; step++) {
            List<SlotTier.Slot> slots = new ArrayList<>();
            for (int i = 0; i < 3; i++) {
                slots.add(pool.acquire(100));
                assertNotNull(slots.get(i));
            }
            // the first come, and the fourth stays where it is
            assertNull(pool.acquire(100));
            slots.forEach(pool::release);
        }
        assertEquals(3, tier.made);
        assertEquals(300, pool.allocated());
    }

    @Test
    void acquire_otherSizeThanBefore_idleSlotsMakeRoom() {
        CountingTier tier = new CountingTier(1);
        SlotPool pool = new SlotPool(tier, 200);
        pool.release(pool.acquire(90));
        SlotTier.Slot kept = pool.acquire(80); // reuses the 90
        assertEquals(90, pool.allocated());
        pool.release(pool.acquire(100));
        assertEquals(190, pool.allocated());
        assertNull(pool.acquire(111));
        assertNotNull(pool.acquire(110)); // in place of the 100
        assertEquals(200, pool.allocated());
        pool.release(kept);
        assertSame(kept, pool.acquire(50));
    }

    @Test
    void release_slotThatIsNotInUse_refused() {
        SlotPool pool = new SlotPool(new CountingTier(1), 200);
        SlotTier.Slot slot = pool.acquire(10);
        pool.release(slot);
        assertThrows(IllegalStateException.class, () -> pool.release(slot));
    }

    @Test
    void discard_slotThatCouldNotBeWritten_roomIsFreeAndSlotGone() {
        SlotPool pool = new SlotPool(new CountingTier(1), 200);
        SlotTier.Slot slot = pool.acquire(150);
        pool.discard(slot);
        assertEquals(0, pool.allocated());
        assertNotNull(pool.acquire(200));
    }
}
