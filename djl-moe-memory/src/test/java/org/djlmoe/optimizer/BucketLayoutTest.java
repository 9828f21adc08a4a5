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
    void pack_anySizes_coversEveryElementOnceAndFillsBuckets(
            @ForAll @Size(max = 12) List<@IntRange(min = 0, max = 40) Integer> sizes,
            @ForAll @IntRange(min = 1, max = 50) int bucket) {
        Map<String, Long> elements = new LinkedHashMap<>();
        sizes.forEach(size -> elements.put("p" + elements.size(), (long) size));

        List<List<Slab>> buckets = BucketLayout.pack(elements, bucket);

        long total = sizes.stream().mapToLong(Integer::longValue).sum();
        assertEquals((total + bucket - 1) / bucket, buckets.size());
        Map<String, Long> next = new HashMap<>();
        for (int b = 0; b < buckets.size(); b++) {
            long used = 0;
            for (Slab slab : buckets.get(b)) {
                assertTrue(slab.length() > 0);
                assertEquals(used, slab.offset());
                assertEquals(next.getOrDefault(slab.path(), 0L), slab.start());
                next.put(slab.path(), slab.start() + slab.length());
                used += slab.length();
            }
            assertTrue(b == buckets.size() - 1 ? used <= bucket : used == bucket);
        }
        elements.forEach((path, size) -> assertEquals(size, next.getOrDefault(path, 0L)));
    }
}
