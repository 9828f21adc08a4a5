package org.djlmoe.optimizer;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import net.jqwik.api.ForAll;
import net.jqwik.api.Property;
import net.jqwik.api.constraints.IntRange;
import net.jqwik.api.constraints.Size;
import org.djlmoe.optimizer.BucketLayout.Slab;

class BucketLayoutTest {

    @Property
    void pack_anySizes_coversEveryElementOnceCutsAtUnitsAndFillsBuckets(
            @ForAll @Size(max = 12) List<@IntRange(min = 0, max = 400) Integer> sizes,
            @ForAll @IntRange(min = 1, max = 300) int bucket) {
        Map<String, Long> elements = new LinkedHashMap<>();
        sizes.forEach(size -> elements.put("p" + elements.size(), (long) size));

        List<List<Slab>> buckets = BucketLayout.pack(elements, bucket);

        long unit = bucket < BucketLayout.UNIT ? 1 : BucketLayout.UNIT;
        Map<String, Long> next = new HashMap<>();
        for (int b = 0; b < buckets.size(); b++) {
            long used = 0;
            for (Slab slab : buckets.get(b)) {
                assertTrue(slab.length() > 0);
                assertEquals(0, slab.start() % unit);
                assertEquals(used, slab.offset());
                assertEquals(next.getOrDefault(slab.path(), 0L), slab.start());
                next.put(slab.path(), slab.start() + slab.length());
                used += slab.length();
            }
            assertTrue(used <= bucket);
            assertTrue(b == buckets.size() - 1 || used > bucket - unit);
        }
        elements.forEach((path, size) -> assertEquals(size, next.getOrDefault(path, 0L)));
    }
}
