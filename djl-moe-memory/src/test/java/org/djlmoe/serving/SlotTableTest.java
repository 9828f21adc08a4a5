package org.djlmoe.serving;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import net.jqwik.api.constraints.Size;
import org.junit.jupiter.api.Test;

class SlotTableTest {

    @Property(tries = 200)
    void table_anyOperations_everySlotHasOneOwner(
            @ForAll @Size(max = 200) List<@IntRange(max = 11) Integer> operations) {
        SlotTable table = new SlotTable(2, 6, 5);
        Map<Integer, Integer> expected = new HashMap<>();
        for (int operation : operations) {
            int layer = operation / 6;
            int expert = operation % 6;
            if (table.slot(layer, expert) >= 0) {
                table.release(layer, expert);
                expected.remove(operation);
            } else if (table.free() > 0) {
                int slot = table.take();
                table.assign(layer, expert, slot);
                expected.put(operation, slot);
            } else {
                assertThrows(IllegalStateException.class, table::take);
            }
            assertEquals(5 - expected.size(), table.free());
            Set<Integer> distinct = new HashSet<>(expected.values());
            assertEquals(expected.size(), distinct.size());
            expected.forEach((id, slot) -> assertEquals(slot, table.slot(id / 6, id % 6)));
            assertTrue(distinct.stream().allMatch(s -> s >= 0 && s < 5));
        }
    }

    @Test
    void take_givenBack_takenAgain() {
        SlotTable table = new SlotTable(1, 2, 1);
        int slot = table.take();
        assertEquals(0, slot);
        table.giveBack(slot);
        assertEquals(1, table.free());
        table.assign(0, 1, table.take());
        assertThrows(IllegalStateException.class, () -> table.assign(0, 1, 0));
        assertThrows(IllegalStateException.class, () -> table.release(0, 0));
    }

    @Property(tries = 200)
    void routes_anyIds_everyRouteOnceInOrderOfTheFirst(
            @ForAll @Size(min = 1, max = 60) List<@IntRange(max = 7) Integer> choices) {
        long[] ids = choices.stream().mapToLong(Integer::longValue).toArray();
        Routes routes = new Routes(ids, 8);
        int seen = 0;
        long last = -1;
        for (int e : routes.experts()) {
            assertTrue(routes.has(e));
            assertTrue(routes.of(e)[0] > last);
            last = routes.of(e)[0];
            long before = -1;
            for (long route : routes.of(e)) {
                assertEquals(e, ids[(int) route]);
                assertTrue(route > before);
                before = route;
                seen++;
            }
        }
        assertEquals(ids.length, seen);
    }
}
